"""What each GPU of a split model does when, for several ways to run a step."""

from simgpu.pictures import COLOURS, HOST, INK, WIDEST, Picture

_LEFT, _RIGHT, _TOP = 62, 12, 40  # pixels
_LANE, _BETWEEN = 32, 30  # of a GPU; above each run, for its name
_KINDS = {"F": ("forward", COLOURS[0]), "B": ("backward", COLOURS[1])}


def stages(runs: dict, title: str = "One step") -> Picture:
    """Forward and backward passes on each GPU; runs share one axis of time.

    A box is one pass, its number the micro-batch. Copies between GPUs are grey. A gap
    is called idle where the word has room.

    Args:
        runs: name -> what `helpers.time_stages` returns.
        title: above the picture.

    Taught in 13-split-the-model.
    """
    said = {name: _words(name, run) for name, run in runs.items()}
    lanes = sum(len(run.tasks) for run in runs.values())
    height = _TOP + _BETWEEN * len(runs) + _LANE * lanes + 54
    picture = Picture(WIDEST, height, f"{title}. {'; '.join(said.values())}")
    picture.text(8, 22, title, 14, weight="bold")
    longest = max((run.seconds for run in runs.values()), default=0) or 1e-6
    scale = (WIDEST - _LEFT - _RIGHT) / longest
    top = _TOP
    for name, run in runs.items():
        picture.text(8, top + 16, said[name], 13)
        for k, row in enumerate(run.tasks):
            y = top + _BETWEEN + _LANE * k
            picture.text(8, y + 16, f"GPU {k}", 13)
            picture.line(_LEFT, y + 25, WIDEST - _RIGHT, y + 25, HOST)
            _lane(picture, y, row, run, scale)
        top += _BETWEEN + _LANE * len(run.tasks)
    _axis(picture, height - 48, longest, scale)
    for place, (words, fill) in enumerate([*_KINDS.values(), ("copy", HOST)]):
        x = _LEFT + 96 * place
        picture.box(x, height - 20, 12, 12, fill, stroke="none")
        picture.text(x + 18, height - 9, words, 12)
    picture.text(_LEFT + 290, height - 9, "number: the micro-batch", 12)
    picture.text(WIDEST - _RIGHT, height - 9, "simulated", 12, "end")
    return picture


def _words(name: str, run) -> str:
    if not run.counted:
        return f"{name}: {1e3 * run.seconds:.1f} ms, measured"
    return f"{name}: {1e3 * run.seconds:.1f} ms, a GPU is idle {run.idle:.0%} of it"


def _lane(picture: Picture, y: float, row: list, run, scale: float) -> None:
    """Boxes of one GPU, copies, and the word idle in what is left."""
    for kind, number, start, end in row:
        x, wide = _LEFT + start * scale, (end - start) * scale
        picture.box(x, y, wide, 22, _KINDS[kind][1], stroke="white")
        if wide > 9 * len(str(number)) + 2:
            picture.text(x + wide / 2, y + 16, number, 12, "middle")
    for start, end in run.copies:
        wide = max((end - start) * scale, 1)
        picture.box(_LEFT + start * scale, y, wide, 22, HOST, stroke="none")
    busy = [(task.start, task.end) for task in row] + list(run.copies)
    free = 0.0
    for start, end in [*sorted(busy), (run.seconds, run.seconds)]:
        if (start - free) * scale > 34:
            picture.text(
                _LEFT + (start + free) / 2 * scale, y + 16, "idle", 12, "middle"
            )
        free = max(free, end)


def _axis(picture: Picture, y: float, seconds: float, scale: float) -> None:
    """A line with marks at whole milliseconds, at most ten."""
    picture.line(_LEFT, y, WIDEST - _RIGHT, y, INK)
    between = 1
    while 1e3 * seconds > 10 * between:
        between *= 2 if str(between)[0] == "1" else 5
    for mark in range(0, int(1e3 * seconds) + 1, between):
        x = _LEFT + mark / 1e3 * scale
        picture.line(x, y, x, y + 4, INK)
        picture.text(x, y + 17, f"{mark} ms" if mark else "0", 12, "middle")
