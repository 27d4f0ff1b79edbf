"""The exercises of lesson 16: averages without AVG, buckets, and a hook.

Two of them run the learner's function in real ranks, which end the ranks that were open
before.
"""

import functools
import inspect
import unittest.mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from exercises.counted import counted, is_near, name_mistake
from exercises.exercise import NotYet, Wrong, exercise, must_be_callable, run, solution
from exercises.in_ranks import device, in_ranks
from exercises.learning import factor, gradients, off
from exercises.results import near
from helpers import Messages

TWO, THREE = 2, 3  # ranks


@exercise(
    "16.2",
    hints=(
        "Two numbers make the messages, the buckets of one `backward()` and the "
        "calls of `backward()` in a step. What does the lesson say about when a "
        "bucket is full, and with which layer does DDP begin?",
        "From the second step on, the first bucket is full when it has reached 1 "
        "MiB and the others at 25 MiB. Add up the bytes of weights and biases from "
        "the last layer on, and see which tensor fills the first bucket. Does "
        "anything in the loop make DDP wait for the second half?",
    ),
)
def messages_and_bytes(messages, nbytes) -> None:
    """DDP, the fifth step, two small batches a step, no `no_sync`."""
    mistakes = {
        12: "DDP does not send each of the six tensors; it sends buckets",
        6: "the last layer alone does not fill a bucket of 1 MiB",
        3: "the last layer alone does not fill a bucket of 1 MiB",
        1: "one bucket for all is only the first step; and count `backward()`",
        2: "each `backward()` sends, since nothing says `no_sync`",
    }
    why = "count the buckets, and how often `backward()` runs in a step"
    counted(messages, 4, mistakes, why, what="messages")
    first, second, third = 256 * 1024 + 1024, 1024 * 1024 + 1024, 1024 * 100 + 100
    parameters = first + second + third
    mistakes = {
        parameters: "a float32 has 4 bytes, and `backward()` runs twice in a step",
        2 * parameters: "a float32 has 4 bytes",
        4 * parameters: "that is one `backward()`; a step has two",
        4 * 4 * parameters: "one rank hands over its own gradients, not those of all",
        8 * 4 * parameters: "one rank hands over its own gradients, not those of all",
        8 * (parameters - 1024 - 1024 - 100): "biases are parameters, too",
    }
    why = "4 bytes for each parameter, biases included, each `backward()`"
    counted(nbytes, 8 * parameters, mistakes, why, what="nbytes", unit=1)


@solution("16.2")
def solution_2():
    """Each `backward()` sends all gradients, in two buckets, and a step has two calls.

    DDP fills its buckets from the last layer on. The last layer alone has 0.4 MB, which
    is less than 1 MiB, so the middle layer joins it in the first bucket and fills it.
    The first layer has 1.05 MB and is the second bucket, which may have up to 25 MiB.

    Nothing says `no_sync`, so both halves send. A rank hands over one float32 number
    for each parameter, biases included, in each `backward()`.
    """
    layers = [(256, 1024), (1024, 1024), (1024, 100)]
    buckets = [0]  # bytes of each
    for inputs, outputs in reversed(layers):
        for numbers in outputs, outputs * inputs:  # the bias, the weight
            full = 2**20 if len(buckets) == 1 else 25 * 2**20
            if buckets[-1] >= full:
                buckets.append(0)
            buckets[-1] += 4 * numbers
    halves = 2
    messages = halves * len(buckets)
    nbytes = halves * sum(buckets)
    return messages, nbytes


# -- real ranks ------------------------------------------------------------------------


