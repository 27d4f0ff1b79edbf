"""The roofline explorer: where the kernels of the classifier's step lie on a card.

A kernel's place is its FLOPs for each byte and its FLOPs a second. The log of the
simulator has the FLOPs of matmuls only; every other kernel is counted as one FLOP for
each element that it computes, and a sum as one for each element that it adds.
"""

import math
import multiprocessing
from typing import NamedTuple

import torch
from torch import nn

import simgpu
from helpers import draw
from helpers.explore.explorer import Explorer, choice, slider
from simgpu import CARDS
from simgpu.costs import LAUNCH

NUMBERS = ("float32", "tf32", "bfloat16")
_LEAST = 0.03  # of the time of all kernels: what a picture names

# Tensors of the size of the result that a kernel reads and writes; the others: two
_TENSORS = {"threshold_backward": 3, "_foreach_add_": 3, "sum": 1}


class Kernel(NamedTuple):
    """What a kernel does and takes, on a simulated card."""

    name: str
    flops: int
    nbytes: int
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOPs for each byte."""
        return self.flops / self.nbytes


def roofline() -> Explorer:
    """The kernels of the classifier's step under the roof of a card.

    Taught in 08-find-what-binds.
    """
    return Explorer(
        _explored,
        doublings=slider("batch = 2 to the power of", 15, 5, 17),
        width=choice("width", (128, 512, 2048, 8192), 512),
        depth=choice("depth", (1, 2, 4)),
        card=choice("card", tuple(CARDS), "A100"),
        numbers=choice("numbers", NUMBERS, "float32"),
    )


def step_kernels(
    batch: int,
    width: int = 512,
    depth: int = 1,
    card: str = "A100",
    numbers: str = "float32",
) -> list[Kernel]:
    """The kernels of one training step of the classifier, in their order.

    Args:
        batch: images of a step.
        width: of its hidden layers.
        depth: how many hidden layers it has.
        card: a key of `CARDS`.
        numbers: one of `NUMBERS`; "bfloat16" is for weights and images as well.

    Taught in 08-find-what-binds.
    """
    asked = batch, width, depth, card, numbers
    if simgpu.is_running() or not torch.cuda.is_initialized():
        return _simulated(*asked)
    # a process that uses real GPUs cannot simulate others
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_simulated, asked)


def _simulated(
    batch: int, width: int, depth: int, card: str, numbers: str
) -> list[Kernel]:
    """The same, in this process."""
    dtype = torch.bfloat16 if numbers == "bfloat16" else torch.float32
    made = {"dtype": dtype, "device": "meta"}
    layers = [nn.Linear(64, width, **made), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width, **made), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10, **made))
    images = torch.empty(batch, 64, **made)
    labels = torch.empty(batch, dtype=torch.int64, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Kernel] = []

    def step(model, images, labels):
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        torch.cuda.synchronize()
        found.extend(_kernel(event, dtype) for event in simgpu.timeline().events)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if numbers == "tf32" else "highest")
    try:
        simgpu.estimate(step, model, images, labels, card=card)
    finally:
        torch.set_float32_matmul_precision(before)
    return found


def _kernel(event, dtype: torch.dtype) -> Kernel:
    elements = event.nbytes // (dtype.itemsize * _TENSORS.get(event.name, 2))
    flops = event.flops or max(elements, 1)
    return Kernel(event.name, flops, event.nbytes, event.end - event.start)


def _explored(doublings: int, width: int, depth: int, card: str, numbers: str):
    return roofline_picture(2**doublings, width, depth, card, numbers)


def roofline_picture(
    batch: int,
    width: int = 512,
    depth: int = 1,
    card: str = "A100",
    numbers: str = "float32",
) -> draw.Picture:
    """The longest kernels of a step under the card's roof, and what binds the step.

    Args and source as of `step_kernels`.

    Taught in 08-find-what-binds.
    """
    kernels = step_kernels(batch, width, depth, card, numbers)
    total = sum(kernel.seconds for kernel in kernels)
    launching = len(kernels) * LAUNCH
    groups: dict[tuple, list[Kernel]] = {}
    for kernel in kernels:
        place = round(8 * math.log10(kernel.intensity)), kernel.name.endswith("mm")
        groups.setdefault(place, []).append(kernel)
    points = []
    for group in groups.values():
        seconds = sum(kernel.seconds for kernel in group)
        if seconds >= _LEAST * total:
            longest = max(group, key=lambda kernel: kernel.seconds)
            part = 0.1 * seconds  # of a kernel that is named
            names = {kernel.name: None for kernel in group if kernel.seconds > part}
            named = ", ".join(names)
            rate = longest.flops / longest.seconds
            words = f"{named} {seconds / total:.0%}"
            points.append((words, longest.intensity, rate))
    title = (
        f"{card}, {numbers}, batch {batch:,}, simulated: "
        f"kernels {1e6 * total:,.0f} µs, launches {1e6 * launching:,.0f} µs"
    )
    chosen = CARDS[card]
    roof = (f"{card}, {numbers}", chosen.flops[numbers], chosen.memory_bandwidth)
    return draw.roofline(title, [roof], points)
