"""Copies and computing of a loop over batches, each way of the loop on one axis."""

from simgpu import Event
from simgpu.pictures import COLOURS, HOST, INK, WIDEST, Lanes, Picture

_LEFT = 84
_ROW = 104
_NO_EVENTS = "The picture shows simulated GPUs; lesson 07 records real ones."


class _Span:
    """One batch in a lane: when its events begin and when they are over."""

    def __init__(self, events: list[Event]):
        self.start = min(event.start for event in events)
        self.end = max(event.end for event in events)

    def covered(self, others: "list[_Span]") -> float:
        """Seconds in which one of the others is there, too; they do not overlap."""
        both = (min(self.end, o.end) - max(self.start, o.start) for o in others)
        return sum(max(0.0, seconds) for seconds in both)


def hidden_copies(runs: dict[str, list[Event]], batches: int) -> Picture:
    """Two lanes for each way to run a loop: the copies above, the computing below.

    A number in a block is that of the batch. All ways have the same time axis. Copies
    from the host to the GPU count; those to the host are left out.

    Args:
        runs: the events of each way, by its name.
        batches: of the loop; every batch has as many copies and kernels as the others.

    Taught in 05-overlap-with-streams.
    """
    if not all(runs.values()):
        picture = Picture(WIDEST, 40, _NO_EVENTS)
        picture.text(8, 24, _NO_EVENTS)
        return picture
    ends = {name: max(e.end for e in events) for name, events in runs.items()}
    lanes, hidden = {}, {}
    for name, events in runs.items():
        copies = _spans([e for e in events if e.source == "cpu"], batches)
        work = _spans([e for e in events if e.kind == "kernel"], batches)
        lanes[name] = copies, work
        hidden[name] = sum(copy.covered(work) for copy in copies)
    words = (
        f"{n} {ends[n] * 1e6:,.0f} µs, {hidden[n] * 1e6:,.0f} hidden" for n in runs
    )
    title = f"{batches} batches, simulated: {'; '.join(words)}"
    height, longest = _ROW * len(runs) + 24, max(ends.values())
    axis = Lanes(title, height, longest, _LEFT, letter=9, room=0, drop=5)
    for row, (name, (copies, work)) in enumerate(lanes.items()):
        y = _ROW * row
        total = f"{name}: {ends[name] * 1e6:,.0f} µs"
        axis.text(8, y + 18, total, 14, weight="bold")
        _lane(axis, "copies", copies, y + 28, HOST)
        _lane(axis, "compute", work, y + 62, COLOURS[0])
        copy = copies[len(copies) // 2]  # in the middle of the loop
        if said := _said(copy, work):
            axis.note(y + 18, (copy.start + copy.end) / 2, said)
    axis.footer(height - 6)
    return axis


def _spans(events: list[Event], batches: int) -> list[_Span]:
    each = len(events) // batches
    if each * batches != len(events) or not each:
        raise ValueError(f"{len(events)} events are not those of {batches} batches")
    return [_Span(events[i * each : (i + 1) * each]) for i in range(batches)]


def _lane(axis: Lanes, words: str, spans: list[_Span], y: int, fill: str) -> None:
    axis.text(8, y + 18, words, 13)
    for number, span in enumerate(spans, 1):
        axis.bar(y, 26, span.start, span.end, fill, number, stroke=INK)


def _said(copy: _Span, work: list[_Span]) -> str | None:
    """What is worth a note about a copy."""
    if copy.covered(work) > 0.9 * (copy.end - copy.start):
        return "copy hidden here"
    if not copy.covered(work):
        return "compute waits for this copy"
    return None
