"""The schedule: when the host launches work, and when each stream runs it.

Models: a host that launches one operation after the other; streams, each of which
runs its operations in order; and what they run on: the multiprocessors of a GPU, and an
engine for copies in each direction. Large kernels fill a GPU, so that those of other
streams wait; small ones run beside each other. The host waits for a copy unless its
memory is pinned and `non_blocking` is given. Leaves out: the priority of a stream
(kept, but nothing overtakes). What work costs is in `cost.py` and `kernel_cost.py`.
"""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from simgpu._locking import one_at_a_time
from simgpu._timing import cost
from simgpu._timing.engine import MANY, Engine, Overlaps, book_together
from simgpu._timing.events import Event, StreamPosition, Wait
from simgpu._timing.kernel_cost import FLOOR, Work, kernel_seconds, kernel_share
from simgpu._timing.meeting import Key, Meeting

if TYPE_CHECKING:
    from simgpu._device.gpu import Gpu

    End: TypeAlias = Gpu | None  # of a copy; None is the host

KEPT = 100_000  # events the log keeps; the oldest go first


class _HostTime(threading.local):
    """How late it is for each thread of the host, in simulated seconds."""

    def __init__(self, clock: "Clock"):  # in each thread that looks
        self.seconds = clock.latest


Moment = tuple[_HostTime, float]  # how late it was for a thread


