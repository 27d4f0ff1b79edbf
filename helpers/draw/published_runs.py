"""Predicted beside published rates: one row for each run, in two columns.

The rows of the left column were fitted, those of the right column judge. A dot says how
many times the published rate the prediction is, on an axis of ratios.
"""

import math

from simgpu.pictures import COLOURS, HOST, WIDEST, Picture

_TOP, _ROW, _LABEL, _AXIS = 62, 13, 208, 92
_NEAR, _WIDE, _EDGE = 1.15, 1.3, 1.35  # bands of the axis, and its end


def published_runs(rows: list[tuple[str, float, bool]]) -> Picture:
    """A dot for each run, beside its name and its error.

    Args:
        rows: (name of the run, predicted / published, whether it was fitted).

    Taught in 26-plan-a-run.
    """
    columns = [
        ("fitted", [row for row in rows if row[2]], COLOURS[0]),
        ("judged", [row for row in rows if not row[2]], COLOURS[5]),
    ]
    said = [f"{name}: {_summary(found)}" for name, found, _ in columns if found]
    most = max(len(found) for _, found, _ in columns)
    title = f"Predicted / published tokens per second. {'; '.join(said)}"
    picture = Picture(WIDEST, _TOP + _ROW * most + 12, title)
    for place, (name, found, fill) in enumerate(columns):
        if not found:
            continue
        left = 4 + place * (WIDEST // 2)
        picture.text(left, 16, f"{len(found)} runs {name}", 13, weight="bold")
        picture.text(left, 32, _summary(found), 11)
        bottom = _TOP + _ROW * len(found)
        for limit in (_WIDE, _NEAR):
            begin, end = _place(left, 1 / limit), _place(left, limit)
            shade = "#EEEEEE" if limit == _WIDE else "#D9D9D9"
            height = bottom - _TOP
            picture.box(begin, _TOP, end - begin, height, shade, stroke="none")
        for ratio in (1 / _NEAR, 1, _NEAR):
            x = _place(left, ratio)
            picture.text(x, _TOP - 6, f"{ratio:.2f}", 9, "middle")
            if ratio == 1:
                picture.line(x, _TOP, x, bottom, HOST)
        for number, (label, ratio, _) in enumerate(found):
            y = _TOP + _ROW * number + _ROW - 3
            picture.text(left, y, label, 9.5)
            x = _place(left, min(max(ratio, 1 / _EDGE), _EDGE))
            picture.box(x - 3.5, y - 7, 7, 7, fill)
            picture.text(left + 340, y, f"{ratio - 1:+.0%}", 9.5, "end")
    return picture


def _place(left: float, ratio: float) -> float:
    """Where a ratio lies, on a logarithmic axis."""
    share = 0.5 + 0.5 * math.log(ratio) / math.log(_EDGE)
    return left + _LABEL + share * _AXIS


def _summary(found: list) -> str:
    """How many rows are near."""
    apart = [max(ratio, 1 / ratio) for _, ratio, _ in found]
    near, wide = (sum(a <= limit for a in apart) for limit in (_NEAR, _WIDE))
    return f"{near} within a factor of {_NEAR}, {wide} within {_WIDE}"
