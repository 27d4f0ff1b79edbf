"""How a time is taken on a GPU.

Every time lies between two events of CUDA. The host runs ahead: before the first event
the GPU is given work that takes longer than the launches behind it, so that none of
them is inside. That work writes a buffer larger than the L2 cache, so an operation
finds its inputs in memory. The figure is the median of several runs after some that
warm up; beside it stands how far the 10th and the 90th percentile are apart, as a share
of the median.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

WARM_UP, RUNS, FEWEST = 3, 15, 3
LONG = 0.3  # seconds that the runs of one figure may take, if `FEWEST` allow it
AHEAD = 60e-6  # seconds that the host may need for one launch, at most
MIB = 2**20

Run = Callable[[], object]


class Times(NamedTuple):
    """A figure."""

    seconds: float  # the median
    spread: float  # 90th less 10th percentile, over the median
    least: float = 0.0  # seconds


class OutOfTime(Exception):  # noqa: N818 - it is no error
    """The time that was given is over."""


class Budget:
    """The time that all of it may take.

    Args:
        seconds: from now on; a part of it is kept for the figure that runs at the end.
    """

    def __init__(self, seconds: float):
        self.end = time.monotonic() + 0.9 * seconds

    def check(self) -> None:
        """Raises OutOfTime once it is over."""
        if not self.left:
            raise OutOfTime

    @property
    def left(self) -> float:
        """Seconds."""
        return max(self.end - time.monotonic(), 0.0)


def of(seconds: Iterable[float]) -> Times:
    """The figure that several runs come to."""
    found = sorted(seconds)
    tenths = statistics.quantiles(found, n=10, method="inclusive")
    middle = statistics.median(found)
    return Times(middle, (tenths[-1] - tenths[0]) / middle if middle else 0.0, found[0])


def once(run: Run) -> float:
    """Seconds between two events on an idle GPU, with the host's launch inside."""
    start, end = _events()
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return _seconds(start, end)


class Stopwatch:
    """Takes times on the current GPU; it holds a buffer to empty the L2 cache."""

    def __init__(self):
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        cache = getattr(properties, "L2_cache_size", 0)
        free = torch.cuda.mem_get_info()[0]
        size = min(max(256 * MIB, 4 * cache), free // 8)
        self._buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
        for _ in range(WARM_UP):
            self._buffer.zero_()
        written = [once(self._buffer.zero_) for _ in range(FEWEST)]
        self._writes = max(statistics.median(written), 1e-6)

    def keep_busy(self, launches: int) -> None:
        """Give the GPU work for longer than the host takes for so many launches."""
        for _ in range(int(AHEAD * launches / self._writes) + 2):
            self._buffer.zero_()

    def alone(self, run: Run) -> Times:
        """An operation's kernels, each time with a cold L2 cache."""
        pairs = []
        for _ in range(_runs(run)):
            self.keep_busy(4)
            start, end = _events()
            start.record()
            run()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return of(_seconds(*pair) for pair in pairs)

    def in_a_row(self, run: Run, count: int, times: int) -> Times:
        """The same of `count` calls behind each other, after one more.

        How often is given, since other ranks must run a collective as often.
        """
        found = []
        for _ in range(times):
            self.keep_busy(count + 3)
            start, end = _events()
            run()
            start.record()
            for _ in range(count):
                run()
            end.record()
            torch.cuda.synchronize()
            found.append(_seconds(start, end) / count)
        return of(found)


def between_events(run: Run) -> Times:
    """An operation on an idle GPU, with its launch inside."""
    return of(once(run) for _ in range(_runs(run)))


def launch(run: Run, count: int = 100) -> Times:
    """What the host takes for the launch of a kernel that is shorter than that."""

    def seconds(times: int) -> float:
        def several() -> None:
            for _ in range(times):
                run()

        return once(several)

    seconds(count)
    return of(
        (seconds(2 * count) - seconds(count)) / count for _ in range(1 + RUNS // 3)
    )


def _runs(run: Run) -> int:
    """Warm up; how often an operation is run, so that this does not take long."""
    run()
    took = once(run)
    if WARM_UP * took < LONG:
        for _ in range(WARM_UP):
            took = once(run)
    return max(FEWEST, min(RUNS, int(LONG / max(took, 1e-6))))


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return start.elapsed_time(end) / 1e3
