"""One training step of several runs, one under the other, on one axis of time."""

from simgpu.pictures import COLOURS, HOST, Lanes, Picture

_TOP, _ROW = 44, 74  # pixels above the first run, and of each run


def steps(runs: dict[str, tuple[float, list]], title: str = "One step") -> Picture:
    """What a GPU does in one step of each run: copying, computing, or nothing.

    Copies are grey and numbered in their order, kernels have the colour of cuda:0, and
    white is a GPU without work. All runs share one axis.

    Args:
        runs: name -> (the second at which the step begins, its events of
            `simgpu.timeline()` on one stream). A step ends with its last event.
        title: above the picture.

    Taught in 02-create-tensors-where-you-need-them.
    """
    spent = {name: _seconds(*run) for name, run in runs.items()}
    said = {name: _words(*seconds) for name, seconds in spent.items()}
    spoken = "; ".join(f"{name}: {words}" for name, words in said.items())
    height = _TOP + _ROW * len(runs) + 46
    longest = max(map(sum, spent.values()), default=0) or 1e-6
    axis = Lanes(f"{title}. {spoken}", height, longest, 12, least=1)
    axis.text(8, 22, title, 14, weight="bold")
    for row, (name, (begin, events)) in enumerate(runs.items()):
        y = _TOP + _ROW * row
        axis.text(12, y + 12, f"{name}: {said[name]}", 13)
        axis.bar(y + 36, 24, 0.0, sum(spent[name]), "white", stroke=HOST)
        copies = 0
        for event in events:
            start, end = event.start - begin, event.end - begin
            is_copy = event.kind == "copy"
            axis.bar(y + 36, 24, start, end, HOST if is_copy else COLOURS[0])
            if is_copy:
                copies += 1
                axis.text(axis.at((start + end) / 2), y + 31, copies, 12, "middle")
    axis.ticks(height - 42, "µs")
    names = {"copying": HOST, "computing": COLOURS[0], "idle": "white"}
    axis.legend(height - 18, names)
    axis.simulated(height - 7)
    return axis


def _seconds(begin: float, events: list) -> tuple[float, float, float]:
    """Seconds of copying, of computing and of neither."""
    copying = sum(e.end - e.start for e in events if e.kind == "copy")
    computing = sum(e.end - e.start for e in events if e.kind != "copy")
    total = max((e.end for e in events), default=begin) - begin
    return copying, computing, total - copying - computing


def _words(*seconds: float) -> str:
    copying, computing, idle = (f"{1e6 * part:.0f}" for part in seconds)
    total = f"{1e6 * sum(seconds):.0f} µs"
    return f"{total} = {copying} copying + {computing} computing + {idle} idle"
