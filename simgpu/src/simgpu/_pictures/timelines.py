"""Pictures of what runs when, from left to right."""

from itertools import islice

from simgpu._pictures.lanes import Lanes
from simgpu._pictures.picture import COLOURS, HOST, INK, WIDEST, Picture, colour, plural
from simgpu._timing.timeline import Timeline


def timeline(
    log: Timeline, width: int = WIDEST, phases: dict[str, int] | None = None
) -> Picture:
    """The log of `simgpu.timeline()`: lanes for the host and each stream of each GPU.

    Time goes from left to right. Kernels have their GPU's colour, copies are grey. The
    host's lane is dark where it launches and light where it waits. A copy between two
    GPUs is drawn on both.

    Args:
        log: of what ran.
        width: in pixels.
        phases: name -> how many of the events it has, in their order. Each is marked
            above the host's lane, with its name where that fits.
    """
    from simgpu._timing.cost import LAUNCH

    lanes, waits = log.lanes(), log.waits
    total = max(log.seconds, 1e-6)
    left, lane_height, host_height = 84, 34, 26
    top = 24 if phases else 0
    height = top + host_height + len(lanes) * lane_height + 44
    title = (
        f"Timeline of {plural(len(log.events), 'event')} on "
        f"{plural(len(log.devices), 'GPU')}, simulated time"
    )
    axis = Lanes(title, height, total, left, width=width, letter=7, room=8)
    remaining = iter(log.events)
    for name, count in (phases or {}).items():
        its = [*islice(remaining, count)]
        start, end = its[0].start, max(event.end for event in its)
        axis.between(16, start, end, name)
        axis.line(axis.at(start), 24, axis.at(end), 24)
        for time in (start, end):
            axis.line(axis.at(time), 21, axis.at(time), 27)
    axis.text(8, top + 24, "host", 14)
    for event in log.events:
        end = event.launched + LAUNCH
        axis.bar(top + 10, host_height - 8, event.launched, end, INK)
    for wait in waits:
        words = wait.name, wait.name.split()[0]
        axis.bar(top + 10, host_height - 8, wait.start, wait.end, "#EEEEEE", *words)
    for row, ((device, stream), events) in enumerate(lanes.items()):
        y = top + 8 + host_height + row * lane_height
        axis.text(8, y + 20, f"{device} s{stream}" if stream else device, 14)
        axis.rule(y + lane_height - 4)
        drawn = 0.0  # up to where slivers are there already
        for event in events:
            if event.end * axis.scale < drawn:
                continue
            drawn = event.start * axis.scale + 0.5
            fill = HOST if event.kind == "copy" else colour(device)
            name = f"copy {event.name}" if event.kind == "copy" else event.name
            words = name, name.split()[0]
            axis.bar(y + 2, lane_height - 8, event.start, event.end, fill, *words)
    axis.footer(height - 10)
    return axis


def schedule(stages: list[list[tuple[str, int, float, float]]], title: str) -> Picture:
    """What each stage of a pipeline does when: forward and backward, micro-batch.

    Args:
        stages: for each, (kind, micro-batch, start, end); kind is "F" or "B".
        title: above the picture.
    """
    end = max((task[3] for row in stages for task in row), default=0) or 1
    row_height = 34
    height = 60 + row_height * len(stages)
    axis = Lanes(title, height, end, 76, letter=9, room=0, drop=5)
    axis.text(8, 20, title, 14, weight="bold")
    fills = {"F": COLOURS[0], "B": COLOURS[1]}
    for stage, row in enumerate(stages):
        y = 34 + row_height * stage
        axis.text(8, y + 19, f"stage {stage}", 13)
        for kind, number, start, stop in row:
            tall = row_height - 6
            axis.bar(y, tall, start, stop, fills[kind], number, stroke=INK)
    names = {"forward": COLOURS[0], "backward": COLOURS[1], "idle": "white"}
    axis.legend(height - 20, names)
    return axis
