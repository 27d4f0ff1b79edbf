"""Predicted beside published rates: a line for each model and card, a dot for each run.

Lines of runs to which something was fitted are above, those that judge below. A dot
says how far the prediction is from what was published, on an axis of errors.
"""

import math

from simgpu.pictures import COLOURS, HOST, WIDEST, Picture

_TOP, _ROW, _LEFT, _AXIS = 62, 18, 190, 490
_NEAR, _WIDE, _EDGE = 1.15, 1.3, 1.35  # bands of the axis, and its end
_MARKS = (1 / 1.3, 1 / 1.15, 1, 1.15, 1.3)


def published_runs(rows: list[tuple[str, float, bool]]) -> Picture:
    """A dot for each run; runs of one name share a line.

    Args:
        rows: (name of the line, predicted / published, whether it was fitted).

    Taught in 27-choose-a-layout.
    """
    blocks = []
    for name, fitted, fill in (
        ("fitted", True, COLOURS[0]),
        ("judged", False, COLOURS[5]),
    ):
        found = [row for row in rows if row[2] == fitted]
        if found:
            blocks.append((name, found, fill))
    said = "; ".join(f"{name}: {_summary(found)}" for name, found, _ in blocks)
    names = sum(len({row[0] for row in found}) for _, found, _ in blocks)
    height = _TOP + _ROW * names + 30 * len(blocks)
    title = f"Predicted / published tokens per second. {said}"
    picture = Picture(WIDEST, height, title)
    words = "Predicted tokens per second, compared with published ones"
    picture.text(8, 18, words, 13, weight="bold")
    for ratio in _MARKS:
        words = f"{ratio:.2f} x" if ratio != 1 else "equal"
        picture.text(_place(ratio), _TOP - 14, words, 11, "middle")
    picture.text(_place(1) - 60, _TOP - 28, "< too slow", 11, "end")
    picture.text(_place(1) + 60, _TOP - 28, "too fast >", 11)
    y = _TOP
    for name, found, fill in blocks:
        picture.text(8, y + 6, f"{len(found)} runs {name}", 12, weight="bold")
        picture.text(140, y + 6, _summary(found), 11)
        y = _lines(picture, y + 14, found, fill) + 16
    return picture


def _lines(picture: Picture, top: float, found: list, fill: str) -> float:
    """The lines of a block; returns where they end."""
    lines: dict[str, list[float]] = {}
    for name, ratio, _ in found:
        lines.setdefault(name, []).append(ratio)
    bottom = top + _ROW * len(lines)
    for limit, shade in ((_WIDE, "#EEEEEE"), (_NEAR, "#D9D9D9")):
        begin, end = _place(1 / limit), _place(limit)
        picture.box(begin, top, end - begin, bottom - top, shade, stroke="none")
    picture.line(_place(1), top, _place(1), bottom, HOST)
    for number, (name, ratios) in enumerate(lines.items()):
        y = top + _ROW * number + _ROW / 2
        picture.text(8, y + 4, name, 11.5)
        picture.text(_LEFT - 8, y + 4, len(ratios), 11, "end")
        for ratio in ratios:
            x = _place(min(max(ratio, 1 / _EDGE), _EDGE))
            picture.box(x - 3.5, y - 3.5, 7, 7, fill)
    return bottom


def _place(ratio: float) -> float:
    """Where a ratio lies, on a logarithmic axis."""
    share = 0.5 + 0.5 * math.log(ratio) / math.log(_EDGE)
    return _LEFT + share * _AXIS


def _summary(found: list) -> str:
    """How many rows are near."""
    apart = [max(ratio, 1 / ratio) for _, ratio, _ in found]
    near, wide = (sum(a <= limit for a in apart) for limit in (_NEAR, _WIDE))
    return f"{near} within a factor of {_NEAR}, {wide} within {_WIDE}"
