"""What each rank has before and after several collectives, number by number."""

from simgpu.pictures import COLOURS, WIDEST, Picture

_SUM = "#DDDDDD"
_BOX, _LEFT, _MIDDLE = 19, 118, 46  # pixels: height of a number, margin, arrow
_TITLE = 34


def before_after(collectives: dict[str, list[tuple[list, list]]]) -> Picture:
    """A row for each collective: the ranks on the left before, on the right after.

    A number has the colour of the rank where it comes from, wherever it travels; one
    that no rank had before is grey.

    Args:
        collectives: name -> for each rank its numbers before and after. No two ranks
            have the same number before.

    Taught in 15-talk-between-ranks.
    """
    rows = {name: list(ranks) for name, ranks in collectives.items()}
    size = max(len(ranks) for ranks in rows.values())
    wide = (WIDEST - _LEFT - _MIDDLE - 8) / (2 * size)
    heights = {
        name: _BOX * max(len(words) for pair in ranks for words in pair) + 14
        for name, ranks in rows.items()
    }
    picture = Picture(WIDEST, _TITLE + sum(heights.values()), _spoken(rows))
    right = _LEFT + size * wide + _MIDDLE
    for left, when in ((_LEFT, "before"), (right, "after")):
        for rank in range(size):
            x = left + (rank + 0.5) * wide
            picture.text(x, 28, f"rank {rank}", 11, "middle")
        picture.text(left + size * wide / 2, 13, when, 13, "middle", "bold")
    top = _TITLE
    for name, ranks in rows.items():
        middle = top + (heights[name] - 14) / 2
        picture.text(8, middle + 5, name, 13, weight="bold")
        picture.line(right - _MIDDLE + 6, middle, right - 10, middle, arrow=True)
        homes = {n: rank for rank, (before, _) in enumerate(ranks) for n in before}
        for rank, pair in enumerate(ranks):
            for left, numbers in zip((_LEFT, right), pair, strict=True):
                for place, number in enumerate(numbers):
                    home = homes.get(number)
                    fill = _SUM if home is None else COLOURS[home % len(COLOURS)]
                    x, y = left + rank * wide, top + place * _BOX
                    picture.box(x + 3, y, wide - 6, _BOX, fill)
                    picture.text(x + wide / 2, y + 14, number, 12, "middle")
        top += heights[name]
    return picture


def _spoken(rows: dict) -> str:
    """What the picture shows, for who cannot see it."""
    said = []
    for name, ranks in rows.items():
        each = "; ".join(
            f"rank {rank} has {_list(before)}, then {_list(after)}"
            for rank, (before, after) in enumerate(ranks)
        )
        said.append(f"{name}: {each}")
    return ". ".join(said)


def _list(numbers: list) -> str:
    return " ".join(map(str, numbers))
