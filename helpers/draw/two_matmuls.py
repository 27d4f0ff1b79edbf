"""Two matmuls cut over ranks: which slice of weight, input and output a rank has.

The first weight is cut by columns and the second by rows. Each rank has a colour; grey
is what every rank has. The second picture has what ranks send before and after.
"""

from simgpu.pictures import COLOURS, HOST, INK, WIDEST, Picture

_SMALL, _LARGE, _TALL = 62, 124, 96  # pixels: width, hidden, tokens
_X, _WEIGHT, _OUT = 52, 218, 420  # where the three parts of a row begin


def two_matmuls(ranks: int, tokens: int, width: int, hidden: int) -> Picture:
    """`gelu(x @ A) @ B` on ranks that have a part of A's columns and of B's rows.

    Args:
        ranks: how many; at most 7.
        tokens: rows of x.
        width: columns of x and of the result.
        hidden: columns of A and rows of B; the ranks divide it.

    Taught in 19-slice-a-layer.

    Raises:
        ValueError: if the ranks do not divide the columns.
    """
    if hidden % ranks or not 1 <= ranks <= len(COLOURS):
        raise ValueError(f"{hidden} columns cannot be cut over {ranks} ranks")
    part = hidden // ranks
    title = (
        f"Two matmuls on {ranks} ranks: each has {part} of {hidden} columns of A and "
        f"of the hidden numbers, and {part} rows of B; an all-reduce adds {ranks} terms"
    )
    picture = Picture(WIDEST, 372, title)
    for number in range(ranks):
        x = 8 + 84 * number
        picture.box(x, 8, 16, 14, COLOURS[number])
        picture.text(x + 22, 20, f"rank {number}", 12)
    picture.box(8 + 84 * ranks, 8, 16, 14, HOST)
    picture.text(30 + 84 * ranks, 20, "on every rank", 12)

    y = 60
    picture.text(8, y + 54, "1", 18, weight="bold")
    _matrix(picture, _X, y, _SMALL, _TALL, "x", f"{tokens} × {width}")
    _sign(picture, (_X + _SMALL + _WEIGHT) / 2, y, "×")
    shape = f"{width} × {part} a rank"
    _matrix(picture, _WEIGHT, y, _LARGE, _SMALL, "A, by columns", shape, ranks, "x")
    _sign(picture, (_WEIGHT + _LARGE + _OUT) / 2, y, "=")
    shape = f"{tokens} × {part} a rank"
    _matrix(picture, _OUT, y, _LARGE, _TALL, "hidden, then GELU", shape, ranks, "x")
    picture.text(_OUT + _LARGE + 16, y + 44, "nothing", 12)
    picture.text(_OUT + _LARGE + 16, y + 60, "to send", 12)

    y = 226
    picture.text(8, y + 54, "2", 18, weight="bold")
    shape = f"{tokens} × {part} a rank"
    _matrix(picture, _X, y, _LARGE, _TALL, "hidden", shape, ranks, "x")
    _sign(picture, (_X + _LARGE + _WEIGHT) / 2, y, "×")
    shape = f"{part} × {width} a rank"
    _matrix(picture, _WEIGHT, y, _SMALL, _LARGE, "B, by rows", shape, ranks, "y")
    _sign(picture, (_WEIGHT + _SMALL + _OUT - 90) / 2, y, "=")
    left = _OUT - 90
    for number in range(ranks):
        shift = 12 * number
        picture.box(left + shift, y + shift / 2, _SMALL, _TALL, COLOURS[number])
    bottom = y + _TALL + 6 * (ranks - 1) + 16
    picture.text(left, y - 8, f"{ranks} terms of y", 12)
    picture.text(left, bottom, f"{tokens} × {width} each", 11)
    start = left + _SMALL + 12 * (ranks - 1) + 12
    end = WIDEST - _SMALL - 24
    picture.line(start, y + 48, end - 8, y + 48, arrow=True)
    picture.text((start + end) / 2, y + 40, "all-reduce", 12, "middle")
    picture.text((start + end) / 2, y + 66, "adds them", 12, "middle")
    _matrix(picture, end, y, _SMALL, _TALL, "y", f"{tokens} × {width}")
    return picture


def f_and_g(ranks: int) -> Picture:
    """What ranks have and send around two sliced matmuls, with and without a token cut.

    A square is all tokens (down) and all numbers of a token (across).

    Args:
        ranks: how many; at most 7.

    Taught in 19-slice-a-layer.
    """
    half = ("all-gather", "reduce-scatter")  # of the tokens
    rows = {
        "Tensor parallelism: between the slices, each rank has all tokens": (
            (1, 1), ("pass on", "all-reduce")),
        f"With the tokens cut: between the slices, each rank has 1/{ranks} of them": (
            (1, ranks), half),
    }  # fmt: skip
    said = "; ".join(
        f"{name}: f {there} and {back}, g {back} and {there}"
        for name, (_, (there, back)) in rows.items()
    )
    picture = Picture(WIDEST, 208, f"What ranks send, forward and backward. {said}")
    for number, (name, (between, (there, back))) in enumerate(rows.items()):
        y = 16 + 104 * number
        picture.text(8, y, name, 13, weight="bold")
        picture.text(WIDEST - 8, y, "colours: ranks; grey: all", 11, "end")
        parts = (between, (ranks, 1), between)
        words = ("input", "slices, of all tokens", "result")
        for place, (cut, below) in enumerate(zip(parts, words, strict=True)):
            x = 8 + 258 * place
            for rank in range(ranks):
                _part(picture, x + 152 / ranks * rank, y + 22, 30, rank, *cut)
            picture.text(x + 72, y + 74, below, 11, "middle")
        for x, letter, ahead, behind in (
            (160, "f", there, back),
            (418, "g", back, there),
        ):
            picture.text(x + 50, y + 26, f"{letter}: {ahead}", 11, "middle")
            picture.line(x + 4, y + 32, x + 96, y + 32, arrow=True)
            picture.line(x + 96, y + 46, x + 4, y + 46, arrow=True)
            picture.text(x + 50, y + 62, behind, 12, "middle")
            picture.text(x + 50, y + 76, "in backward", 11, "middle")
    return picture


def _part(picture, x, y, side, rank, across, down) -> None:
    """A square of tokens and numbers, and the part of it that a rank has."""
    picture.box(x, y, side, side, stroke=HOST)
    fill = COLOURS[rank] if across > 1 or down > 1 else HOST
    left = x + side / across * rank if across > 1 else x
    top = y + side / down * rank if down > 1 else y
    picture.box(left, top, side / across, side / down, fill, stroke=INK)


def _matrix(picture, x, y, width, height, name, shape, parts=1, along="x") -> None:
    """A matrix with its name above and its shape below, perhaps in coloured parts."""
    across, down = (parts, 1) if along == "x" else (1, parts)
    for number in range(parts):
        fill = COLOURS[number] if parts > 1 else HOST
        left = x + number * width / across if across > 1 else x
        top = y + number * height / down if down > 1 else y
        picture.box(left, top, width / across, height / down, fill, stroke=INK)
    picture.text(x, y - 8, name, 12)
    picture.text(x, y + height + 16, shape, 11)


def _sign(picture, x, y, sign) -> None:
    picture.text(x, y + 52, sign, 18, "middle")
