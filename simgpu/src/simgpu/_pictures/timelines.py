"""Pictures of what runs when, from left to right."""

from simgpu._pictures.picture import COLOURS, HOST, INK, WIDEST, Picture, colour, plural
from simgpu._timing.timeline import Timeline


def timeline(log: Timeline, width: int = WIDEST) -> Picture:
    """The log of `simgpu.timeline()`: lanes for the host and each stream of each GPU.

    Time goes from left to right. Kernels have their GPU's colour, copies are grey. The
    host's lane is dark where it launches and light where it waits. A copy between two
    GPUs is drawn on both.

    Taught in 00-start-here and 05-overlap-with-streams.
    """
    from simgpu._timing.cost import LAUNCH

    lanes, waits = log.lanes(), log.waits
    total = max(log.seconds, 1e-6)
    left, lane_height, host_height = 84, 34, 26
    height = host_height + len(lanes) * lane_height + 44
    title = (
        f"Timeline of {plural(len(log.events), 'event')} on "
        f"{plural(len(log.devices), 'GPU')}, simulated time"
    )
    picture = Picture(width, height, title)
    scale = (width - left - 12) / total

    def span(start, end, y, tall, fill, words):
        long = max((end - start) * scale, 0.5)
        x = left + start * scale
        picture.box(x, y, long, tall, fill, stroke="none")
        words = words if len(words) * 7 + 8 < long else words.split()[0]
        if len(words) * 7 + 8 < long:
            picture.text(x + long / 2, y + tall / 2 + 4, words, 12, "middle")

    picture.text(8, 24, "host", 14)
    for event in log.events:
        picture.box(
            left + event.launched * scale, 10, max(LAUNCH * scale, 0.5),
            host_height - 8, INK, stroke="none",
        )  # fmt: skip
    for wait in waits:
        span(wait.start, wait.end, 10, host_height - 8, "#EEEEEE", wait.name)
    for row, ((device, stream), events) in enumerate(lanes.items()):
        y = 8 + host_height + row * lane_height
        picture.text(8, y + 20, f"{device} s{stream}" if stream else device, 14)
        picture.line(left, y + lane_height - 4, width - 12, y + lane_height - 4, HOST)
        drawn = 0.0  # up to where slivers are there already
        for event in events:
            if event.end * scale < drawn:
                continue
            drawn = event.start * scale + 0.5
            fill = HOST if event.kind == "copy" else colour(device)
            words = f"copy {event.name}" if event.kind == "copy" else event.name
            span(event.start, event.end, y + 2, lane_height - 8, fill, words)
    picture.text(left, height - 10, "0", 12)
    words = f"{total * 1e6:,.0f} µs (simulated)"
    picture.text(width - 12, height - 10, words, 12, "end")
    return picture


def schedule(stages: list[list[tuple[str, int, float, float]]], title: str) -> Picture:
    """What each stage of a pipeline does when: forward and backward, micro-batch.

    Args:
        stages: for each, (kind, micro-batch, start, end); kind is "F" or "B".
        title: above the picture.

    Taught in 13-split-the-model.
    """
    end = max((task[3] for row in stages for task in row), default=0) or 1
    left, row_height = 76, 34
    picture = Picture(WIDEST, 60 + row_height * len(stages), title)
    picture.text(8, 20, title, 14, weight="bold")
    scale = (WIDEST - left - 12) / end
    for stage, row in enumerate(stages):
        y = 34 + row_height * stage
        picture.text(8, y + 19, f"stage {stage}", 13)
        for kind, micro_batch, start, stop in row:
            x, width = left + start * scale, (stop - start) * scale
            fill = COLOURS[0] if kind == "F" else COLOURS[1]
            picture.box(x, y, width, row_height - 6, fill)
            if width >= 9 * len(str(micro_batch)):
                picture.text(x + width / 2, y + 19, micro_batch, 12, "middle")
    y = picture.height - 20
    for i, (words, fill) in enumerate(
        (("forward", COLOURS[0]), ("backward", COLOURS[1]), ("idle", "white"))
    ):
        picture.box(left + 110 * i, y, 14, 14, fill)
        picture.text(left + 110 * i + 20, y + 12, words, 12)
    return picture
