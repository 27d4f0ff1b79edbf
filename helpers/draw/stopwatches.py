"""What four stopwatches read of the same step, on one axis with the step itself.

The host's lane shows the launches, the GPU's lane the idle time and the kernels.
Below, a bar for each stopwatch begins and ends where the clock was read.
"""

from simgpu.pictures import COLOURS, HOST, INK, WIDEST, Picture

_LEFT, _RIGHT = 112, 12


def stopwatches(log) -> Picture | str:
    """A step from an idle GPU, and what each kind of stopwatch says that it takes.

    Args:
        log: `timeline()` after one step; the words that it gives on real GPUs are
            returned as they are.

    Taught in 07-time-it-right.
    """
    if isinstance(log, str):
        return log
    from simgpu.costs import LAUNCH

    kernels = [event for event in log.events if event.kind == "kernel"]
    begin, launched = kernels[0].launched, kernels[-1].launched + LAUNCH
    end = max(event.end for event in kernels)
    busy = sum(event.end - event.start for event in kernels)
    bars = (
        ("no synchronize", "the launches only", begin, launched, COLOURS[1]),
        ("synchronize", "until the GPU is done", begin, end, COLOURS[0]),
        ("events", "from mark to mark", begin, end, COLOURS[0]),
        ("profiler", "the kernels", kernels[0].start, kernels[0].start + busy,
         COLOURS[2]),
    )  # fmt: skip
    title = (
        f"One step, simulated: launched in {_us(launched - begin)}, "
        f"done after {_us(end - begin)}"
    )
    picture = Picture(WIDEST, 142 + 30 * len(bars), title)
    picture.text(8, 20, title, 14, weight="bold")
    scale = (WIDEST - _LEFT - _RIGHT) / (end - begin)

    def place(seconds: float) -> float:
        return _LEFT + (seconds - begin) * scale

    for x in (place(launched), place(end) - 1):
        picture.line(x, 42, x, picture.height - 22, HOST)
    picture.text(8, 56, "host")
    picture.text(8, 96, "GPU")
    for event in kernels:
        width = LAUNCH * scale
        picture.box(place(event.launched), 42, width - 1, 18, INK, stroke="none")
        long = max((event.end - event.start) * scale, 1)
        x = place(event.start)
        picture.box(x, 80, long, 24, COLOURS[0], stroke="white")
        for name in (event.name, event.name.split("_")[0]):  # the first that fits
            if long > 8 * len(name) + 4:
                picture.text(x + long / 2, 97, name, 12, "middle")
                break
    idle, first = place(begin), place(kernels[0].start)
    words = _us(kernels[0].start - begin)
    if first - idle > 6 * len(words):
        picture.text((idle + first) / 2, 97, words, 12, "middle")
    x = place(launched)
    picture.text(x + 8, 56, "the host is free, or waits", 12)
    for row, (name, words, start, stop, fill) in enumerate(bars):
        y = 116 + 30 * row
        picture.text(8, y + 17, name, 12)
        picture.box(place(start), y, (stop - start) * scale, 24, fill)
        about = f"{words}: {_us(stop - start)}"
        fits = 7 * len(about) < (stop - start) * scale
        x = place(start) if fits else place(stop)  # else right of the bar
        picture.text(x + 6, y + 17, about, 12)
    y = picture.height - 8
    picture.text(_LEFT, y, "0", 12)
    words = f"{_us(end - begin)} (simulated)"
    picture.text(WIDEST - _RIGHT, y, words, 12, "end")
    return picture


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f} µs"
