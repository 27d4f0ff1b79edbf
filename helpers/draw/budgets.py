"""A picture of memory budgets: what each way to train a step takes, on one axis."""

from collections.abc import Mapping
from typing import NamedTuple

from simgpu.pictures import COLOURS, WIDEST, Picture

MIB = 2**20
LEFT, RIGHT, TOP, ROW = 150, 130, 64, 34  # pixels


class Budget(NamedTuple):
    """One way to train a step.

    Attributes:
        parts: name -> predicted bytes at the peak.
        peak: bytes counted or measured.
        ms: milliseconds of the step.
    """

    parts: Mapping[str, float]
    peak: float
    ms: float


def budgets(rows: Mapping[str, Budget], card: float, kind: str) -> Picture:
    """A bar of predicted parts for each way, and a mark at the peak that was found.

    Args:
        rows: name -> budget; all have the same parts, in the same order.
        card: bytes of the card, drawn as a dashed line.
        kind: "simulated" or "measured": what peaks and times are.

    Taught in 10-fit-a-bigger-model.
    """
    most = max(card, *(max(b.peak, sum(b.parts.values())) for b in rows.values()))
    scale = (WIDEST - LEFT - RIGHT) / most
    bottom = TOP + ROW * len(rows)
    spoken = "; ".join(
        f"{name} {b.peak / MIB:.0f} MiB, {b.ms:.1f} ms" for name, b in rows.items()
    )
    what = f"Peak memory of one step ({kind})"
    picture = Picture(
        WIDEST, bottom + 40, f"{what}; the card has {card / MIB:.0f} MiB. {spoken}"
    )
    picture.text(8, 20, what, 14, weight="bold")
    names = list(next(iter(rows.values())).parts)
    x = 8.0
    for name, fill in zip(names, COLOURS, strict=False):
        picture.box(x, 32, 12, 12, fill)
        picture.text(x + 17, 43, name, 12)
        x += 17 + 6.7 * len(name) + 16
    picture.text(WIDEST - 8, 43, "a step", 12, "end")
    for place, (name, budget) in enumerate(rows.items()):
        y = TOP + ROW * place
        picture.text(LEFT - 8, y + 17, name, 13, "end")
        x = float(LEFT)
        for size, fill in zip(budget.parts.values(), COLOURS, strict=False):
            if size:
                picture.box(x, y, size * scale, 24, fill)
            x += size * scale
        mark = LEFT + budget.peak * scale
        picture.line(mark, y - 4, mark, y + 28)
        picture.text(mark + 5, y + 17, f"{budget.peak / MIB:.0f} MiB", 12)
        picture.text(WIDEST - 8, y + 17, f"{budget.ms:.1f} ms", 13, "end")
    edge = LEFT + card * scale
    for y in range(TOP - 8, bottom, 8):
        picture.line(edge, y, edge, y + 4, COLOURS[5])
    picture.text(edge, bottom + 14, f"the card: {card / MIB:.0f} MiB", 12, "middle")
    words = "bars: predicted parts; black lines: the peaks that were found"
    picture.text(WIDEST - 8, bottom + 32, words, 12, "end")
    return picture
