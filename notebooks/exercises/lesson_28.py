"""The exercises of lesson 28: a job that moves, unequal parts, and a steady dropout."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from exercises.counted import number, word
from exercises.exercise import Wrong, call, exercise, solution
from exercises.learning import gradients
from exercises.results import equal, near, tensor

# -- 28.1 ------------------------------------------------------------------------------

ROWS, FIT, RATE = 512, 8, 3e-4  # of a step, at a time, and the learning rate
_START = {"gpus": 1, "tp": 1, "replicas": 1, "batch": ROWS, "accumulate": 64}
_PLANS = (  # what changes
    {"gpus": 16, "accumulate": 4},
    {"gpus": 16, "accumulate": 64, "batch": 16 * ROWS},
    {"gpus": 16, "accumulate": 4, "tp": 4},
    {"gpus": 16, "accumulate": 16, "tp": 4},
    {"gpus": 16, "accumulate": 4, "replicas": 4},
    {"gpus": 8, "accumulate": 4, "replicas": 2},
    {"gpus": 16, "accumulate": 4, "lr": 4 * RATE},
    {"gpus": 16, "accumulate": 8},
    {"gpus": 24, "accumulate": 3},  # 512 rows are not 24 equal shares
    {"gpus": 9, "accumulate": 7},  # 57 rows in seven parts: one part has 9
    {"gpus": 4, "accumulate": 4, "batch": 128},
    {"gpus": 32, "accumulate": 4, "tp": 2, "replicas": 4},
)
_VERDICTS = "same", "other", "memory", "refused"


def plans() -> list[dict]:
    """Whole plans, as the learner's function gets them."""
    return [{**_START, "lr": RATE, **changed} for changed in _PLANS]


def largest_part(plan: dict) -> int:
    """The most rows that a rank has at a time, with the trainer's own cuts."""
    ranks = plan["gpus"] // plan["tp"]  # with rows of their own
    shares = [torch.arange(plan["batch"])[rank::ranks] for rank in range(ranks)]
    parts = [part for rows in shares for part in rows.tensor_split(plan["accumulate"])]
    return max(map(len, parts))


def becomes(plan: dict) -> str:
    """What the trainer does with a plan."""
    if plan["batch"] != ROWS:
        return "refused"
    if largest_part(plan) > FIT:
        return "memory"
    return "same" if plan["lr"] == RATE else "other"


@exercise(
    "28.1",
    hints=(
        "The losses stay the same if a step still takes the same 512 rows, at the same "
        "learning rate. Which of the options change that, and which only share the "
        "rows out in another way?",
        "Memory: how many groups of GPUs have rows of their own? Ranks that share a "
        "layer compute the same rows; copies of the shards do not. The largest part of "
        "the largest share counts.",
    ),
)
def moved(function) -> None:
    """A function: a plan -> what becomes of the training there."""
    for plan in plans():
        told = ", ".join(f"{name}={value}" for name, value in plan.items())
        said, right = word(call(function, dict(plan), when=f"{told}:")), becomes(plan)
        if said == right:
            continue
        if said not in _VERDICTS:
            raise Wrong(f"{told}: return one of {', '.join(_VERDICTS)}, not {said!r}")
        rows = largest_part(plan)
        if right == "refused":
            why = "a step would have other rows than the one that was interrupted"
        elif right == "memory":
            why = f"some GPU has {rows} rows in a part, and {FIT} fit"
        elif right == "other":
            why = "the rows are the same, but each step is longer"
        elif said == "memory":
            why = f"the largest part of any GPU has {rows} rows, and {FIT} fit"
        else:
            why = "the same rows are shared out in another way, at the same rate"
        raise Wrong(f"{told}: not {said!r}: {why}")


