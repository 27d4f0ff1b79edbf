"""An engine: something that work shares, with a schedule of who takes how much of it.

Models: the multiprocessors of a GPU, of which small kernels take a share and large ones
all; and its copy engines, which do one copy at a time.
"""

from bisect import bisect_right
from collections.abc import Iterator
from math import inf

_KEPT = 1024  # entries of the past, for threads that lag behind
_BESIDE = 256  # collectives that may be longer than the kernels behind them
MANY = 4 * _KEPT  # entries from which on it is worth while to forget some


class Engine:
    """The schedule of one engine, in simulated seconds."""

    def __init__(self) -> None:
        self.times = [0.0]  # from each time on ...
        self.used = [0.0]  # ... this share is taken, until the next

    def find(self, ready: float, seconds: float, share: float = 1.0) -> float:
        """When work could start that is ready at `ready` and takes up `share`."""
        times, used = self.times, self.used
        start = max(ready, times[0])
        i = bisect_right(times, start) - 1
        while i < len(times):  # find a gap that is long enough
            if used[i] + share > 1.0001:
                start = times[i + 1]
            elif i + 1 == len(times) or times[i + 1] >= start + seconds:
                break
            i += 1
        return start

    def book(self, ready: float, seconds: float, share: float = 1.0) -> float:
        """The same, and the work will start then."""
        times, used = self.times, self.used
        if ready >= times[-1]:  # nothing is booked so late
            if ready > times[-1]:
                times.append(ready)
                used.append(0.0)
            used[-1] = share
            times.append(ready + seconds)
            used.append(0.0)
            return ready
        start = self.find(ready, seconds, share)
        first = self._cut(start)
        for i in range(first, self._cut(start + seconds)):
            used[i] += share
        return start

    def _cut(self, time: float) -> int:
        """The index of `time` among the times, put in if it is new."""
        i = bisect_right(self.times, time) - 1
        if self.times[i] == time:
            return i
        self.times.insert(i + 1, time)
        self.used.insert(i + 1, self.used[i])
        return i + 1

    def forget(self, before: float) -> None:
        """Nothing will be booked before this time (threads may lag behind a little)."""
        first = bisect_right(self.times, before) - _KEPT
        if first > 0:
            del self.times[:first], self.used[:first]


class Overlaps:
    """From when to when something goes on, in the order in which it was added."""

    def __init__(self) -> None:
        # with the latest end so far, which tells where to begin to look
        self._times: list[tuple[float, float, float]] = []

    def add(self, start: float, end: float) -> None:
        times = self._times
        times.append((max(end, times[-1][0]) if times else end, start, end))
        if len(times) > 2 * _BESIDE:
            del times[:_BESIDE]

    def after(self, time: float) -> Iterator[tuple[float, float]]:
        """All that end after this time, and maybe others."""
        first = bisect_right(self._times, (time, inf, inf))
        return ((start, end) for _, start, end in self._times[first:])


def book_together(engines: list[Engine], ready: float, seconds: float) -> float:
    """When work starts that needs all of these engines at once."""
    start = ready
    while (later := max(e.find(start, seconds) for e in engines)) > start:
        start = later
    for engine in engines:
        engine.book(start, seconds)
        if len(engine.times) > MANY:
            engine.forget(ready)
    return start
