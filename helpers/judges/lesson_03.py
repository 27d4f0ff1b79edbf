"""Judges of the exercises of lesson 03."""

import contextlib
import gc

import torch
from torch import nn
from torch.nn.functional import mse_loss

from helpers.check import Wrong, call, exercise

MIB = 2**20


@exercise("03.1")
def mib_after_forward(answer) -> None:
    """MiB of two weights, momentum, x, what GELU and its follower keep, the output."""
    weights, inputs, hidden, output = 8, 4, 16, 4
    right = 2 * weights + inputs + 2 * hidden + output
    reasons = {
        right - hidden: "GELU keeps its input and the next layer keeps GELU's output: "
        "two tensors, unlike with a ReLU",
        right - weights: "from the first step on, momentum is one number a weight",
        right - hidden - weights: "momentum and GELU's input are missing",
        right - inputs: "count x, and the output that `square` keeps",
        right + weights: "after zero_grad() there are no gradients, and momentum is "
        "one number a weight, where Adam has two",
        right + output: "neither the squares nor a loss from `mean` stay as large as "
        "the output",
    }
    if answer in reasons:
        raise Wrong(reasons[answer])
    if answer in (right * MIB, right * MIB + 512):
        raise Wrong("these are bytes; the answer is in MiB")
    if not isinstance(answer, (int, float)) or abs(answer - right) > 0.1:
        raise Wrong(
            "add up, in MiB: weights, momentum, x, GELU's input and output, the output"
        )


@exercise("03.2")
def lean_evaluation(function) -> None:
    """A function (model, batches) -> (losses, first rows), which keeps nothing else."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda()
    data = torch.rand(4, 2, 512, 256, generator=generator).cuda()
    batches = [(x, y) for x, y in data]
    wanted = [[], []]
    with torch.no_grad():
        for x, y in batches:
            wanted[0].append(mse_loss(model(x), y).cpu())
            wanted[1].append(model(x)[0].cpu())
    gc.collect()
    model(batches[0][0]).sum().backward()  # takes what libraries take at first use
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call(function, model, batches)
    gc.collect()
    held = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    with contextlib.suppress(TypeError):
        results = [list(part) for part in results]
    if not isinstance(results, list) or [len(part) for part in results] != [4, 4]:
        raise Wrong("it should return two lists: a loss and a row for each batch")
    _judge_values(results, wanted)
    kept = [(what, part) for what, part in zip(("loss", "row"), results, strict=True)]
    for what, part in kept:
        nbytes = part[0].untyped_storage().nbytes()
        if nbytes > 4096 and part[0].data_ptr() != part[1].data_ptr():
            raise Wrong(
                f"a {what} of {part[0].nbytes:,} bytes keeps a storage of "
                f"{nbytes:,}; detach() is not enough"
            )
    if held > 8 * 1024 + 4096:
        raise Wrong(f"{held:,} bytes live when it has returned; who holds them?")
    most = 5.5 * MIB  # a hidden layer's input and output, an output, a loss and an old
    if peak > most:
        raise Wrong(
            f"its peak is {peak / MIB:.1f} MiB, and {most / MIB:.1f} would do: run the "
            "model without gradients, and keep no batch until the next"
        )


def _judge_values(results, wanted) -> None:
    for what, part, right in zip(("loss", "row"), results, wanted, strict=True):
        for i, (a, b) in enumerate(zip(part, right, strict=True)):
            if not isinstance(a, torch.Tensor):
                raise Wrong(f"{what} {i} is a {type(a).__name__}, not a tensor")
            if a.device.type != "cuda":
                raise Wrong(f"{what} {i} is on {a.device}; leave it on the GPU")
            if a.requires_grad:
                raise Wrong(f"{what} {i} still has its graph, and the graph its batch")
            if a.shape != b.shape:
                raise Wrong(f"{what} {i} is {tuple(a.shape)}, not {tuple(b.shape)}")
            if not torch.allclose(a.cpu(), b, rtol=1e-3, atol=1e-4):
                raise Wrong(f"{what} {i} has another value than before")


@exercise("03.3")
def largest_batch(rows) -> None:
    """Rows of a three-layer model that trains with Adam on 512 MiB.

    Tried: 35,840 fit, and 35,841 do not, because segments are rounded to 2 MiB.
    """
    fits, row = 35_840, 2048
    if not isinstance(rows, (int, float)):
        raise Wrong("the answer is a number of rows")

    def near(parts: int, memory: float = 512 * MIB) -> bool:
        """Whether the answer follows from so many tensors as large as x."""
        guess = (memory - 10 * MIB) / (parts * row)
        return abs(rows - guess) < 0.03 * guess

    if abs(rows - fits) <= 0.04 * fits:
        return
    reasons = {
        8: "8 tensors are never there at once: nobody names the output, so it is free "
        "before the worst moment; or one gradient is counted twice",
        6: "one of 7 tensors is missing: x, y, two activations, the loss, and two "
        "gradients of activations",
        5: "the gradients of activations come in twos: one comes in, one goes out",
        4: "in backward() there are also two gradients of activations, and mse_loss's "
        "result",
    }
    for parts, reason in reasons.items():
        if near(parts):
            raise Wrong(reason)
    if near(7, 512 * MIB / 4) or near(7, 512 * MIB * 4):
        raise Wrong("a number is 4 bytes")
    if rows > fits:
        raise Wrong(f"{rows:,} rows do not fit: what is there at the last ReLU?")
    raise Wrong(f"{rows:,} rows fit with room to spare")
