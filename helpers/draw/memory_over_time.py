"""Memory over time: what lives on a GPU from one block that is taken to the next.

PyTorch's allocator notes every block that it hands out and takes back after
`torch.cuda.memory._record_memory_history()`, and
`torch.cuda.memory._set_memory_metadata(line)` says which line of the program asks. A
block is named by the line that made it, and by when it goes. The axis counts blocks
that are taken and given back, as PyTorch's own viewer does, and no seconds.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

from simgpu.pictures import COLOURS, HOST, INK, WIDEST, Picture, size_text

LIVING = {"forward": "activations", "backward": "gradients", "step": "optimizer state"}
AGAIN, TEMPORARY = "computed again", "temporary"
FILLS = {  # band -> colour, from the lowest; others are grey and below
    "parameters": COLOURS[0],
    "optimizer state": COLOURS[3],
    "gradients": COLOURS[2],
    "activations": COLOURS[1],
    AGAIN: COLOURS[4],
    TEMPORARY: COLOURS[5],
}
MIB, GIB = 2**20, 2**30
COLUMNS = 300  # at most, of a row
LEFT, RIGHT, TOP, HIGH, ROW = 62, 12, 58, 132, 192  # pixels; HIGH is a part of ROW
WIDE = WIDEST - LEFT - RIGHT


class Moment(NamedTuple):
    """What lives after one event, and the line of the program that it is part of."""

    line: str
    sizes: dict[str, float]  # band -> bytes

    @property
    def total(self) -> float:
        return sum(self.sizes.values())


def moments(events: list[dict], before: Mapping[str, float]) -> list[Moment]:
    """What lives after each event, in bands.

    A block that goes before its line ends is temporary. One that stays is an activation
    if forward made it, a gradient if backward did, and optimizer state if step did.
    What `torch.utils.checkpoint` makes in backward is computed again.

    Args:
        events: of one card: `torch.cuda.memory._snapshot()["device_traces"][0]`.
        before: band -> bytes that lived before the first event. What of it goes is
            taken from the last band.

    Raises:
        ValueError: if an event has no line.
    """
    made, names, freed, lines = {}, {}, {}, []
    runs = [n for n, (_, run) in enumerate(groupby(events, _line)) for _ in run]
    for i, event in enumerate(events):
        lines.append(_line(event))
        if event["action"] == "alloc":
            made[event["addr"]], names[i] = i, _name(event)
        elif event["action"] == "free_requested" and event["addr"] in made:
            freed[i] = made.pop(event["addr"])
            if runs[freed[i]] == runs[i] and names[freed[i]] != AGAIN:
                names[freed[i]] = TEMPORARY
    sizes, found, rest = dict(before), [], [*before][-1]
    for i, event in enumerate(events):
        if event["action"] == "alloc":
            sizes[names[i]] = sizes.get(names[i], 0) + event["size"]
        elif event["action"] == "free_requested":
            sizes[names[freed[i]] if i in freed else rest] -= event["size"]
        found.append(Moment(lines[i], dict(sizes)))
    return found


def _line(event: dict) -> str:
    if not event["user_metadata"]:
        raise ValueError(
            "an event has no line: call torch.cuda.memory._set_memory_metadata("
            "'forward') before the forward pass, and so on"
        )
    return event["user_metadata"]


def _name(event: dict) -> str:
    """The band of a block that outlives the line that made it."""
    if any(frame["name"] == "recompute_fn" for frame in event["frames"]):
        return AGAIN
    return LIVING.get(_line(event), TEMPORARY)


def memory_over_time(
    title: str,
    steps: Mapping[str, list[dict]],
    before: Mapping[str, float],
    whose: str = "simulated",
    limit: float = 0,
) -> Picture:
    """What lives on a GPU during steps of training: a row for each, of one size.

    Args:
        title: what the rows have in common.
        steps: name -> the events of it, as `moments` takes them.
        before: band -> bytes that lived before the first event.
        whose: memory it is: "simulated", or the name of a card.
        limit: bytes of the card, drawn as a dashed line; 0 draws none.

    Raises:
        ValueError: if an event has no line.

    Taught in 04-count-memory.
    """
    rows = {name: moments(events, before) for name, events in steps.items()}
    every = [moment for row in rows.values() for moment in row]
    seen = {band for moment in every for band, size in moment.sizes.items() if size}
    others = [band for band in before if band not in FILLS]
    bands = [band for band in (*others, *FILLS) if band in seen]
    spoken = "; ".join(f"{name}: {_spoken(row)}" for name, row in rows.items())
    height = TOP + ROW * len(rows) + 18
    picture = Picture(WIDEST, height, f"{title}, {whose}. {spoken}")
    picture.text(8, 20, title, 14, weight="bold")
    picture.text(WIDEST - 8, 20, f"memory, {whose}", 12, "end")
    x = 8.0
    for band in bands:
        picture.box(x, 32, 12, 12, FILLS.get(band, HOST))
        picture.text(x + 17, 43, band, 12)
        x += 17 + 6.4 * len(band) + 14
    most = max(limit, *(moment.total for moment in every))
    for place, (name, full) in enumerate(rows.items()):
        thin = -(-len(full) // COLUMNS)  # events of a column: their highest is drawn
        parts = (full[i : i + thin] for i in range(0, len(full), thin))
        row = [max(part, key=lambda moment: moment.total) for part in parts]
        wide = WIDE / len(row)
        bottom = TOP + ROW * place + 38 + HIGH
        _axis(picture, bottom, most, name)
        _areas(picture, bottom, row, bands, wide, HIGH / most)
        _lines(picture, bottom, row, wide)
        _peak(picture, bottom, row, wide, HIGH / most)
        if limit:
            y = bottom - HIGH * limit / most
            for left in range(LEFT, WIDEST - RIGHT, 8):
                picture.line(left, y, left + 4, y)
            words = f"the card: {size_text(limit)}"
            picture.text(WIDEST - RIGHT, y - 4, words, 11, "end")
    words = "from left to right: each block that is taken or given back, not time"
    picture.text(WIDEST - RIGHT, height - 6, words, 11, "end")
    return picture


def _runs(row: list[Moment]) -> Iterator[tuple[str, int, int]]:
    """The lines of the program in turn: line, first event, the event after the last."""
    first = 0
    for line, part in groupby(row, lambda moment: moment.line):
        end = first + len([*part])
        yield line, first, end
        first = end


def _spoken(row: list[Moment]) -> str:
    """The highest value of each line of the program, and of all."""
    lines = dict.fromkeys(moment.line for moment in row)
    tops = {line: max(m.total for m in row if m.line == line) for line in lines}
    return ", ".join(f"{line} up to {size_text(top)}" for line, top in tops.items())


def _axis(picture: Picture, bottom: float, most: float, name: str) -> None:
    """The row's name, and a few sizes with thin lines across."""
    picture.text(8, bottom - HIGH - 30, name, 13, weight="bold")
    unit = GIB if most >= 4 * GIB else MIB
    ticks = (digit * 10**power for power in range(6) for digit in (1, 2, 5))
    tick = next(tick for tick in ticks if most / unit / tick <= 4) * unit
    for number in range(int(most / tick) + 1):
        y = bottom - HIGH * number * tick / most
        picture.line(LEFT, y, WIDEST - RIGHT, y, HOST)
        words = size_text(number * tick) if number else "0"
        picture.text(LEFT - 6, y + 4, words, 11, "end")


