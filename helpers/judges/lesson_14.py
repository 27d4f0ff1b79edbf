"""Judges of the exercises of lesson 14.

Two of them run the learner's answer in two real ranks, which end the ranks that were
open before.
"""

import logging
from fnmatch import fnmatch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu

from helpers.check import NotYet, Wrong, exercise
from helpers.judges.real_ranks import in_ranks

TWO = 2  # ranks


@exercise("14.1")
def handed_over(slices_bytes, rows_bytes, tokens_equal) -> None:
    """24 blocks of width 1024, 2048 tokens, float32."""
    blocks, width, tokens = 24, 1024, 2048
    slices = 4 * blocks * 4 * tokens * width
    rows = 4 * blocks * 12 * width**2
    reasons = {
        slices / 2: "that is one pass; backward has two all-reduces a block, too",
        slices / 4: "a number in float32 has 4 bytes; and count all four all-reduces",
        slices / 8: "a rank hands over the activations of the whole batch, not 1/8",
        1.5 * slices: "a block needs two all-reduces forward and two backward",
        1.75 * slices: "leave out the ring: the question is what is handed over",
    }
    if slices_bytes in reasons:
        raise Wrong(f"slices: {reasons[slices_bytes]}")
    if slices_bytes != slices:
        raise Wrong(
            "slices: four all-reduces a block, each of tokens x width numbers of 4 "
            "bytes"
        )
    reasons = {
        rows / 4: "a gradient in float32 has 4 bytes",
        rows / 8: "a rank hands over the gradients of all weights, not of 1/8",
        1.75 * rows: "leave out the ring: the question is what is handed over",
        2 * rows: "gradients are sent once a step, in backward()",
    }
    if rows_bytes in reasons:
        raise Wrong(f"rows: {reasons[rows_bytes]}")
    if rows_bytes != rows:
        raise Wrong("rows: 4 bytes for each weight, 12 x width x width of them a block")
    if tokens_equal == width * 12:
        raise Wrong("tokens: slices have four all-reduces a block, not one")
    if tokens_equal == 6 * width:
        raise Wrong("tokens: count the backward pass of the slices, too")
    if tokens_equal not in (3 * width, 3 * width + 1):
        raise Wrong("tokens: set both numbers of bytes equal and solve for the tokens")


# -- two real ranks --------------------------------------------------------------------


class _Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 64, bias=False)
        self.up = nn.Linear(16, 64, bias=False)
        self.down = nn.Linear(64, 16, bias=False)

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


def _gated_step(model) -> tuple[torch.Tensor, list]:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(14))
    out = model(x.to(next(model.parameters()).device))
    out = out.full_tensor() if hasattr(out, "full_tensor") else out
    out.square().sum().backward()
    return out.detach().cpu(), [p.grad for p in model.parameters()]


