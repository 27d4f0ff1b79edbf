"""Bars of memory on one axis: predicted in named parts, and counted below."""

from simgpu.pictures import COLOURS, HOST, WIDEST, Picture, size_text

MIB = 2**20
LEFT, RIGHT = 144, 136  # pixels beside the bars: their names, their sums
TOP, ROW, LEGEND = 34, 48, 168


def memory_bars(
    title: str,
    rows: dict[str, dict[str, float]],
    counted: dict[str, float],
    whose: str = "simulated",
) -> Picture:
    """What a memory is made of at several moments, all on one axis.

    Each row has a bar that is cut into its predicted parts, and below it a grey bar as
    long as what was counted. A part has the same colour in every row.

    Args:
        title: what the rows have in common.
        rows: moment -> predicted bytes of each named part.
        counted: moment -> bytes that were counted.
        whose: memory it is: "simulated", or the name of a card.

    Raises:
        ValueError: if the moments of both differ, or there are more parts than colours.

    Taught in 18-shard-everything.
    """
    if list(rows) != list(counted):
        raise ValueError(f"predicted {list(rows)}, but counted {list(counted)}")
    names = [*dict.fromkeys(name for parts in rows.values() for name in parts)]
    if len(names) > len(COLOURS):
        raise ValueError(f"{len(names)} parts, but {len(COLOURS)} colours")
    sums = {moment: sum(parts.values()) for moment, parts in rows.items()}
    spoken = "; ".join(
        f"{moment}: predicted {size_text(sums[moment])}, "
        f"counted {size_text(counted[moment])}"
        for moment in rows
    )
    lines = -(-len(names) * LEGEND // (WIDEST - 16))
    height = TOP + ROW * len(rows) + 20 * lines + 12
    picture = Picture(WIDEST, height, f"{title}, {whose}. {spoken}")
    picture.text(8, 20, title, 14, weight="bold")
    picture.text(WIDEST - 8, 20, f"MiB, {whose}", 12, "end")
    most = max([*sums.values(), *counted.values()], default=0) or 1
    scale = (WIDEST - LEFT - RIGHT) / most
    for row, (moment, parts) in enumerate(rows.items()):
        y = TOP + ROW * row
        picture.text(LEFT - 8, y + 17, moment, 13, "end", "bold")
        _stack(picture, y, parts, names, scale)
        end = LEFT + sums[moment] * scale + 6
        picture.text(end, y + 17, f"{size_text(sums[moment])} predicted", 12)
        picture.box(LEFT, y + 27, counted[moment] * scale, 8, HOST, stroke="none")
        end = LEFT + counted[moment] * scale + 6
        picture.text(end, y + 35, f"{size_text(counted[moment])} counted", 12)
    _legend(picture, TOP + ROW * len(rows), names)
    return picture


def _stack(picture: Picture, y: float, parts: dict, names: list, scale: float) -> None:
    """One bar of parts, each with its MiB where there is room."""
    x = float(LEFT)
    for name, size in parts.items():
        long, words = size * scale, f"{size / MIB:.2f}"
        if size:
            picture.box(x, y, long, 25, COLOURS[names.index(name)])
        if long > 5 * len(words):
            small = 12 if long > 7 * len(words) else 9
            picture.text(x + long / 2, y + 17, words, small, "middle")
        x += long


def _legend(picture: Picture, y: float, names: list) -> None:
    """The names of the parts, and what the grey bar is."""
    each = (WIDEST - 16) // LEGEND
    fills = [*zip(names, COLOURS, strict=False), ("counted", HOST)]
    for index, (name, fill) in enumerate(fills):
        left, top = 8 + LEGEND * (index % each), y + 4 + 20 * (index // each)
        picture.box(left, top, 14, 14, fill)
        picture.text(left + 20, top + 12, name, 13)