@solution("28.1")
def solution_1():
    """A batch belongs to the step, so GPUs and parts may change, and the batch may not.

    Ranks along `tp` compute the same rows, so `gpus / tp` ranks have rows of their own.
    Copies of the shards have other rows each, as all shards do: `replicas` changes
    nothing here.

    512 rows are not always equal shares, and a share is not always equal parts. One
    part that does not fit is enough to end the training, so both are rounded up.
    """
    import math

    def moved(plan):
        if plan["batch"] != 512:
            return "refused"
        ranks = plan["gpus"] // plan["tp"]
        share = math.ceil(512 / ranks)
        if math.ceil(share / plan["accumulate"]) > 8:
            return "memory"
        return "same" if plan["lr"] == 3e-4 else "other"

    return moved


# -- 28.2 ------------------------------------------------------------------------------

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
    """What a way to the gradients, of 3 rows at most, makes of them."""
    model, (x, y) = _Model(), _texts()
    how(model, x, y, 3)
    return gradients(model)


@exercise(
    "28.2",
    hints=(
        "Look at `take_step` in the lesson. By which number does it divide its sum? "
        "Here some targets are -100: which number takes its place?",
        "The parts have different numbers of letters that count, and so do their "
        "rows. The divisor belongs to the whole batch, so you need it before the "
        "first part goes through the model.",
    ),
)
def padded(backward) -> None:
    """The gradient of a batch in parts, where rows have different lengths."""
    model, (x, y) = _Model(), _texts()
    loss = call(backward, model, x, y, 3)
    if max(model.seen, default=0) > 3:
        raise Wrong(f"with most=3 the model was given {max(model.seen)} rows at once")
    if sum(model.seen) != len(x):
        raise Wrong(
            f"the model was given {sum(model.seen)} rows, the batch has {len(x)}"
        )
    found = gradients(model)
    if not near(found, _gradients(at_once), rtol=0, atol=1e-6):
        for way, why in _MISTAKES.items():
            if near(found, _gradients(way), rtol=0, atol=1e-6):
                raise Wrong(why)
        raise Wrong("the gradients are not those of the whole batch")
    right, told = at_once(_Model(), x, y, 3), number(loss, "the mean loss")
    if not abs(told - right) <= 1e-5:
        raise Wrong(
            f"the gradients are right; the mean loss is {right:.4f}, and you return "
            f"{told:.4f}"
        )


@solution("28.2")
def solution_2():
    """A sum can be cut into parts, a mean cannot.

    The mean loss is the sum over all letters that count, divided by their number in the
    whole batch. Each part contributes its sum, divided by this same number. Gradients
    add up in `backward()`, so they become those of the mean.

    `cross_entropy` with `reduction="sum"` adds zero for a target of -100. `y.numel()`
    would count these places, and a mean of the parts' means would give a letter of a
    short part more weight than a letter of a long one.
    """

    def backward(model, x, y, most):
        letters = (y != -100).sum()
        total = 0.0
        for part_x, part_y in zip(x.split(most), y.split(most), strict=True):
            scores = model(part_x).flatten(0, 1)
            targets = part_y.flatten()
            summed = torch.nn.functional.cross_entropy(scores, targets, reduction="sum")
            loss = summed / letters
            loss.backward()
            total += loss.item()
        return total

    return backward


# -- 28.3 ------------------------------------------------------------------------------

WIDTH = 64


