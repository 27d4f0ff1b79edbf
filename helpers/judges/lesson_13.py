"""Judges of the exercises of lesson 13.

Two of them run the learner's function in real ranks, which end the ranks that were open
before.
"""

import functools
import inspect
from numbers import Real

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from helpers import Messages
from helpers.check import NotYet, Wrong, exercise
from helpers.judges.real_ranks import in_ranks

TWO, THREE = 2, 3  # ranks


@exercise("13.1")
def messages_and_bytes(messages, nbytes) -> None:
    """DDP, the fifth step, two small batches a step, no `no_sync`."""
    first, second, third = 256 * 1024 + 1024, 1024 * 1024 + 1024, 1024 * 100 + 100
    parameters = first + second + third
    for answer in (messages, nbytes):
        if isinstance(answer, bool) or not isinstance(answer, Real):
            raise Wrong(f"two numbers are wanted, not {answer!r}")
    if messages == 12:
        raise Wrong("DDP does not send each of the six tensors; it sends buckets")
    if messages in (6, 3):
        raise Wrong("the last layer alone does not fill a bucket of 1 MiB")
    if messages == 1:
        raise Wrong("one bucket for all is only the first step; and count `backward()`")
    if messages == 2:
        raise Wrong("each `backward()` sends, since nothing says `no_sync`")
    if messages != 4:
        raise Wrong("count the buckets, and how often `backward()` runs in a step")
    reasons = {
        parameters: "a float32 has 4 bytes, and `backward()` runs twice in a step",
        2 * parameters: "a float32 has 4 bytes",
        4 * parameters: "that is one `backward()`; a step has two",
        4 * 4 * parameters: "one rank hands over its own gradients, not those of all",
        8 * 4 * parameters: "one rank hands over its own gradients, not those of all",
        8 * (parameters - 1024 - 1024 - 100): "biases are parameters, too",
    }
    if nbytes in reasons:
        raise Wrong(reasons[nbytes])
    if nbytes != 8 * parameters:
        raise Wrong("4 bytes for each parameter, biases included, each `backward()`")


# -- real ranks ------------------------------------------------------------------------


