"""Schedules of a pipeline under each other: what each rank computes when, and bubbles.

What is drawn comes from the log of the simulated GPUs. Messages are left out: a rank
that waits for one has a bubble.
"""

from collections.abc import Iterable

from simgpu.pictures import COLOURS, HOST, INK, WIDEST, Picture

LEFT, RIGHT, TOP = 62, 12, 40  # pixels
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
    picture = Picture(WIDEST, height, f"{title}. {'; '.join(said.values())}")
    picture.text(8, 22, title, 14, weight="bold")
    longest = max((seconds(log) for log, _ in runs.values()), default=0) or 1e-6
    scale = (WIDEST - LEFT - RIGHT) / longest
    y = TOP
    for name, found in rows.items():
        picture.text(8, y + 18, said[name], 13, weight="bold")
        y += BETWEEN
        for rank, tasks in enumerate(found):
            picture.text(8, y + 15, f"rank {rank}", 12)
            _lane(picture, y, tasks, seconds(runs[name][0]), scale)
            y += LANE
    _axis(picture, y + 6, longest, scale)
    _legend(picture, height - 16)
    return picture


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


def _lane(
    picture: Picture, y: float, tasks: list[Task], end: float, scale: float
) -> None:
    second = max((task[2] for task in tasks), default=0)
    has_two = len({task[2] for task in tasks}) > 1
    free = 0.0
    for kind, number, stage, start, stop in tasks:
        _gap(picture, y, free, start, scale)
        x, wide = LEFT + start * scale, (stop - start) * scale
        picture.box(x, y, wide, BOX, KINDS[kind][1], stroke="white")
        if has_two and stage == second:
            picture.line(x + 1, y + BOX - 1, x + wide - 1, y + BOX - 1)
        if wide >= 7 * len(str(number)):
            picture.text(x + wide / 2, y + 14, number, 11, "middle")
        free = stop
    _gap(picture, y, free, end, scale)


def _gap(picture: Picture, y: float, start: float, end: float, scale: float) -> None:
    """A bubble, with the word where it has room; messages alone are too short."""
    wide = (end - start) * scale
    if wide < 3:
        return
    x = LEFT + start * scale
    picture.box(x + 1, y + 1, wide - 2, BOX - 2, dashed=True, stroke=HOST)
    if wide > 44:
        picture.text(x + wide / 2, y + 14, "bubble", 11, "middle")


def _axis(picture: Picture, y: float, longest: float, scale: float) -> None:
    """A line with marks at whole milliseconds, at most ten."""
    picture.line(LEFT, y, WIDEST - RIGHT, y, INK)
    between = 1
    while 1e3 * longest > 10 * between:
        between *= 2 if str(between)[0] == "1" else 5
    for mark in range(0, int(1e3 * longest + 1e-6) + 1, between):
        x = LEFT + mark / 1e3 * scale
        picture.line(x, y, x, y + 4, INK)
        picture.text(x, y + 16, f"{mark} ms" if mark else "0", 12, "middle")


def _legend(picture: Picture, y: float) -> None:
    x = LEFT
    for words, fill in KINDS.values():
        picture.box(x, y, 12, 12, fill, stroke="none")
        picture.text(x + 17, y + 11, words, 12)
        x += 30 + 6.6 * len(words)
    picture.line(x, y + 11, x + 14, y + 11)
    picture.text(x + 19, y + 11, "the rank's second stage", 12)
    picture.text(WIDEST - RIGHT, y + 11, "simulated", 12, "end")
