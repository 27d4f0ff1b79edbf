"""Time the stages of a model that is split over GPUs, from one process.

Hooks note when the forward and the backward pass of each stage are launched; the log
of the simulator then says when they ran. What belongs to no stage, such as the loss,
counts for the pass that was launched before it on the same GPU.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

import simgpu
from helpers.gpus import gpu_seconds


class Task(NamedTuple):
    """A pass of one micro-batch through one stage."""

    kind: str  # "F" or "B"
    micro_batch: int
    start: float  # seconds
    end: float


class StageTimes(NamedTuple):
    """What the stages did in one step; on real GPUs only how long it took."""

    seconds: float  # of the step
    tasks: list[list[Task]]  # of each stage
    copies: list[tuple[float, float]]  # start and end of each copy between two GPUs
    computing: float  # seconds, the mean of the stages
    copying: float  # seconds: each copy takes both of its GPUs

    @property
    def counted(self) -> bool:
        """Whether all but `seconds` is known: on simulated GPUs."""
        return any(self.tasks)

    @property
    def idle(self) -> float:
        """The share of the step in which a GPU neither computes nor copies."""
        return 1 - (self.computing + self.copying) / self.seconds


def time_stages(step: Callable, *stages: nn.Module) -> StageTimes:
    """Run a step once and say what each stage did when.

    Args:
        step: a function without arguments: forward and backward of all micro-batches.
        stages: modules; the k-th is on `cuda:k`, and its result is one tensor.

    Taught in 13-split-the-model.
    """
    if not simgpu.is_running():
        nan = float("nan")
        return StageTimes(gpu_seconds(step), [[] for _ in stages], [], nan, nan)
    marks: list[list[tuple[float, str, int]]] = [[] for _ in stages]
    handles = [
        handle for k, stage in enumerate(stages) for handle in _hooks(stage, marks[k])
    ]
    seconds = gpu_seconds(step)
    for handle in handles:
        handle.remove()
    log = simgpu.timeline().events
    kernels = [[e for e in log if _on(e, k)] for k in range(len(stages))]
    pairs = zip(kernels, marks, strict=True)
    tasks = [_tasks(events, noted) for events, noted in pairs]
    between = [
        (event.start, event.end)
        for event in log
        if event.kind == "copy" and "cpu" not in (event.source, event.target)
    ]
    computing = sum(e.end - e.start for row in kernels for e in row) / len(stages)
    copying = sum(end - start for start, end in between) * 2 / len(stages)
    return StageTimes(seconds, tasks, between, computing, copying)


def _hooks(stage: nn.Module, marks: list) -> list:
    """Hooks that note the host's time before each forward and backward pass."""
    count = 0

    def before(module, inputs):
        marks.append((simgpu.timeline().host, "F", count))

    def after(module, inputs, result):
        nonlocal count
        number = count
        count += 1
        if result.requires_grad:
            result.register_hook(
                lambda gradient: marks.append((simgpu.timeline().host, "B", number))
            )

    return [
        stage.register_forward_pre_hook(before),
        stage.register_forward_hook(after),
    ]


def _on(event, k: int) -> bool:
    return event.kind == "kernel" and event.device == f"cuda:{k}"


def _tasks(events: list, marks: list[tuple[float, str, int]]) -> list[Task]:
    """From a stage's first kernel after each mark to its last before the next one."""
    ends = [mark[0] for mark in marks[1:]] + [float("inf")]
    found = []
    for (begin, kind, number), end in zip(marks, ends, strict=True):
        own = [e for e in events if begin <= e.launched < end]
        if own:
            start, stop = min(e.start for e in own), max(e.end for e in own)
            found.append(Task(kind, number, start, stop))
    return found
