"""What came of a dry run, as a notebook shows it: a table, and the memory's course."""

from html import escape
from typing import Any

from simgpu._pictures.picture import COLOURS, HOST, INK, WIDEST, Picture, size_text

# of the kinds of memory, by the colours of the palette
FILLS = dict(
    zip(
        ("parameters", "gradients", "optimizer", "activations", "communication",
         "workspaces", "gathered"),
        COLOURS, strict=True,
    )
) | {"buffers": INK, "other": HOST}  # fmt: skip
_TIMES = {"computing": COLOURS[0], "messages, nothing else": COLOURS[1],
          "the host keeps it waiting": HOST}  # fmt: skip
_TALL, _LEFT, _TOP = 200, 70, 34
_LINES = 5


def memory(course: Any, rank: int, total: int) -> Picture:
    """What the memory of a rank's card held, by kind, from left to right.

    Args:
        course: of the memory, see `simgpu._dry.memory.Course`.
        rank: whose.
        total: bytes of the card.
    """
    sums = [sum(moment.values()) for moment in course.moments]
    peak = max(sums, default=0)
    kinds = [kind for kind in FILLS if any(kind in its for its in course.moments)]
    rows = -(-len(kinds) // 4)
    title = f"Memory of rank {rank}, simulated: at most {size_text(peak)}"
    title += f" of {size_text(total)}"
    at = course.moments[sums.index(peak)] if sums else {}
    spoken = "; ".join(f"{kind} {size_text(at[kind])}" for kind in kinds if kind in at)
    bottom = _TOP + _TALL
    picture = Picture(WIDEST, bottom + 42 + 20 * rows, f"{title}: {spoken}")
    picture.text(8, 20, title, 14, weight="bold")
    picture.text(WIDEST - 12, 20, "in the order of allocations", 12, "end")
    framed = total < 3 * peak
    most = max(total if framed else peak, peak, 1)
    wide, high = (WIDEST - _LEFT - 12) / max(len(sums), 1), _TALL / most
    below = [0.0] * len(sums)
    for kind in kinds:
        above = [y + its.get(kind, 0) for y, its in zip(below, course.moments,
                                                        strict=True)]  # fmt: skip
        edge = [*_edge(above, wide, high), *reversed(_edge(below, wide, high))]
        picture.area(edge, FILLS[kind])
        below = above
    picture.line(_LEFT, bottom, WIDEST - 12, bottom)
    for level, words in {most: size_text(most), most / 2: size_text(most / 2)}.items():
        y = bottom - level * high
        picture.text(_LEFT - 6, y + 4, words, 12, "end")
        picture.line(_LEFT - 4, y, WIDEST - 12 if level == most else _LEFT, y, HOST)
    _steps(picture, course.ends, wide * len(sums), bottom)
    for number, kind in enumerate(kinds):
        row, column = divmod(number, 4)
        x, y = _LEFT + 155 * column, bottom + 30 + 20 * row
        picture.box(x, y, 14, 14, FILLS[kind])
        picture.text(x + 20, y + 12, kind, 13)
    return picture


def _edge(levels: list[float], wide: float, high: float) -> list[tuple[float, float]]:
    """Stairs: each level is held until the next one begins."""
    found = []
    for place, level in enumerate(levels):
        y = _TOP + _TALL - level * high
        found += [(_LEFT + place * wide, y), (_LEFT + (place + 1) * wide, y)]
    return found


def _steps(picture: Picture, ends: list[float], wide: float, bottom: float) -> None:
    """Where each step ends, in allocations."""
    begin = 0.0
    for number, end in enumerate(ends, 1):
        picture.line(_LEFT + end * wide, _TOP, _LEFT + end * wide, bottom + 6, INK)
        words = "building, step 1" if number == 1 else f"step {number}"
        if (end - begin) * wide > 7 * len(words):
            x = _LEFT + (begin + end) / 2 * wide
            picture.text(x, bottom + 18, words, 12, "middle")
        begin = end


def table(report: Any) -> str:
    """The figures of a `DryReport` as HTML, in the colours of the page."""
    ranks = ", ".join(map(str, report.ranks))
    who = f"rank{'s' * (len(report.ranks) > 1)} {ranks} of {report.world:,}"
    fits = "fits" if report.fits else "does not fit"
    rows = [_head(f"{who} on {report.card}, simulated, without values: {fits}")]
    peak = max(report.peak_bytes, 1)
    rows.append(_row("memory at the peak", size_text(peak), "", None,
                     f"{size_text(report.reserved_bytes)} reserved of "
                     f"{size_text(report.total_bytes)}"))  # fmt: skip
    for kind, size in report.memory_by_kind.items():
        rows.append(_row(kind, size_text(size), FILLS.get(kind, HOST), size / peak))
    for line in report.memory_by_line[:_LINES]:
        if line["bytes"] > peak / 50:
            note = f"{line['kind']}, made in {line['line']}"
            rows.append(_row("", size_text(line["bytes"]), "", None, note))
    rows += _times(report)
    if not report.fits:
        rows.append(_row("error", "", "", None, report.error.split("\n")[0]))
    if count := len(report.unknown_reads):
        first = report.unknown_reads[0]["line"]
        note = f"values that are not known, the first in {first}"
        rows.append(_row("lines that read", str(count), "", None, note))
    style = "border-collapse: collapse; font-size: 13px; color: inherit"
    return f'<table style="{style}">{"".join(rows)}</table>'


def _times(report: Any) -> list[str]:
    seconds = report.step_seconds
    if seconds is None:
        return []
    parts = (report.compute_seconds, report.exposed_seconds, report.host_seconds)
    rows = [_row("a step", f"{seconds * 1e3:,.1f} ms", "", None,
                 f"what binds: {report.binds}")]  # fmt: skip
    for (words, fill), part in zip(_TIMES.items(), parts, strict=True):
        share = (part or 0.0) / (seconds or 1.0)
        rows.append(_row(words, f"{(part or 0.0) * 1e3:,.1f} ms", fill, share))
    for rate, _, name in report.rates():
        each = f"{rate / report.world:,.0f} of a rank"
        rows.append(_row(f"{name} in a second", f"{rate:,.0f}", "", None, each))
    if report.mfu:
        rows.append(_row("MFU", f"{report.mfu:.1%}"))
    return rows


_CELL = "text-align: {}; padding: 1px 8px; background: transparent; color: inherit"


def _head(words: str) -> str:
    style = _CELL.format("left") + "; border-bottom: 1px solid currentColor"
    return f'<tr><th colspan="3" style="{style}">{escape(words)}</th></tr>'


def _row(name: str, figure: str, fill: str = "", share: float | None = None,
         note: str = "") -> str:  # fmt: skip
    """A name, a figure, and a bar of its share or a note."""
    last = escape(note)
    if share is not None:
        wide = max(round(200 * min(share, 1.0)), 1)
        bar = (
            f"display: inline-block; height: 10px; width: {wide}px; background: {fill}"
        )
        last = f'<span style="{bar}"></span> {share:.0%}'
    cells = [(escape(name), "left"), (escape(figure), "right"), (last, "left")]
    inside = "".join(
        f'<td style="{_CELL.format(side)}">{text}</td>' for text, side in cells
    )
    return f"<tr>{inside}</tr>"
