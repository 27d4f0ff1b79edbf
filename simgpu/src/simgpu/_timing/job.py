"""The logs of all ranks of a job on one axis of time, to look at: picture and trace.

Models: nothing of its own. Each rank hands in the log of its clock, as plain data; the
clocks agree because every collective ends for all its members at once. Leaves out:
ranks that have not handed one in.
"""

import json
import operator
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from simgpu._timing import chrome_trace
from simgpu._timing.clock import Clock
from simgpu._timing.events import FIRST_OF_NCCL, Event, Wait

_MESSAGES = re.compile(r"rank (\d+) to rank (\d+)")


class RankLog(NamedTuple):
    """What one rank did; it can be pickled."""

    rank: int
    events: list[Event]  # in the order of launch
    waits: list[Wait]  # of the host
    seconds: float  # simulated, until its host and its GPUs are done


class Lane(NamedTuple):
    """A stream of a rank."""

    rank: int
    device: str  # "cuda:0"
    stream: int  # its number on the device
    title: str  # "stream 0", or of NCCL's own: "NCCL, all ranks"


def log_of(clock: Clock, rank: int, settle: bool = True) -> RankLog:
    """The log of this process.

    Args:
        clock: of its GPUs.
        rank: of the process in the job.
        settle: wait until it is known when the collectives under way end; otherwise
            these are left out.

    Raises:
        torch.distributed.DistBackendError: if one of them never ends.
    """
    if settle:
        clock.settle()
    in_order = operator.attrgetter("launched", "device", "stream", "start")
    ends = [clock.latest, *clock.done.values()]
    return RankLog(
        rank, sorted(clock.events, key=in_order), list(clock.waits), max(ends)
    )


class JobTimeline:
    """What the ranks of a job did, on one axis; it draws itself.

    Args:
        logs: of the ranks, in any order.
        missing: rank -> why it has no log.
    """

    def __init__(self, logs: Iterable[RankLog], missing: dict[int, str] | None = None):
        self.logs = sorted(logs)
        self.missing = missing or {}

    @property
    def ranks(self) -> list[int]:
        """Those that have a log."""
        return [log.rank for log in self.logs]

    @property
    def seconds(self) -> float:
        """Simulated seconds until all ranks are done."""
        return max((log.seconds for log in self.logs), default=0.0)

    def events(self, rank: int) -> list[Event]:
        """The kernels, copies and collectives of a rank, in the order of launch.

        Raises:
            KeyError: for a rank that has no log.
        """
        return self._log(rank).events

    def waits(self, rank: int) -> list[Wait]:
        """The times in which the host of a rank waited, or was busy.

        Raises:
            KeyError: for a rank that has no log.
        """
        return self._log(rank).waits

    def _log(self, rank: int) -> RankLog:
        for log in self.logs:
            if log.rank == rank:
                return log
        raise KeyError(f"rank {rank} has no log: {self.missing.get(rank, 'unknown')}")

    def lanes(self, rank: int) -> dict[Lane, list[Event]]:
        """The streams of a rank that have events, NCCL's own last.

        A copy between two GPUs of the rank is in a lane of both.

        Raises:
            KeyError: for a rank that has no log.
        """
        return _lanes(self._log(rank))

    def waited(self) -> dict[tuple[int, int], float]:
        """(rank, rank that it waited for) -> seconds of its collectives, most first."""
        found: dict[tuple[int, int], float] = {}
        for log in self.logs:
            for event in log.events:
                if event.waited:
                    key = (log.rank, event.waited_for)
                    found[key] = found.get(key, 0.0) + event.waited
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def chrome_trace(self) -> dict:
        """All ranks in the format that Perfetto and chrome://tracing open."""
        return chrome_trace.of_job(self)

    def export_chrome_trace(self, path: str | os.PathLike) -> None:
        """Write it to a file; open it at ui.perfetto.dev or chrome://tracing."""
        Path(path).write_text(json.dumps(self.chrome_trace()), encoding="utf-8")

    def _repr_svg_(self) -> str | None:
        from simgpu._pictures.jobs import job_timeline

        return job_timeline(self)._repr_svg_()

    def __repr__(self) -> str:
        count = sum(len(log.events) for log in self.logs)
        lost = f"{', '.join(map(str, self.missing))} missing, " if self.missing else ""
        return (
            f"JobTimeline({len(self.logs)} ranks, {lost}{count} events, "
            f"{self.seconds * 1e6:.0f} µs simulated)"
        )


def _lanes(log: RankLog) -> dict[Lane, list[Event]]:
    """The streams of a rank that have events."""
    found: dict[tuple[str, int], list[Event]] = {}
    for event in log.events:
        found.setdefault((event.device, event.stream), []).append(event)
        if event.source.startswith("cuda") and event.source != event.device:
            found.setdefault((event.source, event.source_stream), []).append(event)
    several = len({device for device, _ in found}) > 1
    lanes = {}
    for (device, stream), events in sorted(found.items(), key=_own_first):
        title = (
            f"NCCL, {_who(events)}" if stream >= FIRST_OF_NCCL else f"stream {stream}"
        )
        if several:
            title = f"{device} {title}"
        lanes[Lane(log.rank, device, stream, title)] = events
    return lanes


def _own_first(lane: tuple) -> tuple:
    (device, stream), _ = lane
    return stream >= FIRST_OF_NCCL, int(device.removeprefix("cuda:")), stream


def _who(events: list[Event]) -> str:
    """Which ranks a stream of NCCL connects."""
    groups = dict.fromkeys(event.group for event in events)
    pairs = [_MESSAGES.fullmatch(group) for group in groups]
    if all(pairs):
        ranks = sorted({int(rank) for pair in pairs for rank in pair.groups()})
        return f"ranks {' and '.join(map(str, ranks))}"
    return ", ".join(groups)
