"""Pictures of what runs when, from left to right."""

from helpers.draw.picture import COLOURS, HOST, INK, WIDEST, Picture, colour, plural


def timeline(log, width: int = WIDEST) -> Picture:
    """The log of `simgpu.timeline()`: lanes for the host and each stream of each GPU.

    Time goes from left to right. Kernels have their GPU's colour, copies are grey. The
    host's lane is dark where it launches and light where it waits. A copy between two
    GPUs is drawn on both.

    Taught in 00-start-here and 04-overlap-with-streams.
    """
    from simgpu.timing.cost import LAUNCH

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


def job_timeline(log, width: int = WIDEST) -> Picture:
    """The log of `ranks.timeline()`: the streams of all ranks on one axis.

    Under each rank its host, dark where it launches and light where it waits; its own
    streams; and those of NCCL. What runs has the rank's colour, copies are grey. A
    collective that waits for another rank is white until that one is ready, and says
    for which.

    Taught in 12-talk-between-ranks.
    """
    from simgpu.timing.cost import LAUNCH

    rows = [(rank, log.lanes(rank)) for rank in log.ranks]
    titles = [lane.title for _, lanes in rows for lane in lanes]
    left = 64 + max([28, *(6.4 * min(len(title), 26) for title in titles)])
    total = max(log.seconds, 1e-6)
    scale = (width - left - 12) / total
    host_height, lane_height = 18, 28
    lanes_in_all = sum(len(lanes) for _, lanes in rows)
    height = 12 + len(rows) * (host_height + 6) + lanes_in_all * lane_height + 28
    height += 18 * len(log.missing)
    picture = Picture(round(width), round(height), _job_title(log))

    def span(start, end, y, tall, fill, words, dashed=False):
        long = max((end - start) * scale, 0.5)
        x = left + start * scale
        stroke = HOST if dashed else "none"
        picture.box(x, y, long, tall, fill, dashed, stroke)
        for some in (words, words.split()[0]):
            if len(some) * 6.4 + 6 < long:
                picture.text(x + long / 2, y + tall / 2 + 4, some, 12, "middle")
                break

    y = 8.0
    for rank, lanes in rows:
        fill = COLOURS[rank % len(COLOURS)]
        picture.text(8, y + 13, f"rank {rank}", 14, weight="bold")
        picture.text(64, y + 13, "host", 12)
        drawn = -1.0
        for event in log.events(rank):
            x = event.launched * scale
            if x > drawn:
                long = max(LAUNCH * scale, 0.5)
                picture.box(left + x, y, long, host_height - 4, INK, stroke="none")
                drawn = x + long / 2
        for wait in log.waits(rank):
            span(wait.start, wait.end, y, host_height - 4, "#EEEEEE", wait.name)
        y += host_height
        for lane, events in lanes.items():
            title = lane.title if len(lane.title) <= 26 else f"{lane.title[:25]}…"
            picture.text(64, y + 16, title, 12)
            drawn = 0.0  # up to where slivers are there already
            for event in sorted(events, key=lambda event: event.start):
                if event.end * scale < drawn:
                    continue
                drawn = event.start * scale + 0.5
                start = event.start + event.waited
                if event.waited * scale >= 0.5:
                    words = f"waits for rank {event.waited_for}"
                    span(
                        event.start, start, y + 1, lane_height - 6, "white", words, True
                    )
                its = HOST if event.kind == "copy" else fill
                words = f"copy {event.name}" if event.kind == "copy" else event.name
                span(start, event.end, y + 1, lane_height - 6, its, words)
            y += lane_height
            picture.line(left, y - 4, width - 12, y - 4, HOST)
        y += 6
    for rank, why in log.missing.items():
        picture.text(8, y + 12, f"rank {rank}: {why}", 12)
        y += 18
    picture.text(left, height - 8, "0", 12)
    words = f"{total * 1e6:,.0f} µs (simulated)"
    picture.text(width - 12, height - 8, words, 12, "end")
    return picture


def _job_title(log) -> str:
    """What the picture shows, for who cannot see it."""
    title = f"Timeline of {plural(len(log.ranks), 'rank')}, simulated time"
    waits = [
        f"rank {rank} waits {seconds * 1e6:,.0f} µs for rank {other}"
        for (rank, other), seconds in list(log.waited().items())[:8]
    ]
    return f"{title}: {'; '.join(waits)}" if waits else title


def schedule(stages: list[list[tuple[str, int, float, float]]], title: str) -> Picture:
    """What each stage of a pipeline does when: forward and backward, micro-batch.

    Args:
        stages: for each, (kind, micro-batch, start, end); kind is "F" or "B".
        title: above the picture.

    Taught in 11-split-the-model.
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
