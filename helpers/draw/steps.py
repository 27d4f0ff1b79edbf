"""One training step of several runs, one under the other, on one axis of time."""

from simgpu.pictures import COLOURS, HOST, INK, Lanes, Picture

_TOP, _ROW = 44, 94  # pixels above the first run, and of each run
_WAITS = "#E5E5E5"


def steps(runs: dict[str, tuple], title: str = "One step") -> Picture | str:
    """What the host and a GPU do in one step of each run; a line of text for no run.

    The host's lane is dark where Python launches, and light where it waits for a copy.
    On the GPU, copies are grey and numbered in their order, kernels have the colour of
    cuda:0, and white is no work. Arrows: from a launch after a copy to its kernel.

    Args:
        runs: name -> (second at which the step begins, its events of `timeline()` on
            one stream, the host's waits). A step ends with its last event.
        title: above the picture.

    Taught in 02-create-tensors-where-you-need-them.
    """
    if not runs:
        return "Simulated GPUs are drawn; lesson 07 shows how to record real ones."
    spent = {name: _spent(*run) for name, run in runs.items()}
    spoken = "; ".join(f"{name}: {words}" for name, (_, words) in spent.items())
    height = _TOP + _ROW * len(runs) + 46
    longest = max((end for end, _ in spent.values()), default=0) or 1e-6
    axis = Lanes(f"{title}. {spoken}", height, longest, 64, letter=6.4, least=1)
    axis.text(8, 22, title, 14, weight="bold")
    for row, (name, (begin, events, waits)) in enumerate(runs.items()):
        y, (end, words) = _TOP + _ROW * row, spent[name]
        axis.text(8, y + 12, f"{name}: {words}", 13)
        axis.text(8, y + 33, "Python", 12)
        axis.text(8, y + 66, "GPU", 12)
        for wait in waits:
            start, stop = max(wait.start - begin, 0.0), min(wait.end - begin, end)
            if start < stop:
                axis.bar(y + 20, 18, start, stop, _WAITS)
        axis.bar(y + 49, 24, 0.0, end, "white", stroke=HOST)
        copies, after_copy = 0, False
        for event in events:
            launched, start = event.launched - begin, event.start - begin
            if launched >= 0:
                axis.bar(y + 20, 18, launched, launched + 1e-6, INK)
            copies += (is_copy := event.kind == "copy")
            fill, number = (HOST, copies) if is_copy else (COLOURS[0], "")
            axis.bar(y + 49, 24, start, event.end - begin, fill, number)
            if after_copy and not is_copy:
                axis.line(axis.at(launched), y + 39, axis.at(start), y + 49, arrow=True)
            after_copy = is_copy
    axis.ticks(height - 42, "µs")
    names = {"a launch begins": INK, "Python waits": _WAITS, "copying": HOST}
    axis.legend(height - 18, names | {"computing": COLOURS[0], "idle": "white"})
    axis.simulated(height - 7)
    return axis


def _spent(begin: float, events: list, _: list) -> tuple[float, str]:
    """Seconds of a step, and how many of them were copying, computing and neither."""
    copying = sum(e.end - e.start for e in events if e.kind == "copy")
    computing = sum(e.end - e.start for e in events if e.kind != "copy")
    total = max((e.end for e in events), default=begin) - begin
    parts = copying, computing, total - copying - computing, total
    said = "{3:.0f} µs = {0:.0f} copying + {1:.0f} computing + {2:.0f} idle"
    return total, said.format(*(1e6 * part for part in parts))
