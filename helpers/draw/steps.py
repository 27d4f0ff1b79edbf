"""One training step of several runs, one under the other, on one axis of time."""

from simgpu.pictures import COLOURS, HOST, INK, WIDEST, Picture

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
    picture = Picture(WIDEST, _TOP + _ROW * len(runs) + 46, f"{title}. {spoken}")
    picture.text(8, 22, title, 14, weight="bold")
    longest = max(map(sum, spent.values()), default=0) or 1e-6
    scale = (WIDEST - 24) / longest
    for row, (name, (begin, events)) in enumerate(runs.items()):
        y = _TOP + _ROW * row
        picture.text(12, y + 12, f"{name}: {said[name]}", 13)
        picture.box(12, y + 36, sum(spent[name]) * scale, 24, "white", stroke=HOST)
        copies = 0
        for event in events:
            x, long = 12 + (event.start - begin) * scale, event.end - event.start
            is_copy = event.kind == "copy"
            fill = HOST if is_copy else COLOURS[0]
            picture.box(x, y + 36, max(long * scale, 1), 24, fill, stroke="none")
            if is_copy:
                copies += 1
                picture.text(x + long * scale / 2, y + 31, copies, 12, "middle")
    y = picture.height - 42
    _axis(picture, y, longest, scale)
    for place, (words, fill) in enumerate(
        (("copying", HOST), ("computing", COLOURS[0]), ("idle", "white"))
    ):
        picture.box(12 + 110 * place, y + 24, 12, 12, fill, stroke=HOST)
        picture.text(30 + 110 * place, y + 35, words, 12)
    picture.text(WIDEST - 12, y + 35, "simulated", 12, "end")
    return picture


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


def _axis(picture: Picture, y: float, seconds: float, scale: float) -> None:
    """A line with a mark at every 100 µs, or every 1000 and so on in a longer step."""
    picture.line(12, y, WIDEST - 12, y, INK)
    between = 100
    while 1e6 * seconds > 10 * between:
        between *= 10
    for mark in range(0, int(1e6 * seconds) + 1, between):
        x = 12 + mark / 1e6 * scale
        picture.line(x, y, x, y + 4, INK)
        picture.text(x, y + 17, f"{mark} µs", 12, "start" if mark == 0 else "middle")
