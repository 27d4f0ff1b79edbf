"""All layouts of a plan: what each needs of a card, and how fast it is."""

from typing import Any

from simgpu._pictures.picture import COLOURS, HOST, INK, WIDEST, Picture

_LEFT, _TOP, _TALL, _DOT = 76, 52, 300, 5
_WIDE = WIDEST - _LEFT - 16
_GIB = 2**30
_BEYOND = 1.25  # of the card: how far the picture shows what does not fit
_KINDS = {
    (False, False): ("FSDP", COLOURS[0]), (True, False): ("with slices", COLOURS[1]),
    (False, True): ("with stages", COLOURS[2]), (True, True): ("with both", COLOURS[3]),
}  # fmt: skip


def frontier(rows: list[Any]) -> list[Any]:
    """Of planned layouts those that none beats that needs less, from the smallest."""
    made: list[Any] = []
    for row in sorted(rows, key=lambda its: (its.used_bytes, its.step_seconds)):
        if not made or row.step_seconds < made[-1].step_seconds:
            made.append(row)
    return made


def layouts(plan: Any) -> Picture:
    """A dot for each layout of a `Plan`, and a line through the best for their memory.

    The numbers at the line are places of the table; the last is 1, the fastest.
    """
    total, rows = plan.machine.card.total_memory, plan.layouts
    best = frontier(plan.fitting)
    title = (
        f"{len(rows):,} layouts on {plan.gpus:,} {plan.machine.card.name}, simulated: "
        f"{len(plan.fitting):,} fit"
    )
    places = {id(row): place for place, row in enumerate(rows, 1)}
    spoken = "; ".join(
        f"layout {places[id(row)]} needs {row.used_bytes / _GIB:.0f} GiB and has "
        f"{row.tokens_per_second:,.0f} tokens/s" for row in best
    )  # fmt: skip
    bottom = _TOP + _TALL
    picture = Picture(WIDEST, bottom + 64, f"{title}. {spoken}")
    picture.text(8, 20, title, 14, weight="bold")
    high = _TALL / max((row.tokens_per_second for row in rows), default=1.0)

    def at(row: Any) -> tuple[float, float]:
        share = min(row.used_bytes / total / _BEYOND, 1.0)
        return _LEFT + share * _WIDE, bottom - row.tokens_per_second * high

    for row in rows:
        kind = row.layout.slices > 1, row.layout.stages > 1
        fill = _KINDS[kind][1] if row.fits else "white"
        x, y = at(row)
        stroke = fill if row.fits else HOST
        picture.box(x - _DOT / 2, y - _DOT / 2, _DOT, _DOT, fill, stroke=stroke)
    for one, two in zip(best, best[1:], strict=False):
        picture.line(*at(one), *at(two))
    shown = float("-inf")
    for row in best:
        x, y = at(row)
        if x > shown + 24 or row is best[-1]:
            picture.text(x - 6, y - 8, places[id(row)], 12, "end", "bold")
            shown = x
    _axes(picture, total, bottom, high)
    used = {(its.layout.slices > 1, its.layout.stages > 1) for its in rows}
    for column, (name, fill) in enumerate(
        its for k, its in _KINDS.items() if k in used
    ):
        picture.box(_LEFT + 130 * column, bottom + 44, 12, 12, fill, stroke=fill)
        picture.text(_LEFT + 130 * column + 18, bottom + 55, name, 12)
    return picture


def _axes(picture: Picture, total: int, bottom: float, high: float) -> None:
    picture.line(_LEFT, _TOP, _LEFT, bottom)
    picture.line(_LEFT, bottom, _LEFT + _WIDE, bottom)
    for share in (0.0, 0.5, 1.0):
        rate = share * _TALL / high
        picture.text(_LEFT - 6, bottom - share * _TALL + 4, f"{rate:,.0f}", 12, "end")
    picture.text(8, _TOP - 10, "tokens/s", 12)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = _LEFT + share * _WIDE / _BEYOND
        picture.text(x, bottom + 18, f"{share * total / _GIB:.0f}", 12, "middle")
    x = _LEFT + _WIDE / _BEYOND
    picture.line(x, _TOP, x, bottom, INK)
    picture.text(x + 6, _TOP + 12, "the card is full", 12)
    picture.text(_LEFT + _WIDE, bottom + 36, "GiB of the fullest card", 12, "end")
