"""Which values are equal on all ranks, and which are not."""

from collections.abc import Mapping, Sequence

from simgpu.pictures import COLOURS, WIDEST, Picture, plural

_LEFT, _ROW, _TOP = 270, 34, 40


def equal_ranks(values: Mapping[str, Sequence[float]], cause: Mapping[str, str]):
    """A row for each kind of value, a column for each rank; equal values look alike.

    A box has the colour of the first rank with that value, and the value in it.

    Args:
        values: what it is -> a number of each rank, such as a checksum.
        cause: what it is -> why the ranks have it so, to stand beside the row.
    """
    ranks = max(map(len, values.values()), default=0)
    width = (WIDEST - _LEFT - 190) / max(ranks, 1)
    said = [f"{what}: {_words(numbers)}" for what, numbers in values.items()]
    title = f"Values on {plural(ranks, 'rank')}. {'; '.join(said)}"
    picture = Picture(WIDEST, _TOP + _ROW * len(values) + 6, title)
    for rank in range(ranks):
        x = _LEFT + (rank + 0.5) * width
        picture.text(x, _TOP - 14, f"rank {rank}", 13, "middle", "bold")
    for place, (what, numbers) in enumerate(values.items()):
        y = _TOP + place * _ROW
        picture.text(8, y + 18, what, 13)
        for rank, number in enumerate(numbers):
            fill = COLOURS[list(numbers).index(number) % len(COLOURS)]
            x = _LEFT + rank * width
            picture.box(x + 1, y, width - 2, _ROW - 8, fill)
            picture.text(x + width / 2, y + 18, f"{number:.3f}", 12, "middle")
        why = cause.get(what, "")
        weight = "bold" if why.startswith("wrong") else "normal"
        picture.text(WIDEST - 182, y + 18, why, 12, weight=weight)
    return picture


def _words(numbers: Sequence[float]) -> str:
    different = len(set(numbers))
    return "equal" if different == 1 else f"{different} different values"
