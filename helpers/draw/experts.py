"""Tokens that travel to the rank of their expert."""

from simgpu.pictures import COLOURS, Picture

_CELL, _GAP = 24, 18  # pixels: width of a token, between two ranks
_ROWS = {"chosen": 52, "sorted": 94, "after": 150}


def tokens_to_experts(chosen: list[list[int]]) -> Picture:
    """An all-to-all of tokens: each goes to the rank that has the number it chose.

    A token keeps the colour of the rank where it comes from.

    Args:
        chosen: for each rank, the expert of each of its tokens.

    Taught in 22-route-to-experts.
    """
    ranks = range(len(chosen))
    own = [[(rank, number) for number in chosen[rank]] for rank in ranks]
    before = [sorted(row, key=lambda token: token[1]) for row in own]
    after = [[t for row in before for t in row if t[1] == rank] for rank in ranks]
    most = max(len(row) for row in before + after)
    wide = most * _CELL + _GAP
    picture = Picture(76 + len(chosen) * wide, 192, _spoken(before, after))
    picture.text(8, 20, "all-to-all: tokens to their expert", 14, weight="bold")
    for rank in ranks:
        picture.text(
            76 + rank * wide + most * _CELL / 2, 42, f"rank {rank}", 13, "middle"
        )
    for (when, y), rows in zip(_ROWS.items(), (own, before, after), strict=True):
        picture.text(8, y + 20, when, 13)
        for rank, row in enumerate(rows):
            for place, (home, number) in enumerate(row):
                x = 76 + rank * wide + place * _CELL
                picture.box(x, y, _CELL, 30, COLOURS[home % len(COLOURS)])
                picture.text(x + _CELL / 2, y + 20, number, 13, "middle")
    return picture


def _spoken(before: list, after: list) -> str:
    said = []
    for rank, (had, has) in enumerate(zip(before, after, strict=True)):
        experts = ", ".join(str(number) for _, number in had)
        homes = ", ".join(str(home) for home, _ in has)
        said.append(f"rank {rank}: tokens for {experts}, then tokens of ranks {homes}")
    return "Tokens travel to their expert. " + "; ".join(said)
