"""Recorded passes and steps of whole models, beside those of `programs.py`."""

from collections.abc import Iterator

import simgpu
from recorded import programs
from recorded.cards import card_named
from recorded.comparison import Comparison, Omission, compare_rows
from recorded.files import Recording, is_fitted

# operations of a trace of 2021 -> what does their work today; several make one figure
SAME_WORK = {
    ("cudnn_convolution",): ("convolution",),
    ("cudnn_convolution_backward_weight", "cudnn_convolution_backward_input"): (
        "convolution_backward",
    ),
    ("clamp_min",): ("relu", "relu_"),
    ("cudnn_batch_norm",): ("native_batch_norm",),
    ("cudnn_batch_norm_backward",): ("native_batch_norm_backward",),
    ("add", "add_"): ("add", "add_"),
    ("fill_",): ("fill_", "zero_"),
}
CARD_OF_TRACE = "V100"


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
    _, cost = measured(programs.resnet50_v100(), card_named(CARD_OF_TRACE))
    milliseconds = {row[0]: row[2] for row in recording.data["rows"]}
    together = {name: names for names in SAME_WORK for name in names}

    def comparison(kind, what, seconds, recorded, fitted):
        # the program runs two steps
        return Comparison(kind, CARD_OF_TRACE, f"ResNet-50, 32 images: {what}",
                          seconds / 2, recorded / 1e3, fitted)  # fmt: skip

    found, omitted = [], []
    for names in dict.fromkeys(together.get(name, (name,)) for name in milliseconds):
        ours = SAME_WORK.get(names, names)
        times = [cost.by_operation[n].seconds for n in ours if n in cost.by_operation]
        what, rows = " and ".join(names), [milliseconds.get(name) for name in names]
        if times and None not in rows:
            fitted = is_fitted([*names, *rows])
            found.append(
                comparison("operation of a step", what, sum(times), sum(rows), fitted)
            )
        else:
            omitted.append(Omission(recording.kind, what, f"unknown: {what}"))
    total = recording.data.get("kernel_ms_a_step")
    if total:
        found.append(
            comparison("whole step", "all kernels", cost.kernel_seconds, total, False)
        )
    return found, omitted


PREDICT = {function.__name__: function for function in (steps_fp32, throughput_dle)}