def _average(function) -> tuple[list, list, list]:
    """Gradients of this rank before and after, and their mean over the ranks."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)).to(device())
    model(torch.randn(5, 8, device=device())).square().mean().backward()
    own = [p.grad.cpu().clone() for p in model.parameters()]
    mean = [p.grad.clone() for p in model.parameters()]
    for grad in mean:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    all_reduce = dist.all_reduce

    def without_avg(tensor, op=dist.ReduceOp.SUM, *args, **kwargs):
        if op == dist.ReduceOp.AVG:
            raise Wrong("this time without AVG: add up, then divide")
        return all_reduce(tensor, op, *args, **kwargs)

    with unittest.mock.patch.object(dist, "all_reduce", without_avg):
        run(function, model)
    if any(p.grad is None for p in model.parameters()):
        raise Wrong("a parameter has no `.grad` any more; write the average into it")
    found = [p.grad.cpu() for p in model.parameters()]
    return own, found, [grad.cpu() for grad in mean]


@exercise(
    "16.1",
    hints=(
        "`average_each` of the lesson has the loop. What does `dist.all_reduce` do "
        "when it is given no `op`?",
        "Without an `op`, every rank gets the sum over the ranks. By which number "
        "must each gradient then be divided, on any number of ranks?",
    ),
)
def average_by_sum(function) -> None:
    """A function that averages the gradients of a model, with sums only."""
    must_be_callable(function)
    for size in (TWO, THREE):
        for own, found, mean in in_ranks(size, _average, function):
            _check_average(size, own, found, mean)


def _check_average(size: int, own: list, found: list, mean: list) -> None:
    if all(near(a, b) for a, b in zip(found, mean, strict=True)):
        return
    if all(torch.equal(a, b) for a, b in zip(found, own, strict=True)):
        raise NotYet("your function leaves each rank its own gradients so far")
    for factor_, why in (
        (size, "the gradients are the sum over the ranks; divide by their number"),
        (1 / size, "the gradients were divided twice by the number of ranks"),
        (size / TWO, "it divides by 2 in three ranks, too; ask how many there are"),
    ):
        if all(near(a, b * factor_) for a, b in zip(found, mean, strict=True)):
            raise Wrong(f"in {size} ranks: {why}")
    if all(near(a, b / size) for a, b in zip(found, own, strict=True)):
        raise Wrong("each rank divides its own gradients, and nothing is added up")
    if near(found[0], mean[0]):
        raise Wrong("the first parameter is right, and a later one is not")
    raise Wrong(f"in {size} ranks the gradients are not the mean over the ranks")


@solution("16.1")
def solution_average():
    """Add up over the ranks, then divide by their number.

    `dist.all_reduce` adds up if nothing else is said. Each rank then has the sum of all
    gradients. Divided by `dist.get_world_size()`, the sum is the mean, in place.
    """
    import torch.distributed as dist

    def average_by_sum(model):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    return average_by_sum


def _checked(hook):
    """The hook, with a reason where DDP would end the process or report a bug.

    It waits for the result, which is harmless with the one bucket of `_step_with`.
    """

    @functools.wraps(hook)
    def checked(state, bucket):
        future = run(hook, state, bucket)
        if not isinstance(future, torch._C.Future):  # the base class: as a Work's is
            what = type(future).__name__
            raise Wrong(f"the hook returned {what}; DDP wants a future")
        value = run(future.wait)
        if isinstance(value, list):
            raise Wrong("the future of an all-reduce holds a list; take [0] with .then")
        if not isinstance(value, torch.Tensor):
            what = type(value).__name__
            raise Wrong(f"the future holds {what}; DDP wants a tensor")
        elements, wanted = value.numel(), bucket.buffer().numel()
        if elements != wanted:
            raise Wrong(f"the future holds {elements} numbers instead of {wanted}")
        return future

    return checked


def _step_with(hook) -> tuple[list, torch.Tensor, torch.Tensor]:
    """Messages of a step, gradients with the hook, gradients without."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(32, 24, generator=generator).to(device())
    found = []
    for use in (hook, None):
        torch.manual_seed(0)
        layers = nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 3)
        model = DistributedDataParallel(nn.Sequential(*layers).to(device()))
        if use is not None:
            model.register_comm_hook(None, _checked(use))
        with Messages() as messages:
            model(x).square().mean().backward()
        log = [(m.name, m.dtype, m.nbytes) for m in messages.log]
        found += [log, gradients(model)]
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


@exercise(
    "16.3",
    hints=(
        "The hook stands in place of DDP's own all-reduce. Who then divides by the "
        "number of ranks, and which dtype must the tensor have that you give to "
        "`dist.all_reduce`?",
        "The future of an all-reduce holds a list, and DDP wants a future of one "
        "flat tensor. What does the function that you give to `then` get, and what "
        "must it return? Divide exactly once.",
    ),
)
def send_bfloat16(hook) -> None:
    """A communication hook that averages in bfloat16."""
    if not inspect.isroutine(hook):
        raise Wrong(f"a function is wanted, not {hook!r}")
    if "bucket" not in inspect.signature(hook).parameters:
        raise Wrong("call the second parameter `bucket`; DDP looks for that name")
    if _is_unwritten(hook):
        raise NotYet("your hook returns nothing so far")
    results = in_ranks(THREE, _step_with, hook)  # so that 2 is a wrong divisor
    elements = results[0][1].numel()
    log = results[0][0]
    sent = sum(nbytes for _, _, nbytes in log)
    for name, _, _ in log:
        if name != "all_reduce":
            raise Wrong(f"it uses {name}; an all-reduce is enough")
    if not log:
        raise Wrong("nothing was sent, so each rank keeps its own gradients")
    if sent == 4 * elements:
        raise Wrong(f"it sends {sent} bytes, as many as without a hook")
    if {dtype for _, dtype, _ in log} != {"bfloat16"}:
        raise Wrong(f"it sends {log[0][1]}, not bfloat16")
    if sent != 2 * elements:
        raise Wrong(f"it sends {sent} bytes; 2 for each of {elements} would be enough")
    for rank, (_, found, exact) in enumerate(results):
        _check_mean(rank, found, exact)


@solution("16.3")
def solution_3():
    """The hook replaces DDP's all-reduce, so it must also take the mean itself.

    The gradients are made bfloat16 before they are sent, 2 bytes a number. Each rank
    divides its own by the number of ranks, so the sum over all ranks is the mean.

    With `async_op=True` the all-reduce begins, and `backward()` goes on. Its future
    holds a list with one tensor. `then` returns a new future, whose value is what
    `take_result` returns when the numbers have arrived. `copy_` writes them into the
    bucket's own memory, and makes float32 of them again.
    """
    import torch.distributed as dist

    def send_bfloat16(state, bucket):
        flat = bucket.buffer()
        small = flat.bfloat16() / dist.get_world_size()
        future = dist.all_reduce(small, async_op=True).get_future()

        def take_result(future):
            average = future.value()[0]
            return flat.copy_(average)

        return future.then(take_result)

    return send_bfloat16


def _check_mean(rank: int, found: torch.Tensor, exact: torch.Tensor) -> None:
    """The gradients are the mean over the ranks, as near as bfloat16 comes."""
    times = factor(found, exact, 0.02)
    if times is not None and not is_near(times, 1, 0.02):
        name_mistake(
            times,
            {
                THREE: "the gradients are the sum over the ranks; a mean is wanted",
                1 / THREE: "the gradients were divided twice by the number of ranks",
            },
            0.02,
        )
        raise Wrong(
            f"the gradients are {times:.2f} times the mean over {THREE} ranks; "
            "ask `dist.get_world_size()`"
        )
    error = off(found, exact)
    if not error < 0.02:
        raise Wrong(
            f"rank {rank}: the gradients are {error:.0%} off; does the future hold "
            "the result of the all-reduce, and has it arrived?"
        )