def _areas(
    picture: Picture, bottom: float, row: list[Moment], bands: list, wide: float,
    scale: float,
) -> None:  # fmt: skip
    """The bands on top of each other: the highest is drawn first, behind the others."""
    for number in range(len(bands), 0, -1):
        heights = [sum(m.sizes.get(b, 0) for b in bands[:number]) for m in row]
        points, x = [(float(LEFT), bottom)], float(LEFT)
        for height, part in groupby(heights):
            y = bottom - height * scale
            points.append((x, y))
            x += wide * len([*part])
            points.append((x, y))
        points.append((x, bottom))
        picture.area(points, FILLS.get(bands[number - 1], HOST))


def _lines(picture: Picture, bottom: float, row: list[Moment], wide: float) -> None:
    """Where each line of the program begins, and its name, if it is not too narrow."""
    for line, first, end in _runs(row):
        x = LEFT + first * wide
        picture.line(x, bottom - HIGH - 10, x, bottom + 4)
        room = (end - first) * wide / len(line)
        if room > 3:  # where there is little, the name stands above
            y = bottom + 14 if room > 6.6 else bottom - HIGH - 14
            picture.text(min(x + 3, WIDEST - 6.2 * len(line)), y, line, 11)
    x = LEFT + len(row) * wide
    picture.line(x, bottom - HIGH - 10, x, bottom + 4)


def _peak(
    picture: Picture, bottom: float, row: list[Moment], wide: float, scale: float
) -> None:
    """A ring around the highest point, with its size and its line."""
    top = max(row, key=lambda moment: moment.total)
    x = LEFT + (row.index(top) + 0.5) * wide
    y = bottom - top.total * scale
    picture.parts.append(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="none" stroke="{INK}" '
        'stroke-width="2"/>'
    )
    words = f"peak {size_text(top.total)}, in {top.line}"
    left, side = (x, "start") if x < WIDEST / 2 else (x - 7 * len(words), "end")
    picture.box(left, y - 17, 7 * len(words), 12, stroke="white")  # hides lines
    picture.text(x, y - 7, words, 12, side, "bold")