class _Rows(Dataset):
    """Rows of digits that note who asked for them."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor):
        self.x, self.y, self.asked = x, y, []

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(row)
        return self.x[row], self.y[row]


def _train(function, count: int, epochs: int) -> tuple[list[int], list]:
    """The rows that this rank took, in order, and its weights."""
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    generator = torch.Generator().manual_seed(13)
    x = torch.randn(count, 8, generator=generator).to(device)
    y = torch.randint(0, 4, (count,), generator=generator).to(device)
    torch.manual_seed(0)
    rows, model = _Rows(x, y), nn.Linear(8, 4).to(device)
    function(DistributedDataParallel(model), rows, epochs)
    return rows.asked, [p.detach().cpu() for p in model.parameters()]


def _reference(asked: list[list[int]], epochs: int, scale: float) -> list[torch.Tensor]:
    """The weights of one process that takes the rows of both ranks together."""
    generator = torch.Generator().manual_seed(13)
    count = len(asked[0]) * TWO // epochs
    x = torch.randn(count, 8, generator=generator)
    y = torch.randint(0, 4, (count,), generator=generator)
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for start in range(0, len(asked[0]), 16):
        rows = [row for own in asked for row in own[start : start + 16]]
        optimizer.zero_grad()
        (cross_entropy(model(x[rows]), y[rows]) * scale).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _near(weights: list, reference: list) -> bool:
    pairs = zip(weights, reference, strict=True)
    return all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)


@exercise("13.2")
def train_right(function) -> None:
    """A loop with `set_epoch` and a loss that is divided by nothing."""
    count, epochs = 64, 3
    results = in_ranks(TWO, _train, function, count, epochs)
    asked = [rows for rows, _ in results]
    if not asked[0]:
        torch.manual_seed(0)
        if _near(results[0][1], [p.detach() for p in nn.Linear(8, 4).parameters()]):
            raise NotYet("your function takes no rows so far")
        raise Wrong("no rows were taken in the rank itself; leave `num_workers` at 0")
    each = count // TWO
    if any(len(rows) != each * epochs for rows in asked):
        raise Wrong(
            f"in {epochs} epochs rank 0 took {len(asked[0])} rows and rank 1 "
            f"{len(asked[1])}; each has half of {count} in an epoch"
        )
    order = [asked[0][i * each : (i + 1) * each] for i in range(epochs)]
    if order[0] == order[1]:
        raise Wrong("epochs 0 and 1 have the same order: who tells the sampler?")
    if order[1] == order[2]:
        raise Wrong("epochs 1 and 2 have the same order; tell the sampler each epoch")
    if set(order[0]) & set(asked[1][:each]):
        raise Wrong("both ranks took the same rows; keep the DistributedSampler")
    weights = [own for _, own in results]
    if not _near(weights[0], weights[1]):
        raise Wrong("the ranks end with different weights; use the model as it comes")
    for scale, reason in (
        (1 / TWO, "the loss is still divided by the ranks, which DDP does already"),
        (TWO, "the gradients are too large: DDP takes the mean, so leave the loss"),
    ):
        if _near(weights[0], _reference(asked, epochs, scale)):
            raise Wrong(reason)
    if not _near(weights[0], _reference(asked, epochs, 1.0)):
        raise Wrong(
            "the weights are not those of one process with the same rows; keep SGD "
            "with lr=0.5, 16 rows a rank, and one step for each batch"
        )


def _checked(hook):
    """The hook, with a reason where DDP would end the process or report a bug.

    It waits for the result, which is harmless with the one bucket of `_step_with`.
    """

    @functools.wraps(hook)
    def checked(state, bucket):
        future = hook(state, bucket)
        if not isinstance(future, torch._C.Future):  # the base class: as a Work's is
            what = type(future).__name__
            raise TypeError(f"the hook returned {what}; DDP wants a future")
        value = future.wait()
        if isinstance(value, list):
            raise TypeError(
                "the future of an all-reduce holds a list; take [0] with .then"
            )
        if not isinstance(value, torch.Tensor):
            what = type(value).__name__
            raise TypeError(f"the future holds {what}; DDP wants a tensor")
        numbers, wanted = value.numel(), bucket.buffer().numel()
        if numbers != wanted:
            raise ValueError(f"the future holds {numbers} numbers instead of {wanted}")
        return future

    return checked


def _step_with(hook) -> tuple[list, list, list]:
    """Messages of a step, gradients with the hook, gradients without."""
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(32, 24, generator=generator).to(device)
    found = []
    for use in (hook, None):
        torch.manual_seed(0)
        layers = nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 3)
        model = DistributedDataParallel(nn.Sequential(*layers).to(device))
        if use is not None:
            model.register_comm_hook(None, _checked(use))
        with Messages() as messages:
            model(x).square().mean().backward()
        log = [(m.name, m.dtype, m.nbytes) for m in messages.log]
        found += [log, [p.grad.cpu() for p in model.parameters()]]
    return found[0], found[1], found[3]


class _Bucket:
    """Stands for a bucket, to see whether a hook looks at it."""

    def __getattr__(self, name: str):
        raise LookupError(name)


def _is_unwritten(hook) -> bool:
    try:
        return hook(None, _Bucket()) is None
    except Exception:  # it does something
        return False


@exercise("13.3")
def send_bfloat16(hook) -> None:
    """A communication hook that averages in bfloat16."""
    if not callable(hook):
        raise Wrong(f"a function is wanted, not {hook!r}")
    if "bucket" not in inspect.signature(hook).parameters:
        raise Wrong("call the second parameter `bucket`; DDP looks for that name")
    if _is_unwritten(hook):
        raise NotYet("your hook returns nothing so far")
    results = in_ranks(THREE, _step_with, hook)  # so that 2 is a wrong divisor
    numbers = sum(g.numel() for g in results[0][1])
    log = results[0][0]
    sent = sum(nbytes for _, _, nbytes in log)
    for name, _, _ in log:
        if name != "all_reduce":
            raise Wrong(f"it uses {name}; an all-reduce is enough")
    if not log:
        raise Wrong("nothing was sent, so each rank keeps its own gradients")
    if sent == 4 * numbers:
        raise Wrong(f"it sends {sent} bytes, as many as without a hook")
    if {dtype for _, dtype, _ in log} != {"bfloat16"}:
        raise Wrong(f"it sends {log[0][1]}, not bfloat16")
    if sent != 2 * numbers:
        raise Wrong(f"it sends {sent} bytes; 2 for each of {numbers} would be enough")
    for rank, (_, gradients, exact) in enumerate(results):
        _judge_gradients(rank, gradients, exact)


def _judge_gradients(rank: int, gradients: list, exact: list) -> None:
    """Raises `Wrong` unless they are the mean, as near as bfloat16 comes."""
    gradient, wanted = (
        torch.cat([g.flatten() for g in gs]) for gs in (gradients, exact)
    )
    factor = (gradient @ wanted / wanted.square().sum()).item()
    if ((gradient - factor * wanted).norm() / wanted.norm()).item() < 0.02 * factor:
        if abs(factor / THREE - 1) < 0.02:
            raise Wrong("the gradients are the sum over the ranks; a mean is wanted")
        if abs(factor * THREE - 1) < 0.02:
            raise Wrong("the gradients were divided twice by the number of ranks")
        if abs(factor - 1) > 0.02:
            raise Wrong(
                f"the gradients are {factor:.2f} times the mean over {THREE} ranks; "
                "ask `dist.get_world_size()`"
            )
    error = ((gradient - wanted).norm() / wanted.norm()).item()
    if not error < 0.02:
        raise Wrong(
            f"rank {rank}: the gradients are {error:.0%} off; does the future hold "
            "the result of the all-reduce, and has it arrived?"
        )
