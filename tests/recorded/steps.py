"""Recorded passes and steps of whole models, beside those of `programs.py`."""

from collections.abc import Iterator

import simgpu
from tests.recorded import programs
from tests.recorded.cards import card_named
from tests.recorded.comparison import Comparison, Omission, compare_rows
from tests.recorded.files import Recording, is_fitted

# operations of a trace in PyTorch's names of 2021 -> those that run today
RENAMED = {
    "cudnn_convolution": ("convolution",),
    "cudnn_convolution_backward_weight": (),  # one operation now: "both gradients"
    "cudnn_convolution_backward_input": (),
    "clamp_min": ("relu", "relu_"),
    "fill_": ("fill_", "zero_", "_foreach_zero_"),
    "cudnn_batch_norm": ("native_batch_norm",),
    "cudnn_batch_norm_backward": ("native_batch_norm_backward",),
}


def compare(recording: Recording) -> tuple[list[Comparison], list[Omission]]:
    """The rows of a recording of one of these kinds beside what is predicted."""
    if recording.kind == "resnet50_v100":
        return _compare_trace(recording)
    return compare_rows(recording, PREDICT[recording.kind])


def measured(program: programs.Program, card) -> tuple[dict, simgpu.Estimate]:
    """What a program measures of itself on a card, and what it costs."""
    cost = simgpu.estimate(program.function, *program.arguments, card=card)
    return program.measured, cost


def steps_fp32(row: list) -> Iterator[tuple]:
    """[card, config, mode, batch, tokens, forward ms, backward ms]."""
    name, config, mode, batch, tokens, *recorded = row
    found, _ = measured(
        programs.steps_fp32(config, mode, batch, tokens), card_named(name)
    )
    for way, milliseconds in zip(("forward", "backward"), recorded, strict=True):
        if milliseconds:
            what = f"{config} {mode}, {batch} x {tokens} tokens, {way}"
            yield "whole pass", name, what, found[way], milliseconds / 1e3


def throughput_dle(row: list) -> Iterator[tuple]:
    """[card, program, numbers, batch, items/s], or ms of one batch."""
    name, program, numbers, batch, recorded = row
    found, _ = measured(
        programs.throughput_dle(program, numbers, batch), card_named(name)
    )
    seconds = recorded / 1e3 if program.endswith("ms") else batch / recorded
    yield "whole step", name, f"{program} {numbers}, {batch}", found["step"], seconds


def _compare_trace(recording: Recording) -> tuple[list[Comparison], list[Omission]]:
    """One step, operation by operation: [operation, kernels a step, ms a step]."""
    data = recording.data
    card = card_named("V100")
    found, cost = measured(programs.resnet50_v100(), card)
    steps = 2  # of the program

    def seconds(*names: str) -> float:
        return sum(
            cost.by_operation[n].seconds for n in names if n in cost.by_operation
        )

    def predict(row: list) -> Iterator[tuple]:
        operation, _, milliseconds = row
        names = RENAMED.get(operation, (operation,))
        if names:
            if not any(name in cost.by_operation for name in names):
                raise KeyError(operation)
            what = f"ResNet-50, 32 images: {operation}"
            kernels = seconds(*names) / steps
            yield "operation of a step", "V100", what, kernels, milliseconds / 1e3

    comparisons, omitted = compare_rows(recording, predict)
    rows = {row[0]: row[2] for row in data["rows"]}
    gradients = [
        rows.get(f"cudnn_convolution_backward_{w}") for w in ("weight", "input")
    ]
    if all(gradients):
        what = "ResNet-50, 32 images: both gradients of the convolutions"
        predicted = seconds("convolution_backward") / steps
        fitted = is_fitted(gradients)
        comparisons.append(
            Comparison("operation of a step", "V100", what, predicted,
                       sum(gradients) / 1e3, fitted)
        )  # fmt: skip
    if "kernel_ms_a_step" in data:
        what = "ResNet-50, 32 images: all kernels of a step"
        predicted, recorded = cost.kernel_seconds / steps, data["kernel_ms_a_step"]
        comparisons.append(
            Comparison("whole step", "V100", what, predicted, recorded / 1e3, False)
        )
    return comparisons, omitted


PREDICT = {function.__name__: function for function in (steps_fp32, throughput_dle)}
