"""One step of a rank in several runs: computing, and messages on each kind of link."""

import re

from simgpu.pictures import COLOURS, HOST, Lanes, Picture

_LEFT, _LANE, _HEAD = 84, 26, 30
FILLS = {"computing": COLOURS[0], "NVLink": COLOURS[2], "network": COLOURS[5]}


def network_steps(runs: dict, title: str, per_node: int) -> Picture:
    """What rank 0 computes and sends: in its node, and over the network.

    All runs share one axis. Messages of one kind on one link are a lane. A dashed box
    is a GPU that waits.

    Args:
        runs: name -> the log of `ranks.timeline()` of one step.
        title: above the picture.
        per_node: ranks on each node.

    Taught in 25-leave-one-machine.
    """
    found = {name: _lanes(log, per_node) for name, log in runs.items()}
    ends = {name: _end(lanes) for name, lanes in found.items()}
    said = "; ".join(
        f"{name} {1e6 * ends[name]:,.0f} µs, of which the GPU computes "
        f"{1e6 * _busy(lanes['computing']):,.0f} and the network is busy "
        f"{1e6 * _busy(_far(lanes)):,.0f}"
        for name, lanes in found.items()
    )
    rows = sum(len(lanes) for lanes in found.values())
    height = 58 + _HEAD * len(runs) + _LANE * rows
    spoken, longest = f"{title}, simulated. {said}", max(ends.values())
    axis = Lanes(spoken, height, longest, _LEFT, size=11, letter=6.4, room=4)
    axis.text(8, 20, title, 14, weight="bold")
    y = 28
    for name, lanes in found.items():
        words = f"{name}: {1e6 * ends[name]:,.0f} µs"
        axis.text(8, y + 18, words, 13, weight="bold")
        y += _HEAD
        for lane, spans in lanes.items():
            place, _, label = lane.partition(": ")
            axis.text(8, y + 14, place, 12)
            for start, stop in spans:
                axis.bar(y, _LANE - 8, start, stop, FILLS[place])
            _name(axis, label, spans, y)
            if lane == "computing":
                _waits(axis, spans, ends[name], y)
            y += _LANE
    axis.rule(y + 2)
    axis.footer(y + 18)
    return axis


def _waits(axis: Lanes, spans: list, end: float, y: float) -> None:
    """Dashed boxes where nothing is computed, with words in the long ones."""
    stops = [0.0, *(stop for _, stop in spans)]
    starts = [*(start for start, _ in spans), end]
    for stop, start in zip(stops, starts, strict=True):
        if (start - stop) * axis.scale >= 12:
            look = {"stroke": HOST, "dashed": True}
            axis.bar(y, _LANE - 8, stop, start, "white", "waits", **look)


def _name(axis: Lanes, label: str, spans: list, y: float) -> None:
    """A lane's kind of message: in each bar that is long enough, else beside them."""
    needed = axis.letter * len(label) + axis.room
    inside = [s for s in spans if label and (s[1] - s[0]) * axis.scale > needed]
    for start, stop in inside:
        axis.between(y + 13, start, stop, label)
    if inside or not label:
        return
    before, after = axis.at(spans[0][0]), axis.at(spans[-1][1])
    if before - axis.left > needed + 6:
        axis.text(before - 6, y + 13, label, 11, "end")
    else:
        axis.text(after + 6, y + 13, label, 11)


def _lanes(log, per_node: int) -> dict[str, list[tuple[float, float]]]:
    """Lane -> (start, end) of what runs there, in order, joined where it touches."""
    events = [event for event in log.events(0) if event.kind != "copy"]
    begin = min(event.start for event in events)
    lanes: dict[str, list] = {"computing": []}
    for event in sorted(events, key=lambda event: event.start):
        lane = "computing"
        if event.kind == "collective":
            where = "network" if _crosses(event.group, per_node) else "NVLink"
            lane = f"{where}: {event.name.partition(' ')[0].replace('_', '-')}"
        spans = lanes.setdefault(lane, [])
        start, stop = event.start + event.waited - begin, event.end - begin
        if lane == "computing" and spans and start - spans[-1][1] < 1e-9:
            start = spans.pop()[0]
        spans.append((start, stop))
    return dict(sorted(lanes.items(), key=lambda item: _ORDER[item[0].split(":")[0]]))


_ORDER = {"computing": 0, "NVLink": 1, "network": 2}


def _crosses(group: str, per_node: int) -> bool:
    """Whether a group, such as "ranks 0, 2" or "all ranks", is on several nodes."""
    members = [int(number) for number in re.findall(r"\d+", group.partition("(")[0])]
    return not members or len({rank // per_node for rank in members}) > 1


def _end(lanes: dict) -> float:
    return max(stop for spans in lanes.values() for _, stop in spans)


def _far(lanes: dict) -> list:
    return [s for lane, spans in lanes.items() if lane[:7] == "network" for s in spans]


def _busy(spans: list) -> float:
    """Seconds in which at least one of them runs."""
    total, until = 0.0, 0.0
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return total
