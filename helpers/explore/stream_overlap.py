"""The overlap explorer: copy and compute in chunks, on one stream and on two."""

from helpers import draw
from helpers.explore.explorer import Explorer, slider
from simgpu.costs import COPY_LATENCY
from simgpu.pictures import Lanes


def overlap() -> Explorer:
    """Copy and compute in chunks, on one stream and on two.

    Taught in 05-overlap-with-streams.
    """
    return Explorer(
        overlap_picture,
        chunks=slider("chunks", 4, 1, 16),
        megabytes=slider("MB to copy", 64, 1, 256),
        speed=slider("GB/s of the link", 12, 1, 64),
        compute=slider("ms to compute", 6, 1, 30),
    )


def overlap_times(
    chunks: int, megabytes: int, speed: int, compute: int
) -> list[tuple[float, float, float]]:
    """When each chunk's copy ends, its computing starts and ends, in seconds.

    The copies follow each other; a chunk is computed once it is there and the one
    before it is done.
    """
    copy = COPY_LATENCY + megabytes * 1e6 / chunks / (speed * 1e9)
    work = compute * 1e-3 / chunks
    times, free = [], 0.0
    for i in range(chunks):
        there = (i + 1) * copy
        start = max(there, free)
        free = start + work
        times.append((there, start, free))
    return times


def overlap_picture(
    chunks: int, megabytes: int, speed: int, compute: int
) -> draw.Picture:
    """Both schedules on one time axis, with their seconds."""
    times = overlap_times(chunks, megabytes, speed, compute)
    copy, work = times[0][0], times[0][2] - times[0][1]
    one, two = chunks * (copy + work), times[-1][2]
    title = (
        f"One stream {one * 1e3:.2f} ms, two streams {two * 1e3:.2f} ms (simulated): "
        f"{one / two:.2f} times as fast"
    )
    axis = Lanes(title, 172, one, 108)
    axis.text(8, 20, title, 14, weight="bold")

    def bar(row: int, start: float, end: float, fill: str) -> None:
        axis.bar(34 + 38 * row, 30, start, end, fill, stroke=draw.INK)

    for row, words in enumerate(("one stream", "copy stream", "compute")):
        axis.text(8, 54 + 38 * row, words)
    for i, (there, start, end) in enumerate(times):
        first = i * (copy + work)
        bar(0, first, first + copy, draw.HOST)
        bar(0, first + copy, first + copy + work, draw.colour("cuda:0"))
        bar(1, there - copy, there, draw.HOST)
        bar(2, start, end, draw.colour("cuda:0"))
    axis.legend(152, {"copying": draw.HOST, "computing": draw.colour("cuda:0")})
    return axis
