"""Judges of the exercises of lesson 18."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from helpers.check import Wrong, call, exercise, number

# -- 18.1 ------------------------------------------------------------------------------

_PARTS = {
    64: "64 parts on each of 16 GPUs are 8192 rows a step: the 512 are split",
    1: "32 rows for each GPU, and 8 fit",
    32: "32 are the rows of each GPU in a step; 8 of them make a part",
    8: "8 are the rows of a part; how many parts make a GPU's rows of a step?",
    16: "16 are the GPUs; how many parts make one GPU's rows of a step?",
}
_BYTES = {
    496_000_000: "that is the gradient itself; round the ring it goes nearly twice",
    992_000_000: "in each of two rounds a rank keeps its own sixteenth: times 15/16",
    465_000_000: "that is the reduce-scatter; an all-gather follows",
    3_720_000_000: "DDP sends once in a step, after the last part, not after each",
    232_500_000: "a float32 has 4 bytes",
    930: "in bytes, not in millions of them",
    7_440_000_000: "in bytes, not in bits",
}


@exercise("18.1")
def moved_to_16(accumulate, nbytes) -> None:
    """512 rows, 16 GPUs, 8 rows in a part; a ring of 16 ranks."""
    accumulate = number(accumulate, "accumulate")
    nbytes = number(nbytes, "nbytes")
    if accumulate != 4:
        raise Wrong(
            "accumulate: " + _PARTS.get(accumulate, "512 rows, 16 GPUs, 8 rows a part")
        )
    if abs(nbytes - 930_000_000) > 1:
        hint = "2 · 15/16 of the gradient's bytes"
        why = _BYTES.get(round(nbytes), f"a ring of 16 ranks sends {hint}")
        raise Wrong(f"nbytes: {why}")


# -- 18.2 ------------------------------------------------------------------------------

LETTERS, PADDING = 7, -100


class _Model(nn.Module):
    """A layer for each letter; it notes how many rows it is given."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.letter, self.head = nn.Embedding(LETTERS, 8), nn.Linear(8, LETTERS)
        self.seen: list[int] = []

    def forward(self, x):
        self.seen.append(len(x))
        return self.head(self.letter(x).tanh())


def _texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Seven rows of six letters; their lengths differ."""
    generator = torch.Generator().manual_seed(18)
    x = torch.randint(LETTERS, (7, 6), generator=generator)
    y = torch.randint(LETTERS, (7, 6), generator=generator)
    for row, length in enumerate((6, 5, 1, 2, 6, 3, 1)):
        y[row, length:] = PADDING
    return x, y


def _gradients(how) -> torch.Tensor:
    """What a way to the loss makes of the parameters, behind one another."""
    model, (x, y) = _Model(), _texts()
    how(model, x, y).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def _loss(model, x, y, reduction="mean"):
    return cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction)


def _of_parts(divide):
    def loss(model, x, y):
        pairs = list(zip(x.split(3), y.split(3), strict=True))
        return sum(divide(model, *pair, y, len(pairs)) for pair in pairs)

    return loss


_MISTAKES = (
    (
        _of_parts(lambda model, x, y, _, parts: _loss(model, x, y) / parts),
        "the parts have different numbers of letters, so a mean of their means is not "
        "the mean: add up, and divide by all letters that count",
    ),
    (
        _of_parts(lambda model, x, y, *_: _loss(model, x, y)),
        "each part's mean counts fully; divide sums by all letters that count",
    ),
    (
        _of_parts(
            lambda model, x, y, every, _: _loss(model, x, y, "sum") / every.numel()
        ),
        "you divide by all places; those with -100 do not count",
    ),
    (
        _of_parts(lambda model, x, y, *_: _loss(model, x, y, "sum")),
        "that is the sum; divide by the letters that count, in the whole batch",
    ),
    (
        _of_parts(
            lambda model, x, y, every, _: _loss(model, x, y) * len(x) / len(every)
        ),
        "weigh a part by its letters that count, not by its rows",
    ),
    (
        lambda model, x, y: sum(
            _loss(model, x[i : i + 1], y[i : i + 1]) / len(x) for i in range(len(x))
        ),
        "that is the mean of each row's mean; a long row counts more than a short one",
    ),
)


@exercise("18.2")
def padded(backward) -> None:
    """The gradient of a batch in parts, where rows have different lengths."""
    model, (x, y) = _Model(), _texts()
    loss = call(backward, model, x, y, 3)
    if not isinstance(loss, (int, float)) and not isinstance(loss, torch.Tensor):
        raise Wrong(f"return the mean loss, not a {type(loss).__name__}")
    if max(model.seen, default=0) > 3:
        raise Wrong(f"with most=3 the model was given {max(model.seen)} rows at once")
    if sum(model.seen) != len(x):
        raise Wrong(
            f"the model was given {sum(model.seen)} rows, the batch has {len(x)}"
        )
    if any(p.grad is None for p in model.parameters()):
        raise Wrong("no gradient is there: call backward() for each part")
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    if not torch.allclose(found, _gradients(_loss), rtol=0, atol=1e-6):
        for way, why in _MISTAKES:
            if torch.allclose(found, _gradients(way), rtol=0, atol=1e-6):
                raise Wrong(why)
        raise Wrong("the gradients are not those of the whole batch")
    right = _loss(_Model(), x, y).item()
    told = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
    if not abs(told - right) <= 1e-5:  # nan is refused, too
        raise Wrong(
            f"the gradients are right; the mean loss is {right:.4f}, and you return "
            f"{told:.4f}"
        )


# -- 18.3 ------------------------------------------------------------------------------

WIDTH = 64


@exercise("18.3")
def steady_mask(mask) -> None:
    """Zeros and ones that belong to a row and a step, and to nothing else."""
    rows = torch.randperm(2990, generator=torch.Generator().manual_seed(3))[:32]
    first = call(mask, 5, rows, WIDTH)
    if not isinstance(first, torch.Tensor) or first.shape != (32, WIDTH):
        what = f"a {type(first).__name__}"
        if isinstance(first, torch.Tensor):
            what = tuple(first.shape)
        raise Wrong(f"for 32 rows and width {WIDTH} return (32, {WIDTH}), not {what}")
    first = first.float()
    if not torch.isin(first, torch.tensor([0.0, 1.0])).all():
        raise Wrong("a mask has zeros and ones only")
    torch.manual_seed(first.sum().int().item() + 1)  # as if other numbers were drawn
    if not torch.equal(mask(5, rows, WIDTH).float(), first):
        raise Wrong("asked again, as after a restart, the mask is another one")
    for rank in range(4):
        if not torch.equal(mask(5, rows[rank::4], WIDTH).float(), first[rank::4]):
            raise Wrong(
                f"rank {rank} of 4 gets another mask for its rows than one process: "
                "draw each row's by itself"
            )
    if torch.equal(mask(6, rows, WIDTH).float(), first):
        raise Wrong("step 6 has the mask of step 5")
    if torch.equal(first[0], first[1]):
        raise Wrong("all rows have the same mask")
    some = torch.arange(40)
    many = torch.cat([mask(step, some, 256).float() for step in range(10)])
    if len(many.unique(dim=0)) < len(many):
        raise Wrong(
            "some row of some step has the mask of another: each pair of a step and a "
            "row needs a seed of its own"
        )
    zeros = 1 - first.mean().item()
    if not 0.07 < zeros < 0.13:
        raise Wrong(f"{zeros:.0%} are zeros, it should be about 10 %")
