"""The log of what ran on simulated GPUs, to look at: picture, table, totals.

Models: nothing of its own; `clock.py` writes the log. Leaves out: what the host does
between launches. `_pictures/timelines.py` draws it.
"""

import contextlib
import json
import operator
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from simgpu._timing import chrome_trace
from simgpu._timing.clock import Clock
from simgpu._timing.events import Event, Wait


class Totals(NamedTuple):
    """Simulated seconds of one GPU."""

    busy: float  # at least one of its streams works
    idle: float  # none does
    overlap: float  # two or more do


class Timeline:
    """What ran since the last `clear()`: a list of events that draws itself."""

    def __init__(self, clock: Clock):
        self._clock = clock

    @property
    def events(self) -> list[Event]:
        """Every kernel and copy, in the order of launch.

        Those of several threads too: the log itself has them as the threads got there.
        """
        self._clock.settle()
        order = operator.attrgetter("launched", "device", "stream", "start")
        return sorted(self._clock.events, key=order)

    @property
    def copies(self) -> list[Event]:
        """The copies to, from and between GPUs."""
        return [event for event in self.events if event.kind == "copy"]

    @property
    def waits(self) -> list[Wait]:
        """The times in which the host waited, or was busy pinning memory."""
        return sorted(self._clock.waits, key=operator.attrgetter("start", "end"))

    @property
    def seconds(self) -> float:
        """Simulated seconds until the host and every GPU are done."""
        return self._clock.total()

    @property
    def host(self) -> float:
        """Simulated seconds on the host's clock now."""
        return self._clock.host

    @property
    def devices(self) -> list[str]:
        """The GPUs: "cuda:0", ..."""
        return [gpu.name for gpu in self._clock.gpus]

    def lanes(self) -> dict[tuple[str, int], list[Event]]:
        """(GPU, number of the stream) -> its events; the default stream is number 0.

        A copy between two GPUs is in a lane of both. Streams without events have none.
        """
        lanes: dict[tuple[str, int], list[Event]] = {(d, 0): [] for d in self.devices}
        for event in self.events:
            lanes.setdefault((event.device, event.stream), []).append(event)
            if event.source.startswith("cuda") and event.source != event.device:
                lane = (event.source, event.source_stream)
                lanes.setdefault(lane, []).append(event)
        return dict(
            sorted(lanes.items(), key=lambda lane: (index_of(lane[0][0]), lane))
        )

    def totals(self) -> dict[str, Totals]:
        """GPU -> the seconds in which it was busy, idle, busy with two things."""
        total, found = self.seconds, {}
        spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for (device, _), events in self.lanes().items():
            spans[device] += [(event.start, event.end) for event in events]
        for device in self.devices:
            busy, overlap = _covered(spans[device])
            found[device] = Totals(busy, total - busy, overlap)
        return found

    def busy(self) -> dict[str, float]:
        """GPU -> the simulated seconds that it worked."""
        return {device: totals.busy for device, totals in self.totals().items()}

    def table(self, most: int = 20) -> str:
        """The first `most` events and the totals of each GPU, as text."""
        titles = f"{'what':16}{'bytes':>13}{'flops':>16}"
        lines = [f"{'start':>10}{'end':>10}  {'stream':9} {titles}"]
        for event in self.events[:most]:
            stream = f"{event.device}/{event.stream}"
            lines.append(
                f"{event.start * 1e6:10.1f}{event.end * 1e6:10.1f}  {stream:9} "
                f"{event.name:16}{event.nbytes:13,}{event.flops:16,}"
            )
        if len(self._clock.events) > most:
            lines.append(f"  ... and {len(self._clock.events) - most} more")
        for device, (busy, idle, overlap) in self.totals().items():
            lines.append(
                f"{device}: busy {busy * 1e6:,.1f}, idle {idle * 1e6:,.1f}, "
                f"two at once {overlap * 1e6:,.1f}"
            )
        return "\n".join([*lines, "times in µs, simulated"])

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Event]]:
        """A list of all that runs while the block does, whatever the log forgets."""
        events: list[Event] = []
        self._clock.recordings.append(events)
        try:
            yield events
            self._clock.settle()
        finally:
            self._clock.recordings[:] = [
                r for r in self._clock.recordings if r is not events
            ]

    def clear(self) -> None:
        """Start again from time zero with an empty log."""
        self._clock.clear()

    def chrome_trace(self) -> dict[str, object]:
        """The log in the format that Perfetto and chrome://tracing open."""
        return chrome_trace.of(self)

    def export_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the log to a file; open it at ui.perfetto.dev or chrome://tracing."""
        Path(path).write_text(json.dumps(self.chrome_trace()), encoding="utf-8")

    def _repr_svg_(self) -> str | None:
        from simgpu._pictures.timelines import timeline

        return timeline(self)._repr_svg_()

    def __repr__(self) -> str:
        count = len(self._clock.events)
        return (
            f"Timeline({count} events, {len(self.copies)} of them copies, "
            f"{self.seconds * 1e6:.0f} µs simulated)"
        )


def index_of(device: str) -> int:
    return int(device.removeprefix("cuda:"))


def _covered(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """How long at least one span lasts, and at least two do."""
    steps = sorted([(a, 1) for a, _ in spans] + [(b, -1) for _, b in spans])
    one = two = before = 0.0
    depth = 0
    for time, step in steps:
        one += (time - before) * (depth >= 1)
        two += (time - before) * (depth >= 2)
        depth += step
        before = time
    return one, two
