"""The exercises of lesson 19: bytes of slices, a gated layer, and a sliced loss.

Two of them run the learner's answer in two real ranks, which end the ranks that were
open before.
"""

import logging
from fnmatch import fnmatch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import parallel
from torch.nn.functional import cross_entropy, silu

from exercises.counted import counted, is_near
from exercises.exercise import Wrong, call, exercise, must_be_callable, run, solution
from exercises.in_ranks import device, in_ranks
from exercises.learning import flat
from exercises.results import a, near

TWO = 2  # ranks


@exercise(
    "19.1",
    hints=(
        "How many all-reduces does a block need, forward and backward together, and "
        "how large is the tensor in each of them? A sliced layer still computes for "
        "all tokens.",
        "DDP gives 4 bytes for each of the 12 x width x width weights of a block. Set "
        "this equal to the bytes of the slices, as a formula in the number of tokens.",
    ),
)
def sliced_bytes(sliced, tokens_equal) -> None:
    """24 blocks of width 1024, 2048 tokens, float32."""
    blocks, width, tokens = 24, 1024, 2048
    right = 4 * blocks * 4 * tokens * width
    mistakes = {
        right / 2: "that is one pass; backward has two all-reduces a block, too",
        right / 4: "a number in float32 has 4 bytes; and count all four all-reduces",
        right / 8: "a rank gives the activations of all tokens, not 1/8 of them",
        1.5 * right: "a block needs two all-reduces forward and two backward",
        1.75 * right: "leave out the ring: the question is what a rank gives",
    }
    why = "four all-reduces a block, each of tokens x width numbers of 4 bytes"
    counted(sliced, right, mistakes, why, what="slices", unit=1)
    if tokens_equal == 3 * width + 1:  # the first number for which they give more
        return
    mistakes = {
        width * 12: "slices have four all-reduces a block, not one",
        6 * width: "count the backward pass of the slices, too",
        3 * width / 8: "DDP's gradients are those of all weights, on every rank",
    }
    why = "set both numbers of bytes equal and solve for the tokens"
    counted(tokens_equal, 3 * width, mistakes, why, what="tokens")


@solution("19.1")
def solution_1():
    """With slices, every all-reduce carries an activation of all tokens.

    Each rank computes one term of a sum, and each term has the full shape: tokens times
    width. A block needs four such sums. Two are where the slices end, in forward. Two
    are where they begin, in backward. The number of ranks does not matter.

    With DDP, a rank has a gradient for every weight and gives each of them to an
    all-reduce once in a step. The number of tokens does not matter.

    Both ways give the same number of bytes in a block if

        4 · tokens · width = 12 · width²

    With more tokens than that, the slices give more.
    """
    blocks = 24
    width = 1024
    tokens = 2048
    bytes_of_a_number = 4

    activation = tokens * width * bytes_of_a_number
    all_reduces_of_a_block = 2 + 2  # forward and backward
    sliced_bytes = blocks * all_reduces_of_a_block * activation

    tokens_equal = 12 * width**2 // (all_reduces_of_a_block * width)
    return sliced_bytes, tokens_equal


# -- two real ranks --------------------------------------------------------------------


class _Gated(nn.Module):
    """The module of the exercise, always with the same weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(16, 64, bias=False)
        self.up = nn.Linear(16, 64, bias=False)
        self.down = nn.Linear(64, 16, bias=False)

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


def _whole(t: torch.Tensor) -> torch.Tensor:
    """A tensor, or all of one that is in parts, on the CPU."""
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().cpu()


def _gated_step(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and gradients, in full."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(14))
    out = model(x.to(next(model.parameters()).device))
    (
        out.full_tensor() if hasattr(out, "full_tensor") else out
    ).square().sum().backward()
    return _whole(out), flat(_whole(p.grad) for p in model.parameters())


def _run_plan(plan) -> tuple:
    """Output, full gradients, bytes of each weight here, messages of forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from helpers import Messages

    # An impossible product is logged with its traceback before it is raised.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    model = _Gated().to(device())
    run(parallelize_module, model, init_device_mesh(device(), (TWO,)), plan)
    sizes = {
        name: (p.to_local() if hasattr(p, "to_local") else p).nbytes
        for name, p in model.named_parameters()
    }
    with Messages() as messages, torch.no_grad():
        run(model, torch.ones(4, 16, device=device()))
    return *run(_gated_step, model), sizes, messages.by_name()


_MEANINGS = {
    "same reduction dim": (
        "a layer gets the wrong part of its input: a column-wise layer takes all of "
        "its input, a row-wise one takes the slice that a column-wise one has made"
    )
}


@exercise(
    "19.2",
    hints=(
        "Compare this module with `up` and `down` of a GPT block. Which layers read "
        "all of `x`, and which layer reads what the slices before it have computed?",
        "The product `silu(gate(x)) * up(x)` multiplies slice by slice, so both "
        "factors must be cut in the same way. The plan needs an entry for each of "
        "the three layers, and the output should be added up only once, at the end.",
    ),
)
def plan_of_gated(plan) -> None:
    """gate and up column-wise, down row-wise."""
    if not isinstance(plan, dict):
        raise Wrong('a plan is a dictionary, such as {"up": ColwiseParallel()}')
    names = ("gate", "up", "down")
    missing = [n for n in names if not any(fnmatch(n, str(key)) for key in plan)]
    if missing:
        raise Wrong(
            f"the plan says nothing of {missing[0]}, so all ranks keep all of it"
        )
    if any(isinstance(style, type) for style in plan.values()):
        raise Wrong("a style is an object: ColwiseParallel(), with brackets")
    results = in_ranks(TWO, _run_plan, plan, meanings=_MEANINGS)
    model = _Gated()
    out, wanted = _gated_step(model)
    for rank, (own, found, sizes, messages) in enumerate(results):
        if not near(own, out, atol=1e-5):
            raise Wrong(f"rank {rank} has another output than one process")
        if not near(found, wanted, atol=1e-4):
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


