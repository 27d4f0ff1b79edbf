"""The path of a batch through a `DataLoader`, and a GPU that waits for batches."""

from simgpu.pictures import COLOURS, HOST, INK, WIDEST, Lanes, Picture, plural

_TOP, _ROW, _WIDE, _TALL = 34, 40, 148, 82  # pixels; a row for each worker
_LOWER = (  # from right to left: name, two lines about it, colour
    ("result queue", "whole batches,", "in shared memory", "white"),
    ("pin thread", "copies a batch", "to pinned memory", HOST),
    ("your loop", "next() gives", "batches in order", HOST),
    ("GPU", "copies from", "pinned memory", COLOURS[0]),
)


def batch_path(workers: int = 3, factor: int = 2) -> Picture:
    """Sampler, index queues, workers, pin thread, loop and GPU, with the batches.

    Drawn is the moment after the loop has taken batch 0, if workers take equally long:
    each has a batch in its hands, and `factor - 1` wait in its queue.

    Args:
        workers: of the loader.
        factor: `prefetch_factor`.

    Taught in 11-feed-the-gpu.
    """
    count = workers * factor
    said = f"{plural(workers, 'worker')} x prefetch_factor {factor}"
    said = f"batches in flight: {said} = {count}"
    places = ", ".join(name for name, *_ in _LOWER)
    title = f"The path of a batch: sampler, index queues, workers, {places}; {said}"
    low = _TOP + _ROW * workers + 36
    picture = Picture(WIDEST, low + _TALL + 8, title)
    picture.text(220, 20, said, 13, weight="bold")
    middle = _TOP + (_ROW * workers - 10) / 2
    _place(picture, 8, middle - _TALL / 2, "sampler", "draws the indices", "of a batch")
    for worker in range(workers):
        y = _TOP + _ROW * worker
        first, *waiting = [b for b in range(1, count + 1) if b % workers == worker]
        picture.line(158, middle, 216, y + 15, arrow=True)
        picture.box(220, y, 180, 30, dashed=True)
        picture.text(228, y + 20, f"index queue {worker}", 12)
        for place, batch in enumerate(waiting):
            _batch(picture, 370 - 28 * place, y + 3, batch)
        picture.line(402, y + 15, 436, y + 15, arrow=True)
        picture.box(440, y, 180, 30, HOST)
        picture.text(448, y + 20, f"worker process {worker}", 12)
        _batch(picture, 590, y + 3, first)
        picture.line(620, y + 15, 660, y + 15)
    picture.line(660, _TOP + 15, 660, low - 3, arrow=True)
    for place, (name, one, two, fill) in enumerate(_LOWER):
        x = 544 - 178 * place
        _place(picture, x, low, name, one, two, fill)
        if place < len(_LOWER) - 1:
            picture.line(x - 2, low + _TALL / 2, x - 27, low + _TALL / 2, arrow=True)
        if name == "your loop":
            _batch(picture, x + _WIDE - 28, low + 4, 0)
    return picture


def fed_gpu(load: float, step: float, workers: tuple[int, ...]) -> Lanes:
    """Workers that load, and a GPU that computes a batch once it is there.

    Workers take batches in turn, load all the time, and have a core each. Nothing is
    measured here: the two times are what the reader puts in. All runs share one axis.

    Args:
        load: seconds that a worker needs for a batch.
        step: seconds that the GPU needs for one.
        workers: how many there are, for each run.

    Taught in 11-feed-the-gpu.
    """
    span = 4 * load
    runs = {count: _steps_of(load, step, count, span) for count in workers}
    said = {}
    for count, starts in runs.items():
        busy = sum(min(start + step, span) - start for start in starts if start >= load)
        said[count] = f"the GPU computes {busy / (span - load):.0%} of the time"
    title = "; ".join(f"{plural(n, 'worker')}: {words}" for n, words in said.items())
    height = sum(58 + 30 * (count + 1) for count in workers) + 24
    axis = Lanes(f"Batches of {load * 1e3:g} ms. {title}", height, span, 84)
    y = 0
    for count, starts in runs.items():
        words = f"{plural(count, 'worker')}: {said[count]}, after the first batch"
        axis.text(8, y + 18, words, 14, weight="bold")
        for worker in range(count):
            y_lane = y + 30 + 30 * worker
            axis.text(8, y_lane + 16, f"worker {worker}", 13)
            for turn in range(4):
                end = (turn + 1) * load
                number = turn * count + worker
                axis.bar(
                    y_lane, 24, turn * load, end, HOST, f"loads {number}", number,
                    stroke=INK,
                )  # fmt: skip
        y_lane = y + 30 + 30 * count
        axis.text(8, y_lane + 16, "GPU", 13)
        free = 0.0
        for number, start in enumerate(starts):
            axis.between(y_lane + 16, free, start, f"waits for batch {number}", "waits")
            free = min(start + step, span)
            axis.bar(y_lane, 24, start, free, COLOURS[0], number, stroke=INK)
        y += 58 + 30 * (count + 1)
    axis.ticks(height - 24, "ms")
    axis.text(WIDEST - 12, 18, "by the formula", 12, "end")
    return axis


def _steps_of(load: float, step: float, workers: int, span: float) -> list[float]:
    """When the GPU begins each batch before the end of the axis, in seconds."""
    starts = [load]
    while starts[-1] < span:
        ready = (len(starts) // workers + 1) * load
        starts.append(max(ready, starts[-1] + step))
    return starts[:-1]


def _place(
    picture: Picture, x: float, y: float, name: str, one: str, two: str,
    fill: str = HOST,
) -> None:  # fmt: skip
    """A box of the path: its name, and two lines about it."""
    picture.box(x, y, _WIDE, _TALL, fill)
    picture.text(x + _WIDE / 2, y + 24, name, 14, "middle", weight="bold")
    picture.text(x + _WIDE / 2, y + 48, one, 12, "middle")
    picture.text(x + _WIDE / 2, y + 66, two, 12, "middle")


def _batch(picture: Picture, x: float, y: float, number: int) -> None:
    """A batch with its number, in the same colour everywhere."""
    picture.box(x, y, 24, 24, COLOURS[1])
    picture.text(x + 12, y + 17, number, 12, "middle")
