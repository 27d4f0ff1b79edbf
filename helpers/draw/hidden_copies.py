"""Copies and computing of a loop over batches, each way of the loop on one axis."""

from simgpu import Event
from simgpu.pictures import COLOURS, HOST, INK, WIDEST, Picture

_LEFT = 84
_ROW = 104


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
        return _no_events()
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
    picture = Picture(WIDEST, _ROW * len(runs) + 24, title)
    scale = (WIDEST - _LEFT - 12) / max(ends.values())
    for row, (name, (copies, work)) in enumerate(lanes.items()):
        y = _ROW * row
        total = f"{name}: {ends[name] * 1e6:,.0f} µs"
        picture.text(8, y + 18, total, 14, weight="bold")
        _lane(picture, "copies", copies, y + 28, HOST, scale)
        _lane(picture, "compute", work, y + 62, COLOURS[0], scale)
        note = _note(picture, copies, work, scale)
        if note is not None:
            x, said = note
            picture.text(x, y + 18, said, 12, "middle")
            picture.line(x, y + 21, x, y + 29, INK, arrow=True)
    picture.text(_LEFT, picture.height - 6, "0", 12)
    end = f"{max(ends.values()) * 1e6:,.0f} µs (simulated)"
    picture.text(WIDEST - 12, picture.height - 6, end, 12, "end")
    return picture


def _spans(events: list[Event], batches: int) -> list[_Span]:
    each = len(events) // batches
    if each * batches != len(events) or not each:
        raise ValueError(f"{len(events)} events are not those of {batches} batches")
    return [_Span(events[i * each : (i + 1) * each]) for i in range(batches)]


def _lane(picture, words: str, spans: list[_Span], y: int, fill: str, scale) -> None:
    picture.text(8, y + 18, words, 13)
    for number, span in enumerate(spans, 1):
        x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
        picture.box(x, y, width, 26, fill)
        if width > 9 * len(str(number)):
            picture.text(x + width / 2, y + 18, number, 12, "middle")


def _note(picture, copies: list[_Span], work: list[_Span], scale):
    """Where to write it, and what: about a copy in the middle of the loop."""
    copy = copies[len(copies) // 2]
    x = _LEFT + (copy.start + copy.end) / 2 * scale
    if copy.covered(work) > 0.9 * (copy.end - copy.start):
        return x, "copy hidden here"
    if not copy.covered(work):
        return x, "compute waits for this copy"
    return None


def _no_events() -> Picture:
    words = (
        "The timeline shows simulated GPUs; lesson 07 shows how to record real ones."
    )
    picture = Picture(WIDEST, 40, words)
    picture.text(8, 24, words)
    return picture