@exercise(
    "28.3",
    hints=(
        "Compare with the sampler `Steps`, which gives the same rows again after a "
        "restart. What does `order_of` use as the seed, and on which numbers may the "
        "seed depend here?",
        "If one call draws the numbers for all `rows`, a row's mask depends on the "
        "rows around it. Each pair of a step and a row needs a seed that no other "
        "pair has. Try whether step 5 and row 6 differ from step 6 and row 5.",
    ),
)
def steady_mask(mask) -> None:
    """Zeros and ones that belong to a row and a step, and to nothing else."""

    def ask(step: int, rows: torch.Tensor, width: int = WIDTH) -> torch.Tensor:
        what = f"for {len(rows)} rows and width {width} the mask is"
        return tensor(call(mask, step, rows, width), what, (len(rows), width)).float()

    rows = torch.randperm(2990, generator=torch.Generator().manual_seed(3))[:32]
    first = ask(5, rows)
    if not torch.isin(first, torch.tensor([0.0, 1.0])).all():
        raise Wrong("a mask has zeros and ones only")
    torch.manual_seed(first.sum().int().item() + 1)  # as if other numbers were drawn
    if not equal(ask(5, rows), first):
        raise Wrong("asked again, as after a restart, the mask is another one")
    for rank in range(4):
        if not equal(ask(5, rows[rank::4]), first[rank::4]):
            raise Wrong(
                f"rank {rank} of 4 gets another mask for its rows than one process: "
                "draw each row's by itself"
            )
    if equal(ask(6, rows), first):
        raise Wrong("step 6 has the mask of step 5")
    if torch.equal(first[0], first[1]):
        raise Wrong("all rows have the same mask")
    some = torch.arange(40)
    many = torch.cat([ask(step, some, 256) for step in range(10)])
    if len(many.unique(dim=0)) < len(many):
        raise Wrong(
            "some row of some step has the mask of another: each pair of a step and a "
            "row needs a seed of its own"
        )
    zeros = 1 - first.mean().item()
    if not 0.07 < zeros < 0.13:
        raise Wrong(f"{zeros:.0%} are zeros, it should be about 10 %")


@solution("28.3")
def solution_3():
    """Each row of each step has a random generator of its own, with a seed of its own.

    The seed is made of the step and the row's number, and of nothing else. A rank that
    has other rows, a restart, or other random numbers drawn in between change nothing.

    The step is multiplied by a number that is larger than any row's number, so no two
    pairs have the same seed. With `step + row` or `step * row` many pairs would share
    one. (The generator of a CPU uses the lowest 32 bits of a seed. With 10,000 that is
    enough for 429,000 steps.)

    `torch.rand` draws evenly between 0 and 1, so about a tenth of the numbers are below
    0.1 and become zeros.
    """

    def mask(step, rows, width):
        more_than_rows = 10_000
        masks = []
        for row in rows.tolist():
            seed = step * more_than_rows + row
            generator = torch.Generator().manual_seed(seed)
            numbers = torch.rand(width, generator=generator)
            masks.append((numbers >= 0.1).float())
        return torch.stack(masks)

    return mask


def in_parts(divide):
    def backward(model, x, y, most):
        pairs, total = list(zip(x.split(most), y.split(most), strict=True)), 0.0
        for xs, ys in pairs:
            loss = divide(model(xs).mT, ys, y, len(pairs))
            loss.backward()
            total += loss.item()
        return total

    return backward


mean_of_means = in_parts(lambda scores, y, _, parts: cross_entropy(scores, y) / parts)
means = in_parts(lambda scores, y, *_: cross_entropy(scores, y))
all_places = in_parts(
    lambda scores, y, every, _: (
        cross_entropy(scores, y, reduction="sum") / every.numel()
    )
)
sums = in_parts(lambda scores, y, *_: cross_entropy(scores, y, reduction="sum"))
by_rows = in_parts(
    lambda scores, y, every, _: cross_entropy(scores, y) * len(y) / len(every)
)


def row_by_row(model, x, y, most):
    total = 0.0
    for xs, ys in zip(x.split(1), y.split(1), strict=True):
        loss = cross_entropy(model(xs).mT, ys) / len(x)
        loss.backward()
        total += loss.item()
    return total


_MISTAKES = {
    mean_of_means: "the parts have different numbers of letters, so a mean of their "
    "means is not the mean: add up, and divide by all letters that count",
    means: "each part's mean counts fully; divide sums by all letters that count",
    all_places: "you divide by all places; those with -100 do not count",
    sums: "that is the sum; divide by the letters that count, in the whole batch",
    by_rows: "weigh a part by its letters that count, not by its rows",
    row_by_row: "that is the mean of each row's mean; a long row counts more than a "
    "short one",
}


def at_once(model, x, y, most):
    loss = cross_entropy(model(x).mT, y)
    loss.backward()
    return loss.item()