@solution("19.2")
def solution_2():
    """`silu` and the product treat each number by itself, so they work on slices.

    `gate` and `up` both read all of `x`. If both are cut by their outputs, a rank
    has the same part of the hidden numbers from each of them, and can
    multiply the two without asking the other ranks.

    `down` reads these hidden numbers. Cut by its inputs, it takes exactly the slice
    that its rank has, and computes one term of the output. The only all-reduce of the
    forward pass adds up these terms.
    """
    gated_plan = {
        "gate": parallel.ColwiseParallel(),
        "up": parallel.ColwiseParallel(),
        "down": parallel.RowwiseParallel(),
    }
    return gated_plan


def _run_loss(function, scores, y) -> tuple[torch.Tensor, list]:
    """This rank's loss, and its messages."""
    from helpers import Messages

    part = scores.chunk(TWO, 1)[dist.get_rank()].contiguous().to(device())
    with Messages() as messages:
        loss = call(function, part, y.to(device()), part.shape[1] * dist.get_rank())
    if not isinstance(loss, (float, torch.Tensor)):
        raise Wrong(f"return one number, not {a(type(loss).__name__)}")
    loss = torch.as_tensor(loss).detach().double().cpu()
    return loss, [(m.name, m.nbytes) for m in messages.log]


@exercise(
    "19.3",
    hints=(
        "Write the loss of one row as a formula, and mark the numbers in it that "
        "depend on all columns. Which part of each can a rank compute from its own "
        "columns, and which operation puts the parts together?",
        "Each row needs its own largest score, and that of all ranks, before you take "
        "`exp`. Only one rank has the column of the right word. What do the other "
        "ranks contribute, for which `targets - first` is no column of theirs?",
    ),
)
def loss_in_slices(function) -> None:
    """Cross-entropy from halves of the vocabulary, with three small all-reduces."""
    must_be_callable(function)
    generator = torch.Generator().manual_seed(14)
    scores = torch.randn(32, 100, generator=generator) * 3
    y = torch.randint(100, (32,), generator=generator)
    every_other_row = 200.0 * (torch.arange(32) % 2)[:, None]
    for name, these in (
        ("", scores),
        (" with scores of 200 and more", scores + 200),
        (" with scores of 200 and more in every other row", scores + every_other_row),
    ):
        want = cross_entropy(these, y).double()
        results = in_ranks(TWO, _run_loss, function, these, y)
        for rank, (loss, log) in enumerate(results):
            _check_loss(rank, loss, want, name)
            _check_messages(log, 4 * len(y))


@solution("19.3")
def solution_3():
    """Three numbers of a row depend on all columns, and three all-reduces make them.

    The first is the largest score. Each rank takes the maximum of its own columns, and
    an all-reduce with `MAX` gives all ranks the maximum of the full row. After it is
    subtracted, no score is above zero, and `exp` cannot overflow. In at least one
    column of the row the score is exactly zero, so the sum cannot become 0 either.

    The second is the sum of the exponentials, which is a sum of the ranks' sums.

    The third is the score of the right word. One rank has it, and the others add zero.
    Comparing the number of each column with `targets` finds the word without
    an index that could be out of range.

    The logarithm of the sum is too small by the largest score, which is added again.
    """

    def loss_in_slices(scores, targets, first):
        largest = scores.max(dim=1).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)

        total = (scores - largest[:, None]).exp().sum(dim=1)
        dist.all_reduce(total)

        words = first + torch.arange(scores.shape[1], device=scores.device)
        is_right = words == targets[:, None]
        right = torch.where(is_right, scores, 0.0).sum(dim=1)
        dist.all_reduce(right)

        losses = total.log() + largest - right
        return losses.mean()

    return loss_in_slices


def _check_loss(rank: int, loss: torch.Tensor, want: torch.Tensor, name: str) -> None:
    if loss.numel() != 1:
        raise Wrong("return one number, the mean over the rows")
    if not loss.isfinite().all():
        raise Wrong(
            f"the loss is {loss.item()}{name}: exp overflows, or is 0 in every "
            "column; take off the largest score of each row first, the "
            "largest of all ranks"
        )
    if is_near(loss.item(), 32 * want.item(), 1e-3):
        raise Wrong("that is the sum over the rows, not the mean")
    if not abs(loss.item() - want.item()) <= 1e-3:
        raise Wrong(f"rank {rank} has {loss.item():.4f}, one process {want:.4f}{name}")


def _check_messages(log: list[tuple[str, int]], row: int) -> None:
    """At most three numbers a row, in at most three all-reduces."""
    too_much = sum(nbytes for _, nbytes in log) > 3 * row and len(log) <= 3
    if too_much or any(kind == "all_gather" for kind, _ in log):
        kind, nbytes = max(log, key=lambda message: message[1])
        raise Wrong(
            f"the loss is right, but a rank gives {nbytes:,} bytes to an "
            f"{kind}; all-reduces of {row} bytes, one number a row, will do"
        )
    if len(log) > 3:
        raise Wrong(f"the loss is right, but {len(log)} messages are too many")
