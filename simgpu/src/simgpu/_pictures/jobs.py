"""Pictures of all ranks of a job, one under the other, each in its own colour."""

from simgpu._pictures.lanes import Lanes
from simgpu._pictures.picture import (
    COLOURS,
    HOST,
    INK,
    WIDEST,
    Picture,
    plural,
    size_text,
)
from simgpu._timing.job import JobTimeline

_LONGEST_TITLE = 24  # letters of a lane's
_HOST_HEIGHT, _LANE_HEIGHT, _GAP = 18, 28, 6


def job_timeline(log: JobTimeline) -> Picture:
    """The log of `ranks.timeline()`: the streams of all ranks on one axis.

    Under each rank its host, dark where it launches and light where it waits; its own
    streams; and those of NCCL. What runs has the rank's colour, copies are grey. A
    collective that waits for another rank is white until that one is ready, and says
    for which.
    """
    rows = {rank: log.lanes(rank) for rank in log.ranks}
    titles = [lane.title for lanes in rows.values() for lane in lanes]
    letters = min(max(map(len, titles), default=4), _LONGEST_TITLE)
    lanes_in_all = sum(map(len, rows.values()))
    height = 36 + len(rows) * (_HOST_HEIGHT + _GAP) + lanes_in_all * _LANE_HEIGHT
    height += 18 * len(log.missing)
    axis = Lanes(_title(log), height, max(log.seconds, 1e-6), 68 + 6.6 * letters)
    y = 8
    for rank, lanes in rows.items():
        axis.text(8, y + 13, f"rank {rank}", 14, weight="bold")
        axis.text(64, y + 13, "host", 12)
        _host(axis, y, log.events(rank), log.waits(rank))
        y += _HOST_HEIGHT
        for lane, events in lanes.items():
            title = lane.title
            if len(title) > _LONGEST_TITLE:
                title = f"{title[: _LONGEST_TITLE - 1]}…"
            axis.text(64, y + 16, title, 12)
            _stream(axis, y, events, COLOURS[rank % len(COLOURS)])
            y += _LANE_HEIGHT
        y += _GAP
    for rank, why in log.missing.items():
        axis.text(8, y + 12, f"rank {rank}: {why}", 12)
        y += 18
    axis.footer(height - 8)
    return axis


def _title(log) -> str:
    """What the picture shows, for who cannot see it."""
    title = f"Timeline of {plural(len(log.ranks), 'rank')}, simulated time"
    waits = [
        f"rank {rank} waits {seconds * 1e6:,.0f} µs for rank {other}"
        for (rank, other), seconds in list(log.waited().items())[:8]
    ]
    return f"{title}: {'; '.join(waits)}" if waits else title


def _host(axis: Lanes, y: float, events: list, waits: list) -> None:
    """A host: when it launches, and when it waits."""
    from simgpu._timing.cost import LAUNCH

    tall, drawn = _HOST_HEIGHT - 4, -1.0
    for event in events:
        x = event.launched * axis.scale
        if x > drawn:  # else there is a sliver already
            axis.bar(y, tall, event.launched, event.launched + LAUNCH, INK)
            drawn = x + max(LAUNCH * axis.scale, axis.least) / 2
    for wait in waits:
        axis.bar(y, tall, wait.start, wait.end, "#EEEEEE", wait.name)


def _stream(axis: Lanes, y: float, events: list, fill: str) -> None:
    """A stream: what runs, and what waits for another rank."""
    tall, drawn = _LANE_HEIGHT - 6, 0.0
    for event in sorted(events, key=lambda event: event.start):
        if event.end * axis.scale < drawn:
            continue
        drawn = event.start * axis.scale + 0.5
        start = event.start + event.waited
        if event.waited * axis.scale >= 0.5:
            who = event.waited_for
            words = (f"waits for rank {who}", f"for {who}")
            _waits(axis, y + 1, tall, event.start, start, *words)
        is_copy = event.kind == "copy"
        name = f"copy {event.name}" if is_copy else event.name
        its = HOST if is_copy else fill
        axis.bar(y + 1, tall, start, event.end, its, name, name.split()[0])
    axis.rule(y + tall + 2)


def _waits(axis: Lanes, y: float, tall: float, start: float, end: float,
           *words: str) -> None:  # fmt: skip
    axis.bar(y, tall, start, end, "white", *words, stroke=HOST, dashed=True)


