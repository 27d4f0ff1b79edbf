"""Two races between streams: a read that comes too early, and memory used again."""

from simgpu import Event
from simgpu.pictures import COLOURS, HOST, INK, Lanes

_LEFT, _ROW = 104, 118  # pixels: names of lanes, and a run with its two lanes


def early_read(runs: dict[str, list[Event]]) -> Lanes:
    """A copy on one stream and the kernels that read it on another, for each run.

    An arrow from the copy to its first reader where the copy is done before, as a wait
    has it. All runs share one axis.

    Args:
        runs: name -> events, of which one is the copy and the others are kernels; the
            first kernel reads what is copied.

    Taught in 06-catch-races.
    """
    parts = {name: _copy_and_kernels(events) for name, events in runs.items()}
    said = {}
    for name, (copy, kernels) in parts.items():
        early = copy.end - kernels[0].start
        said[name] = (
            f"{kernels[0].name} begins {early * 1e6:,.0f} µs before the copy is done"
            if early > 0
            else f"{kernels[0].name} begins after the copy"
        )
    title = "; ".join(f"{name}: {words}" for name, words in said.items())
    longest = max(e.end for events in runs.values() for e in events)
    axis = Lanes(title, _ROW * len(runs) + 24, longest, _LEFT)
    for row, (name, (copy, kernels)) in enumerate(parts.items()):
        y = _ROW * row
        axis.text(8, y + 18, f"{name}: {said[name]}", 14, weight="bold")
        axis.text(8, y + 46, "copier", 13)
        axis.text(8, y + 98, "default stream", 13)
        axis.bar(y + 28, 26, copy.start, copy.end, HOST, "copy writes x", stroke=INK)
        for kernel in kernels:
            axis.bar(
                y + 80, 26, kernel.start, kernel.end, COLOURS[0], kernel.name,
                stroke=INK,
            )  # fmt: skip
        x = axis.at(kernels[0].start)
        if copy.end <= kernels[0].start:
            axis.line(axis.at(copy.end), y + 54, x + 2, y + 78, arrow=True)
            axis.text(x + 10, y + 71, "happens before", 12)
        else:
            axis.line(x + 2, y + 66, x + 2, y + 78, arrow=True)
            axis.text(x + 10, y + 73, "reads x: nothing orders the two", 12)
    axis.footer(_ROW * len(runs) + 16)
    return axis


def _copy_and_kernels(events: list[Event]) -> tuple[Event, list[Event]]:
    (copy,) = (event for event in events if event.kind == "copy")
    return copy, [event for event in events if event.kind == "kernel"]


# when things begin and end in the picture of memory that is used again, in any unit
_FREED, _LENGTH = 3.8, 10.0  # Python has dropped batch 1; the end of the axis
_PYTHON = {"copy 1": (0, 1), "step 1": (1, 2), "frees batch 1": (2, _FREED)}
_COPY_1, _STEP_1 = (1.0, 3.0), (3.0, 7.6)
_COPY_2 = {"no wait back": (4.8, 6.8), "copier.wait_stream(here)": (7.6, 9.6)}


def reused_memory() -> Lanes:
    """One address, two batches: the second is copied while a step reads the first.

    Below, the copy waits for the step.

    Taught in 06-catch-races.
    """
    title = (
        "Batch 1 is freed when its step is launched, and batch 2 gets its address A. "
        "Without a wait back, copy 2 writes A while step 1 still reads it; with "
        "copier.wait_stream(here), copy 2 begins when step 1 is done"
    )
    axis = Lanes(title, 352, _LENGTH, _LEFT)
    axis.text(axis.at(_LENGTH), 18, "not to scale", 12, "end")
    first, second = COLOURS[0], COLOURS[1]
    for row, (name, copy_2) in enumerate(_COPY_2.items()):
        y = 176 * row
        axis.text(8, y + 18, name, 14, weight="bold")
        lanes = ("Python", "address A", "copier", "default stream")
        for lane, words in enumerate(lanes):
            axis.text(8, y + 46 + 34 * lane, words, 13)
        for words, (start, end) in _PYTHON.items():
            axis.bar(y + 30, 24, start, end, "white", words, stroke=INK)
        axis.bar(y + 30, 24, _FREED, _FREED + 1, "white", "copy 2", stroke=INK)
        axis.text(axis.at(_FREED + 1.1), y + 46, "launches, and is done early", 12)
        axis.bar(y + 64, 24, 0, _FREED, first, "given to batch 1", stroke=INK)
        words = "given to batch 2"
        axis.bar(y + 64, 24, _FREED, _LENGTH, second, words, stroke=INK)
        axis.bar(y + 98, 24, *_COPY_1, first, "copy 1 writes A", stroke=INK)
        axis.bar(y + 98, 24, *copy_2, second, "copy 2 writes A", stroke=INK)
        axis.bar(y + 132, 24, *_STEP_1, first, "step 1 reads A", stroke=INK)
        if copy_2[0] < _STEP_1[1]:
            x = axis.at(copy_2[1])
            axis.text(x + 8, y + 114, "while step 1 still reads A", 12)
        else:
            x = axis.at(_STEP_1[1])
            axis.line(x, y + 132, x, y + 124, arrow=True)
            axis.text(x + 8, y + 148, "step 1 happens before", 12)
    return axis