class Clock:
    """The time of each host thread, each stream's queue, and the log of events.

    A thread begins when its parent starts it, and who joins it is as late as its end.
    """

    def __init__(self, gpus: list["Gpu"], sanitizer: Any, host: str = "bare") -> None:
        self.lock = sanitizer.lock
        self.gpus, self.sanitizer = gpus, sanitizer
        times = cost.launch_times(host, gpus[0].card if gpus else None)
        self.launch, self.call, self.start = times
        self.events: deque[Event] = deque(maxlen=KEPT)
        self.waits: deque[Wait] = deque(maxlen=KEPT)
        self.recordings: list[list[Event]] = []
        self.recorded = 0  # made so far
        self.recorded_before = 0  # those made before the last clear()
        self.when_host_waits = None  # called before the host waits for a copy
        # (GPU, stream) -> collectives that it waits for and whose end is not known yet
        self.pending: dict[Key, list[Meeting]] = {}
        self.clear()

    def clear(self) -> None:
        """Forget every event and set the time to zero."""
        self.settle()
        with self.lock:
            self._clear()

    def _clear(self) -> None:
        self.events.clear()
        self.waits.clear()
        self.recorded_before = self.recorded
        self.latest = 0.0  # of all threads, in simulated seconds
        self._time = _HostTime(self)
        self.done: dict[Key, float] = {}  # (GPU, stream) -> seconds
        # GPU -> from when to when collectives take multiprocessors from its kernels
        self.beside: dict[int, Overlaps] = {}
        self.compute = [Engine() for _ in self.gpus]
        self.links: dict[tuple[str, int], Engine] = {}

    @property
    def host(self) -> float:
        """How late it is for this thread."""
        return self._time.seconds

    @host.setter
    def host(self, seconds: float) -> None:
        self._time.seconds = seconds
        self.latest = max(self.latest, seconds)

    def now(self) -> Moment:
        """How late it is for this thread, for `go_on_from` in another one."""
        return self._time, self.host

    def go_on_from(self, moment: Moment | None, at_least: bool = False) -> None:
        """Be as late as another thread was, unless `clear` has come in between."""
        if moment is not None and moment[0] is self._time:
            self.host = max(moment[1], self.host) if at_least else moment[1]

    # -- work --------------------------------------------------------------------------

    def kernel(self, gpu: "Gpu", stream: int, name: str, work: Work,
               more: bool = False) -> None:  # fmt: skip
        """A kernel on a stream of `gpu`: it takes its time and is logged.

        Args:
            gpu: where it runs.
            stream: the number of the stream.
            name: of the operation.
            work: that it does.
            more: whether that is more work of a kernel that has been launched.
        """
        seconds = kernel_seconds(gpu.card, work) - (FLOOR if more else 0.0)
        share = kernel_share(gpu.card, work.elements)
        self._launch(gpu, stream, name, seconds, share, work.nbytes, work.flops, more)

    def spin(self, gpu: "Gpu", stream: int, seconds: float) -> None:
        """A kernel of one thread that does nothing for so long."""
        self._launch(gpu, stream, "spin", seconds, kernel_share(gpu.card, 1), 0, 0)

    def _launch(self, gpu: "Gpu", stream: int, name: str, seconds: float, share: float,
                nbytes: int, flops: int, more: bool = False) -> None:  # fmt: skip
        index = gpu.index
        key = (index, stream)
        if self.pending:
            self.settle([key])
        with self.lock:
            now = self._time
            launched = now.seconds
            now.seconds = host = launched + (0.0 if more else self.launch)
            if host > self.latest:
                self.latest = host
            ready = max(host + self.start, self.done.get(key, 0.0))
            engine = self.compute[index]
            if index in self.beside and share > 1 / 2:
                seconds = self._beside_collectives(gpu, ready, seconds)
            start = engine.book(ready, seconds, share)
            if len(engine.times) > MANY:
                engine.forget(host)
            self.done[key] = end = start + seconds
            event = Event("kernel", name, gpu.name, start, end, nbytes, flops, "", "",
                          stream, launched)  # fmt: skip
            self._log(event)

    def _beside_collectives(self, gpu: "Gpu", start: float, seconds: float) -> float:
        """Seconds of a kernel that fills a GPU, some of which collectives take.

        The others' lateness is left out: a collective takes its multiprocessors from
        the time at which this rank is ready, for as long as it runs.
        """
        taken = cost.CHANNELS / gpu.card.multi_processors
        for first, last in self.beside[gpu.index].after(start):
            if last > start and first < (end := start + seconds):
                seconds += (min(last, end) - max(first, start)) * taken / (1 - taken)
        return seconds

    def copy(self, source: "End", target: "End", nbytes: int, streams: Sequence[int],
             pinned: bool = False, wait: bool = True) -> None:  # fmt: skip
        """A copy of `nbytes` from `source` to `target` (a GPU, or None: the host).

        Args:
            source: where from.
            target: where to.
            nbytes: how much.
            streams: the numbers of the streams, one for each end that is a GPU.
            pinned: whether the host's end is pinned.
            wait: whether the host waits for it (`non_blocking` was not given).
        """
        ends = [gpu for gpu in (source, target) if gpu is not None]
        if self.when_host_waits is not None and wait and len(ends) == 1:
            self.when_host_waits()
        keys = [(gpu.index, s) for gpu, s in zip(ends, streams, strict=True)]
        self.settle(keys)
        with self.lock:
            self._copy(source, target, nbytes, streams, keys, pinned, wait)

    def _copy(self, source: "End", target: "End", nbytes: int, streams: Sequence[int],
              keys: list[Key], pinned: bool, wait: bool) -> None:  # fmt: skip
        launched = self.host
        self.host += self.launch
        ready = max(self.host, *(self.done.get(key, 0.0) for key in keys))
        seconds = cost.copy_seconds(source, target, nbytes, pinned)
        start = book_together(self._copy_engines(source, target), ready, seconds)
        end = start + seconds
        for key in keys:
            self.done[key] = end
        a, b = (gpu.name if gpu else "cpu" for gpu in (source, target))
        self._log(
            Event("copy", f"{a} to {b}", b if target else a, start, end, nbytes, 0,
                  a, b, stream=streams[-1], launched=launched, source_stream=streams[0])
        )  # fmt: skip
        if len(keys) == 2:
            self.sanitizer.join_streams(keys)
        elif wait or not pinned:
            self._wait_until(end, f"wait for {a} to {b}")
            self.sanitizer.host_waited(keys)

    def _copy_engines(self, source: "End", target: "End") -> list[Engine]:
        """What a copy takes up: the way out of one GPU, the way into another."""
        peer = "peer " if source is not None and target is not None else ""
        ways = (("out", source), ("in", target))
        keys = [(peer + way, gpu.index) for way, gpu in ways if gpu is not None]
        for key in keys:
            self.links.setdefault(key, Engine())
        return [self.links[key] for key in keys]

    def _log(self, event: Event) -> None:
        self.events.append(event)
        for recording in self.recordings:
            recording.append(event)

    # -- collectives -------------------------------------------------------------------

    @one_at_a_time
    def meet(self, gpu: "Gpu", stream: int, behind: int, name: str, nbytes: int,
             seconds: float, beside: Meeting | None = None) -> Meeting:  # fmt: skip
        """A collective on a stream of `gpu`, of which other ranks decide the start.

        Args:
            gpu: the rank's.
            stream: the number of the stream that it runs on.
            behind: the number of the stream whose work it follows.
            name: of the collective.
            nbytes: of the message.
            seconds: that it takes once all are there.
            beside: one that has been launched with it and starts at the same time.
        """
        key = (index := gpu.index, stream)
        if beside is not None:
            meeting = Meeting(name, key, beside.ready, beside.after, seconds, nbytes,
                              beside.launched)  # fmt: skip
            self.pending.setdefault(key, []).append(meeting)
            meeting.waiting.add(key)
            return meeting
        launched = self.host
        self.host += self.call
        done = max(self.done.get(key, 0.0), self.done.get((index, behind), 0.0))
        ready = max(self.host + self.start, done)
        after = [*self.pending.get(key, ()), *self.pending.get((index, behind), ())]
        after = list(dict.fromkeys(after))
        meeting = Meeting(name, key, ready, after, seconds, nbytes, launched)
        self.beside.setdefault(index, Overlaps()).add(ready, ready + seconds)
        self.pending[key] = [meeting]
        meeting.waiting.add(key)
        return meeting

    @one_at_a_time
    def stream_waits_for(self, key: Key, meeting: Meeting) -> None:
        """What a stream is given from now on starts after a collective."""
        if meeting.end is not None:
            self.done[key] = max(self.done.get(key, 0.0), meeting.end)
        elif key not in meeting.waiting:
            meeting.waiting.add(key)
            self.pending.setdefault(key, []).append(meeting)

    @one_at_a_time
    def settled(self, meeting: Meeting, start: float, end: float, group: str = "",
                waited_for: int = -1) -> None:  # fmt: skip
        """It is known now when a collective starts and ends."""
        ready = max([meeting.ready, *(m.end for m in meeting.after if m.end)])
        meeting.start, meeting.end, meeting.after = start, end, []
        for key in meeting.waiting:
            left = [m for m in self.pending.get(key, ()) if m is not meeting]
            if left:
                self.pending[key] = left
            else:
                self.pending.pop(key, None)
            self.done[key] = max(self.done.get(key, 0.0), end)
        index, stream = meeting.key
        waited = max(start - ready, 0.0)
        self._log(
            Event("collective", meeting.name, self.gpus[index].name,
                  min(ready, start), end, meeting.nbytes, 0, stream=stream,
                  launched=meeting.launched, group=group, waited=waited,
                  waited_for=waited_for if waited > 0 else -1, about=meeting.about)
        )  # fmt: skip

    def settle(self, keys: Iterable[Key] | None = None) -> None:
        """Find out when the collectives end that streams wait for (None: all)."""
        while self.pending:
            with self.lock:  # other threads launch some, and settle these
                waiting = list(self.pending) if keys is None else keys
                found = [self.pending[key][0] for key in waiting if key in self.pending]
            if not found:
                return
            found[0].settle()

    def settle_position(self, position: StreamPosition) -> None:
        for meeting in position.after:
            if meeting.end is None and position.clock is self:
                meeting.settle()

    # -- waiting -----------------------------------------------------------------------

    def forbid_waiting(self, index: int | None = None) -> None:
        """The program is about to wait, perhaps for a whole GPU: captures forbid it."""

    def forbid_waiting_for(self, index: int, stream: int) -> None:
        """The program is about to wait for a stream, which may be captured."""

    def wait_for_gpu(self, gpu: "Gpu") -> None:
        """The host waits until `gpu` has nothing left to do."""
        keys = [key for key in self.keys() if key[0] == gpu.index]
        self.settle(keys)
        with self.lock:
            end = max((self.done.get(key, 0.0) for key in keys), default=0.0)
            self._wait_until(end, f"wait for cuda:{gpu.index}")
            self.sanitizer.host_waited(keys)

    def wait_for_stream(self, index: int, stream: int) -> None:
        """The host waits until a stream has nothing left to do."""
        key = (index, stream)
        self.settle([key])
        with self.lock:
            self._wait_until(self.done.get(key, 0.0), f"wait for stream {stream}")
            self.sanitizer.host_waited([key])

    def wait_for_position(self, position: StreamPosition) -> None:
        """The host waits for the work before `position`."""
        if position.clock is not self:
            return
        self.settle_position(position)
        with self.lock:
            self._wait_until(self._time_of(position), "wait for an event")
            self.sanitizer.host_saw(position.number)

    @one_at_a_time
    def record(self, index: int, stream: int) -> StreamPosition:
        """A position in a stream, after all that it has been given."""
        self.recorded += 1
        self.sanitizer.event_recorded(self.recorded, (index, stream))
        key = (index, stream)
        time = max(self.host, self.done.get(key, 0.0))
        after = tuple(self.pending.get(key, ())) if self.pending else ()
        return StreamPosition(time, self.recorded, self, after)

    def reached(self, position: StreamPosition) -> bool:
        """Whether the work before `position` is done; asking lets no time pass."""
        if position.clock is not self:
            return True  # those GPUs are gone
        self.settle_position(position)
        with self.lock:
            if self._time_of(position) > self.host:
                return False
            self.sanitizer.host_saw(position.number)
        return True

    def forget(self, position: StreamPosition) -> None:
        """Nobody will ask for `position` again."""
        if position.clock is self:
            self.sanitizer.forget_event(position.number)

    @one_at_a_time
    def stream_waits(self, index: int, stream: int, position: StreamPosition) -> None:
        """What a stream is given from now on starts after `position`."""
        if position.clock is not self:
            return
        key = (index, stream)
        self.done[key] = max(self.done.get(key, 0.0), self._time_of(position))
        for meeting in position.after:
            self.stream_waits_for(key, meeting)
        self.sanitizer.stream_waits(key, position.number)

    def stream_done(self, index: int, stream: int) -> bool:
        """Whether a stream has nothing left to do."""
        self.settle([(index, stream)])
        return self.done.get((index, stream), 0.0) <= self.host

    def keys(self) -> list[Key]:
        """Every stream that was ever given work: (GPU, number)."""
        return sorted({*self.done, *self.pending, *self.sanitizer.last})

    def between(self, first: StreamPosition, second: StreamPosition) -> float:
        """Simulated seconds from one position to another."""
        for position in (first, second):
            self.settle_position(position)
        if second.number <= self.recorded_before or second.clock is not self:
            return second.time - first.time
        return self._time_of(second) - self._time_of(first)

    def _time_of(self, position: StreamPosition) -> float:
        known = position.clock is self and position.number > self.recorded_before
        if not known:
            return 0.0
        return max([position.time, *(m.end for m in position.after if m.end)])

    @one_at_a_time
    def host_waits(self, time: float, why: str) -> None:
        """The host waits for somebody else until `time`."""
        self._wait_until(time, why)

    def _wait_until(self, time: float, why: str) -> None:
        if time > self.host:
            self.waits.append(Wait(why, self.host, time))
            self.host = time

    # -- what the host does itself -----------------------------------------------------

    @one_at_a_time
    def event_call(self) -> None:
        """The host records, queries or waits for an event."""
        self.host += cost.EVENT

    @one_at_a_time
    def busy(self, seconds: float, what: str) -> None:
        """The host does something else."""
        self._wait_until(self.host + seconds, what)

    @one_at_a_time
    def pin(self, nbytes: int) -> None:
        """The host pins new memory and copies `nbytes` into it."""
        self._wait_until(self.host + cost.pin_seconds(nbytes), "pin")

    def wait_for_device(self, index: int) -> None:
        """The host gives a segment back, for which CUDA waits for the GPU."""
        self.wait_for_gpu(self.gpus[index])

    def total(self) -> float:
        """Simulated seconds until the host and every GPU are done."""
        self.settle()
        return max([self.latest, *self.done.values()])
