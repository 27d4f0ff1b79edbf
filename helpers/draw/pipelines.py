"""Schedules of a pipeline under each other: what each rank computes when, and bubbles.

What is drawn comes from the log of the simulated GPUs. Messages are left out: a rank
that waits for one has a bubble.
"""

from collections.abc import Iterable

from simgpu.pictures import COLOURS, HOST, Lanes, Picture

LEFT, TOP = 62, 40  # pixels
LANE, BOX, BETWEEN = 26, 20, 30  # of a rank; of a task in it; above each schedule
KINDS = {
    "F": ("forward", COLOURS[0]),
    "B": ("backward", COLOURS[1]),
    "W": ("backward, weights only", COLOURS[2]),
}
Mark = tuple[float, str, int, int]
Task = tuple[str, int, int, float, float]


def pipelines(runs: dict[str, tuple], title: str) -> Picture:
    """What the ranks of a pipeline do in one step, several schedules on one axis.

    A box is a task, its number the micro-batch. A dark line under a box says that the
    task belongs to the rank's second stage. A dashed box is a bubble.

    Args:
        runs: name -> (log of `ranks.timeline()`, marks of each rank). A mark is what a
            rank noted before a task: the second of its host, "F", "B" or "W", the
            micro-batch, the stage.
        title: above the picture.

    Taught in 20-pipeline-the-layers.
    """
    said = {name: f"{name}: {_words(log)}" for name, (log, _) in runs.items()}
    rows = {name: _rows(log, marks) for name, (log, marks) in runs.items()}
    lanes = sum(len(found) for found in rows.values())
    height = TOP + BETWEEN * len(runs) + LANE * lanes + 56
    longest = max((seconds(log) for log, _ in runs.values()), default=0) or 1e-6
    spoken = f"{title}. {'; '.join(said.values())}"
    axis = Lanes(spoken, height, longest, LEFT, size=11, letter=7, room=0)
    axis.text(8, 22, title, 14, weight="bold")
    y = TOP
    for name, found in rows.items():
        axis.text(8, y + 18, said[name], 13, weight="bold")
        y += BETWEEN
        for rank, tasks in enumerate(found):
            axis.text(8, y + 15, f"rank {rank}", 12)
            _lane(axis, y, tasks, seconds(runs[name][0]))
            y += LANE
    axis.ticks(y + 6, "ms")
    x = axis.legend(height - 16, dict(KINDS.values()))
    axis.line(x, height - 5, x + 14, height - 5)
    axis.text(x + 19, height - 5, "the rank's second stage", 12)
    axis.simulated(height - 5)
    return axis


def seconds(log) -> float:
    """From the first kernel of a job's log to its last."""
    spans = [(e.start, e.end) for r in log.ranks for e in _kernels(log, r)]
    if not spans:
        return 0.0
    return max(end for _, end in spans) - min(start for start, _ in spans)


def bubble(log) -> float:
    """The share of the step in which a GPU runs no kernel, the mean of all ranks.

    Args:
        log: of `ranks.timeline()`, with nothing but the step in it.

    Taught in 20-pipeline-the-layers.
    """
    busy = sum(e.end - e.start for rank in log.ranks for e in _kernels(log, rank))
    return 1 - busy / (len(log.ranks) * seconds(log))


def _kernels(log, rank: int) -> list:
    return [event for event in log.events(rank) if event.kind == "kernel"]


def _words(log) -> str:
    return f"{1e3 * seconds(log):.1f} ms, bubble {bubble(log):.1%}"


def _rows(log, marks: Iterable[list[Mark]]) -> list[list[Task]]:
    """Of each rank: kind, micro-batch, stage, start and end of its tasks."""
    kernels = [_kernels(log, rank) for rank in log.ranks]
    first = min((e.start for row in kernels for e in row), default=0.0)
    pairs = zip(kernels, marks, strict=True)
    return [_tasks(events, noted, first) for events, noted in pairs]


def _tasks(events: list, marks: list[Mark], first: float) -> list[Task]:
    """A task has the kernels that were launched between its mark and the next one."""
    ends = [mark[0] for mark in marks[1:]] + [float("inf")]
    found = []
    for (begin, kind, number, stage), end in zip(marks, ends, strict=True):
        own = [e for e in events if begin <= e.launched < end]
        if own:
            start, stop = min(e.start for e in own), max(e.end for e in own)
            found.append((kind, number, stage, start - first, stop - first))
    return found


def _lane(axis: Lanes, y: float, tasks: list[Task], end: float) -> None:
    second = max((task[2] for task in tasks), default=0)
    has_two = len({task[2] for task in tasks}) > 1
    free = 0.0
    for kind, number, stage, start, stop in tasks:
        _gap(axis, y, free, start)
        axis.bar(y, BOX, start, stop, KINDS[kind][1], number, stroke="white")
        if has_two and stage == second:
            bottom = y + BOX - 1
            axis.line(axis.at(start) + 1, bottom, axis.at(stop) - 1, bottom)
        free = stop
    _gap(axis, y, free, end)


def _gap(axis: Lanes, y: float, start: float, end: float) -> None:
    """A bubble, with the word where it has room; messages alone are too short."""
    wide = (end - start) * axis.scale
    if wide < 3:
        return
    axis.box(axis.at(start) + 1, y + 1, wide - 2, BOX - 2, dashed=True, stroke=HOST)
    axis.between(y + 14, start, end, "bubble")
