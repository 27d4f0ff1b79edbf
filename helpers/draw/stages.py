"""What each GPU of a split model does when, for several ways to run a step."""

from simgpu.pictures import COLOURS, HOST, Lanes, Picture

_LEFT, _TOP = 62, 40  # pixels
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
    longest = max((run.seconds for run in runs.values()), default=0) or 1e-6
    spoken = f"{title}. {'; '.join(said.values())}"
    axis = Lanes(spoken, height, longest, _LEFT, letter=8, room=2, drop=5, least=1)
    axis.text(8, 22, title, 14, weight="bold")
    top = _TOP
    for name, run in runs.items():
        axis.text(8, top + 16, said[name], 13)
        for k, row in enumerate(run.tasks):
            y = top + _BETWEEN + _LANE * k
            axis.text(8, y + 16, f"GPU {k}", 13)
            axis.rule(y + 25)
            _lane(axis, y, row, run)
        top += _BETWEEN + _LANE * len(run.tasks)
    axis.ticks(height - 48, "ms")
    x = axis.legend(height - 20, dict([*_KINDS.values(), ("copy", HOST)]))
    axis.text(x, height - 9, "number: the micro-batch", 12)
    axis.simulated(height - 9)
    return axis


def _words(name: str, run) -> str:
    if not run.counted:
        return f"{name}: {1e3 * run.seconds:.1f} ms, measured"
    return f"{name}: {1e3 * run.seconds:.1f} ms; on average, a GPU idles {run.idle:.0%}"


def _lane(axis: Lanes, y: float, row: list, run) -> None:
    """Bars of one GPU, copies, and the word idle in what is left."""
    for kind, number, start, end in row:
        axis.bar(y, 22, start, end, _KINDS[kind][1], number, stroke="white")
    for start, end in run.copies:
        axis.bar(y, 22, start, end, HOST)
    busy = [(task.start, task.end) for task in row] + list(run.copies)
    free = 0.0
    for start, end in [*sorted(busy), (run.seconds, run.seconds)]:
        axis.between(y + 16, free, start, "idle")
        free = max(free, end)