def overlap(
    log: JobTimeline, rank: int = 0, begins: str = "threshold_backward"
) -> Picture:
    """What a rank computes in a step of DDP, and which of its messages that hides.

    Forward ends where autograd makes the gradient of the loss (`ones_like`), backward
    with the last message. Backward is cut into layers, the last one first, and a
    message says whose gradients it has.

    Args:
        log: `ranks.timeline()` of one step.
        rank: whose lanes are drawn.
        begins: the kernel with which backward begins a layer, that of its ReLU.
    """
    fill = COLOURS[rank % len(COLOURS)]
    in_order = sorted(log.events(rank), key=lambda event: event.start)
    computing = [event for event in in_order if event.kind == "kernel"]
    messages = [event for event in in_order if event.name.startswith("all_reduce")]
    begin = next(event.start for event in computing if event.name == "ones_like")
    last = messages[-1].end
    end = max(event.end for event in computing if event.start < last)
    hidden = sum(max(0.0, min(event.end, end) - event.start) for event in messages)
    total = sum(event.end - event.start for event in messages)
    title = (
        f"Rank {rank}, simulated: backward hides {hidden * 1e6:,.0f} of "
        f"{total * 1e6:,.0f} µs of all-reduce"
    )
    axis = Lanes(title, 180, log.seconds, 90, letter=6.2, room=4)
    axis.text(8, 20, title, 14, weight="bold")
    axis.text(8, 72, "computing", 12)
    axis.text(8, 112, "all-reduce", 12)
    axis.bar(54, 26, computing[0].start, begin, HOST, "forward")
    starts = [event.start for event in computing if event.name == begins] or [begin]
    axis.bar(54, 26, begin, starts[0], HOST, "loss")
    axis.text(axis.at(begin), 46, "backward, from the last layer to the first", 12)
    layers = list(zip(range(len(starts), 0, -1), [*starts[1:], end], strict=True))
    for (layer, stop), start in zip(layers, starts, strict=True):
        axis.bar(54, 26, start, stop, HOST, f"layer {layer}", layer, stroke=INK)
    axis.between(72, end, last, "the GPU waits", "waits")
    axis.bar(54, 26, last, computing[-1].end, HOST, "step")
    for number, event in enumerate(messages, 1):
        axis.bar(94, 26, event.start, event.end, fill, f"bucket {number}")
        done = [layer for layer, stop in layers if stop <= event.start + 1e-9]
        layers = layers[len(done) :]
        whose = f"{'layers' if done[1:] else 'layer'} {', '.join(map(str, done))}"
        words = "hidden" if event.end <= end else "not hidden"
        x = axis.at((event.start + event.end) / 2)
        axis.text(x, 134, whose, 12, "middle")
        axis.text(x, 149, words, 12, "middle")
        axis.title += f"; bucket {number}, {whose}: {words}"
    axis.footer(172)
    return axis


def job_memory(rows: list) -> Picture:
    """The memory of `ranks.memory()`: a bar for each rank, one scale for all.

    Allocated now in the rank's colour, and white up to the most that ever was. Where
    the GPU is not much larger than that, it is the bar's frame.
    """
    most = max((row.peak for row in rows), default=0)
    first = max(rows, key=lambda row: row.peak, default=None)
    words = f"Memory of {plural(len({row.rank for row in rows}), 'rank')} ({rows.kind})"
    if first is not None:
        words += f": at most {size_text(most)}, on rank {first.rank}"
    spoken = "; ".join(
        f"rank {row.rank} {size_text(row.allocated)} now, {size_text(row.peak)} at most"
        for row in rows
    )
    picture = Picture(WIDEST, 34 + 30 * max(1, len(rows)), f"{words}. {spoken}")
    picture.text(8, 20, words, 14, weight="bold")
    framed = any(row.total < 3 * most for row in rows)
    longest = max(row.total for row in rows) if framed else most
    left, right = 116, 236
    scale = (WIDEST - left - right) / (longest or 1)
    for number, row in enumerate(rows):
        y = 34 + 30 * number
        picture.text(8, y + 15, f"rank {row.rank} {row.device}", 13)
        if framed:
            picture.box(left, y, row.total * scale, 22, "#F3F3F3", stroke=HOST)
        picture.box(left, y, max(row.peak * scale, 1), 22, "white", dashed=True)
        fill = COLOURS[row.rank % len(COLOURS)]
        picture.box(left, y, max(row.allocated * scale, 1), 22, fill)
        figures = f"{size_text(row.allocated)} now, {size_text(row.peak)} at most"
        if framed:
            figures += f" of {size_text(row.total)}"
        picture.text(left + longest * scale + 8, y + 15, figures, 12)
    return picture
