"""The table of a sweep: its layouts, fastest first."""

from collections.abc import Sequence

from simgpu._dry.sweep import FAILED, FITS, FULL, SKIPPED, Row, say

_ORDER = {FITS: 0, FULL: 1, SKIPPED: 2, FAILED: 3}
_GIB = 2**30
_LONGEST = 70  # letters of an error
_TOKENS = (
    "How many tokens or samples a step has is not known, so the layouts are sorted by "
    "the time of a step; --tokens N or --samples N says it, of the whole job."
)
_BEATEN = "beaten by: a layout that is as fast, with no more memory and no more cards"


def judge(rows: Sequence[Row], price: float | None) -> list[Row]:
    """Sort the rows, and say of each what it costs and what beats it.

    Args:
        rows: of all layouts.
        price: dollars for a card and an hour.
    """
    for row in rows:
        counts_tokens = row.rate_of == "tokens"
        if price is not None and row.state == FITS and row.rate and counts_tokens:
            cards = row.report["world"]
            row.cost = price * cards / 3600 / row.rate * 1e9
    ordered = sorted(rows, key=_rank)
    fits = [row for row in ordered if row.state == FITS and row.rate]
    for place, row in enumerate(fits):
        row.beaten_by = next((its for its in fits[:place] if _beats(its, row)), None)
    return ordered


def _rank(row: Row) -> tuple:
    seconds = row.report.get("step_seconds") or float("inf")
    return _ORDER[row.state], -(row.rate or 0.0), seconds, row.layout.number


def _beats(row: Row, other: Row) -> bool:
    """Whether there is no reason to take the other one."""

    def figures(its: Row) -> tuple:
        return -(its.rate or 0.0), its.report["peak_bytes"], its.report["world"]

    mine, its = figures(row), figures(other)
    return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))


def table(rows: Sequence[Row], axes: Sequence[str], price: float | None) -> str:
    """The rows of `judge` as text."""
    place = {id(row): number for number, row in enumerate(rows, 1)}
    rates = [f"{row.rate_of}/s" for row in rows if row.rate] or ["tokens/s"]
    heads = ["", *axes, "fits", "peak GiB", "step ms", rates[0], "MFU", "what binds"]
    heads += ["$ for 1e9 tokens"] if price is not None else []
    beaten = any(row.beaten_by is not None for row in rows)
    heads += ["beaten by"] if beaten else []
    lines, whys = [heads], {}
    for row in rows:
        values = [row.layout.values[axis] or "none" for axis in axes]
        cells = [str(place[id(row)]), *values, *_figures(row)]
        if row.state in (FAILED, SKIPPED):
            whys[len(lines)] = row.why
            lines.append(cells)
            continue
        if price is not None:
            cells.append("" if row.cost is None else f"{row.cost:,.2f}")
        if beaten:
            by = row.beaten_by
            cells.append("" if by is None else str(place[id(by)]))
        lines.append(cells)
    text = _aligned(lines, whys, left={*range(1, len(axes) + 1)})
    if any(row.state == FITS and not row.rate for row in rows):
        text += f"\n\n{_TOKENS}"
    if beaten:
        text += f"\n\n{_BEATEN}"
    return text + best(rows, price)


def best(rows: Sequence[Row], price: float | None) -> str:
    """What to take, in a line or two."""
    fits = [row for row in rows if row.state == FITS and row.rate]
    if not fits:
        return ""
    text = f"\n\nfastest: {say(fits[0].layout.values)}"
    cheap = min(fits, key=lambda row: row.cost or 0.0)
    if price is not None and cheap is not fits[0]:
        text += f"\ncheapest: {say(cheap.layout.values)}"
    return text


def _figures(row: Row) -> list[str]:
    report = row.report
    if row.state == FAILED:
        return ["failed"]
    if row.state == SKIPPED:
        return ["no"]
    peak = f"{report['peak_bytes'] / _GIB:,.2f}"
    if row.state == FULL:
        return ["no", f"> {peak}", "", "", "", report["binds"]]
    return [
        "yes", peak, f"{report['step_seconds'] * 1e3:,.1f}",
        f"{row.rate:,.0f}" if row.rate else "?",
        f"{report['mfu']:.1%}" if report["mfu"] else "", report["binds"],
    ]  # fmt: skip


def _aligned(lines: list[list[str]], whys: dict[int, str], left: set[int]) -> str:
    """Columns under their heads, numbers to the right; a why stands across."""
    wide = [
        max(len(cells[i]) for cells in lines if i < len(cells))
        for i in range(len(lines[0]))
    ]
    found = []
    for number, cells in enumerate(lines):
        text = "  ".join(
            f"{cell:<{width}}" if i in left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(cells, wide, strict=False))
        )
        if why := whys.get(number, ""):
            short = why if len(why) <= _LONGEST else f"{why[: _LONGEST - 1]}…"
            text = f"{text}  {short}"
        found.append(text.rstrip())
    return "\n".join(found)
