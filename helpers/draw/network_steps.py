"""One step of a rank in several runs: computing, and messages on each kind of link."""

import re

from simgpu.pictures import COLOURS, HOST, WIDEST, Picture

_LEFT, _LANE, _HEAD = 84, 26, 30
_LABEL = 6.4  # pixels of a letter in size 11
NVLINK, NETWORK = COLOURS[2], COLOURS[5]


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
    picture = Picture(WIDEST, height, f"{title}, simulated. {said}")
    picture.text(8, 20, title, 14, weight="bold")
    scale = (WIDEST - _LEFT - 12) / max(ends.values())
    y = 28
    for name, lanes in found.items():
        words = f"{name}: {1e6 * ends[name]:,.0f} µs"
        picture.text(8, y + 18, words, 13, weight="bold")
        y += _HEAD
        for lane, spans in lanes.items():
            picture.text(8, y + 14, lane.partition(":")[0], 12)
            fill = {"computing": COLOURS[0], "NVLink": NVLINK}.get(
                lane.partition(":")[0], NETWORK
            )
            label = lane.partition(": ")[2]
            for start, stop in spans:
                x, width = _LEFT + start * scale, max((stop - start) * scale, 0.5)
                picture.box(x, y, width, _LANE - 8, fill, stroke="none")
            _name(picture, label, spans, y, scale)
            if lane == "computing":
                _waits(picture, spans, ends[name], y, scale)
            y += _LANE
    picture.line(_LEFT, y + 2, WIDEST - 12, y + 2, HOST)
    picture.text(_LEFT, y + 18, "0", 12)
    words = f"{1e6 * max(ends.values()):,.0f} µs (simulated)"
    picture.text(WIDEST - 12, y + 18, words, 12, "end")
    return picture


def _waits(picture: Picture, spans: list, end: float, y: float, scale: float) -> None:
    """Dashed boxes where nothing is computed, with words in the long ones."""
    stops = [0.0, *(stop for _, stop in spans)]
    starts = [*(start for start, _ in spans), end]
    for stop, start in zip(stops, starts, strict=True):
        width = (start - stop) * scale
        if width < 12:
            continue
        x = _LEFT + stop * scale
        picture.box(x, y, width, _LANE - 8, "white", True, HOST)
        if width > 40:
            picture.text(x + width / 2, y + 13, "waits", 11, "middle")


def _name(picture: Picture, label: str, spans: list, y: float, scale: float) -> None:
    """A lane's kind of message: in each box that is long enough, else beside them."""
    needed = _LABEL * len(label) + 4
    inside = [s for s in spans if label and (s[1] - s[0]) * scale > needed]
    for start, stop in inside:
        x = _LEFT + (start + stop) / 2 * scale
        picture.text(x, y + 13, label, 11, "middle")
    if inside or not label:
        return
    before, after = spans[0][0] * scale, spans[-1][1] * scale
    if before > needed + 6:
        picture.text(_LEFT + before - 6, y + 13, label, 11, "end")
    else:
        picture.text(_LEFT + after + 6, y + 13, label, 11)


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
