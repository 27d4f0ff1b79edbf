"""The exercises of lesson 19: adapters, a gated layer, and a sliced loss.

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

from exercises.counted import is_near, word
from exercises.exercise import (
    NotYet,
    Wrong,
    call,
    exercise,
    must_be_callable,
    run,
    solution,
)
from exercises.in_ranks import device, in_ranks
from exercises.learning import flat
from exercises.results import a, near

TWO = 2  # ranks


# -- 19.1: adapters, whose ranks are two slices in this process ------------------------

TOKENS, WIDTH, THIN = 6, 8, 4
_CUTS = {"columns": 1, "rows": 0, "whole": None}
_NAMES = ("query.A", "query.B", "out.A", "out.B")


def _cut(tensor: torch.Tensor, cut: str, rank: int) -> torch.Tensor:
    """What a rank has of a tensor."""
    return tensor if cut == "whole" else tensor.chunk(TWO, _CUTS[cut])[rank]


def _product(layer: str, x, a_part, b_part) -> torch.Tensor:
    try:
        return x @ a_part @ b_part
    except RuntimeError:
        shapes = [tuple(tensor.shape) for tensor in (x, a_part, b_part)]
        raise Wrong(
            f"{layer}: with {WIDTH} numbers a token, a rank of two would multiply "
            "{} by {} by {}, which do not fit together".format(*shapes)
        ) from None


def _terms(cuts: dict[str, str]) -> set[str]:
    """The matrices whose gradient on a rank is not that of its part of the matrix."""
    generator = torch.Generator().manual_seed(19)
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    found = set()
    for layer, has, needs in (
        ("query", "whole", "columns"),
        ("out", "columns", "whole"),
    ):
        names = f"{layer}.A", f"{layer}.B"
        full = [
            torch.randn(shape, generator=generator).requires_grad_()
            for shape in ((WIDTH, THIN), (THIN, WIDTH))
        ]
        weights = torch.randn(TOKENS, WIDTH, generator=generator)
        (x @ full[0] @ full[1] * weights).sum().backward()
        for rank in range(TWO):
            parts = [
                _cut(matrix.detach(), cuts[name], rank).clone().requires_grad_()
                for name, matrix in zip(names, full, strict=True)
            ]
            result = _product(layer, _cut(x, has, rank), *parts)
            wanted = _cut(weights, needs, rank)
            if result.shape != wanted.shape:
                raise Wrong(
                    f"{layer}: a rank gets {tuple(result.shape)} from its parts, and "
                    f"needs {tuple(wanted.shape)}, to be added to its x W"
                )
            (result * wanted).sum().backward()
            for name, matrix, part in zip(names, full, parts, strict=True):
                if not near(part.grad, _cut(matrix.grad, cuts[name], rank), atol=1e-4):
                    found.add(name)
    return found


@exercise(
    "19.1",
    hints=(
        "Which numbers of each token does a rank have before `query`, and which before "
        "`out`? Write down the shapes of x, A and B on a rank. After `out`, g adds.",
        "A matrix that is whole gets its gradient from one slice on each rank. Compare "
        "with x at f. A matrix that is cut is on one rank only.",
    ),
)
def adapters(cuts, terms) -> None:
    """A whole and B by columns at query, A by rows and B whole at out."""
    if not isinstance(cuts, dict) or set(cuts) != set(_NAMES):
        raise Wrong(f"cuts is a dictionary with the keys {', '.join(_NAMES)}")
    if any(cut is ... for cut in cuts.values()):
        raise NotYet("replace the ... with your answer")
    cuts = {name: word(cut) for name, cut in cuts.items()}
    for name, cut in cuts.items():
        if cut not in _CUTS:
            raise Wrong(f'{name}: "columns", "rows" or "whole", not {cut!r}')
    right = _terms(cuts)
    if not isinstance(terms, (str, list, tuple, set)):
        raise Wrong(f"terms is a list of names, not {a(type(terms).__name__)}")
    said = {terms} if isinstance(terms, str) else {str(name) for name in terms}
    if unknown := said - set(_NAMES):
        raise Wrong(f"terms has names such as query.A, not {unknown.pop()!r}")
    for name in _NAMES:
        if name in right - said:
            raise Wrong(
                f"the cuts are right; but the gradient of {name} on a rank comes from "
                "that rank's slice alone, and the ranks' copies drift apart, silently"
            )
        if name in said - right:
            raise Wrong(
                f"the cuts are right; but {name} is cut, and each rank has all of its "
                "part's gradient: a hook would add gradients of other numbers"
            )


@solution("19.1")
def solution_1():
    """An adapter is two matmuls, and takes the slices that its layer has.

    Before `query`, a rank has all of x, and it needs its columns of the result. So A is
    whole, and B is cut by columns, as the weight of `query` is.

    Before `out`, a rank has a slice of x. A is cut by rows, and gives a term of x A.
    With all of B, a rank gets a term of the result, which it adds to its term of x W.
    The all-reduce that is there adds up both.

    Where a matrix is whole, each rank computes its gradient from its own slice. This is
    a term, as with x at f. Without a hook that adds, the copies drift apart.
    """
    cuts = {"query.A": "whole", "query.B": "columns", "out.A": "rows", "out.B": "whole"}
    terms = ["query.A", "out.B"]
    return cuts, terms


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
