"""What four stopwatches read of the same step, on one axis with the step itself.

The host's lane shows the launches, the GPU's lane the idle time and the kernels.
Below, a bar for each stopwatch begins and ends where the clock was read.
"""

from simgpu.pictures import COLOURS, HOST, INK, Lanes, Picture

_LEFT = 112  # pixels


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
    height = 142 + 30 * len(bars)
    axis = Lanes(title, height, end - begin, _LEFT, begin=begin, letter=8, room=4,
                 drop=5, least=1)  # fmt: skip
    axis.text(8, 20, title, 14, weight="bold")
    for x in (axis.at(launched), axis.at(end) - 1):
        axis.line(x, 42, x, height - 22, HOST)
    axis.text(8, 56, "host")
    axis.text(8, 96, "GPU")
    for event in kernels:
        width = LAUNCH * axis.scale
        axis.box(axis.at(event.launched), 42, width - 1, 18, INK, stroke="none")
        words = event.name, event.name.split("_")[0]
        axis.bar(80, 24, event.start, event.end, COLOURS[0], *words, stroke="white")
    idle, first = _us(kernels[0].start - begin), kernels[0].start
    if (first - begin) * axis.scale > 6 * len(idle):  # no box around it
        axis.text(axis.at((begin + first) / 2), 97, idle, 12, "middle")
    axis.text(axis.at(launched) + 8, 56, "the host is free, or waits", 12)
    for row, (name, words, start, stop, fill) in enumerate(bars):
        y = 116 + 30 * row
        axis.text(8, y + 17, name, 12)
        axis.bar(y, 24, start, stop, fill, stroke=INK)
        about = f"{words}: {_us(stop - start)}"
        fits = 7 * len(about) < (stop - start) * axis.scale
        x = axis.at(start) if fits else axis.at(stop)  # else right of the bar
        axis.text(x + 6, y + 17, about, 12)
    axis.footer(height - 8)
    return axis


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f} µs"