def _run_plan(plan) -> tuple:
    """Output, whole gradients, bytes of each weight here, messages of forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from helpers import Messages

    # An impossible product is logged with its traceback before it is raised.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    torch.manual_seed(0)
    model = _Gated().to(device)
    parallelize_module(model, init_device_mesh(device, (TWO,)), plan)
    sizes = {
        name: (p.to_local() if hasattr(p, "to_local") else p).nbytes
        for name, p in model.named_parameters()
    }
    with Messages() as messages, torch.no_grad():
        model(torch.ones(4, 16, device=device))
    out, gradients = _gated_step(model)
    gradients = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
    return out, [g.cpu() for g in gradients], sizes, messages.by_name()


_MEANINGS = {
    "same reduction dim": (
        "a layer gets the wrong part of its input: a column-wise layer takes the whole "
        "input, a row-wise one takes the slice that a column-wise one has made"
    )
}


@exercise("14.2")
def gated_plan(plan) -> None:
    """gate and up column-wise, down row-wise."""
    if not isinstance(plan, dict):
        raise Wrong('a plan is a dictionary, such as {"up": ColwiseParallel()}')
    names = ("gate", "up", "down")
    missing = [n for n in names if not any(fnmatch(n, str(key)) for key in plan)]
    if missing:
        raise Wrong(
            f"the plan says nothing of {missing[0]}, so all ranks keep it whole"
        )
    if any(isinstance(style, type) for style in plan.values()):
        raise Wrong("a style is an object: ColwiseParallel(), with brackets")
    results = in_ranks(TWO, _run_plan, plan, meanings=_MEANINGS)
    torch.manual_seed(0)
    model = _Gated()
    out, gradients = _gated_step(model)
    for rank, (own, found, sizes, messages) in enumerate(results):
        if own.shape != out.shape or not torch.allclose(own, out, atol=1e-5):
            raise Wrong(f"rank {rank} has another output than one process")
        pairs = zip(found, gradients, strict=True)
        if not all(torch.allclose(a, b, atol=1e-4) for a, b in pairs):
            raise Wrong(f"rank {rank} has other gradients than one process")
        for name, p in model.named_parameters():
            if sizes[name] != p.nbytes // TWO:
                raise Wrong(f"rank {rank} has more than half of {name}")
        if messages != {"all_reduce": (1, out.nbytes)}:
            said = ", ".join(f"{count} {kind}" for kind, (count, _) in messages.items())
            raise Wrong(
                f"the output is right, but the forward pass sends {said or 'nothing'}; "
                "one all-reduce is enough, at the end"
            )


def _run_loss(function, scores, y) -> tuple[float, list]:
    from helpers import Messages

    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    part = scores.chunk(TWO, 1)[dist.get_rank()].contiguous().to(device)
    with Messages() as messages:
        loss = function(part, y.to(device), part.shape[1] * dist.get_rank())
    loss = None if loss is None else torch.as_tensor(loss).cpu()
    return loss, [(m.name, m.nbytes) for m in messages.log]


@exercise("14.3")
def sliced_loss(function) -> None:
    """Cross-entropy from halves of the vocabulary, with three small all-reduces."""
    generator = torch.Generator().manual_seed(14)
    scores = torch.randn(32, 100, generator=generator) * 3
    y = torch.randint(100, (32,), generator=generator)
    every_other_row = 200.0 * (torch.arange(32) % 2)[:, None]
    for name, these in (
        ("", scores),
        (" with scores of 200 and more", scores + 200),
        (" with scores of 200 and more in every other row", scores + every_other_row),
    ):
        want = cross_entropy(these, y)
        results = in_ranks(TWO, _run_loss, function, these, y)
        losses = [loss for loss, _ in results]
        if any(loss is None for loss in losses):
            raise NotYet("your function returns nothing so far")
        if any(loss.numel() != 1 for loss in losses):
            raise Wrong("return one number, the mean over the rows")
        for rank, loss in enumerate(losses):
            if not loss.isfinite().all():
                raise Wrong(
                    f"the loss is {loss.item()}{name}: exp overflows, or is 0 in every "
                    "column; take off the largest score of each row first, the "
                    "largest of all ranks"
                )
            if torch.allclose(loss, want * len(y), rtol=1e-3):
                raise Wrong("that is the sum over the rows, not the mean")
            if not torch.allclose(loss, want, atol=1e-3):
                raise Wrong(
                    f"rank {rank} has {loss.item():.4f}, one process {want:.4f}{name}"
                )
        for _, log in results:
            row = 4 * len(y)
            large = [(kind, nbytes) for kind, nbytes in log if nbytes > row]
            if large or any(kind == "all_gather" for kind, _ in log):
                kind, nbytes = (large or log)[0]
                raise Wrong(
                    f"the loss is right, but a rank hands {nbytes:,} bytes to an "
                    f"{kind}; all-reduces of {row} bytes, one number a row, will do"
                )
            if len(log) > 3:
                raise Wrong(f"the loss is right, but {len(log)} messages are too many")
