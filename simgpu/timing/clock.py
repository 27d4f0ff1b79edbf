"""The schedule: when the host launches work, and when each stream runs it.

Models: a host that launches one operation after the other; streams, each of which
runs its operations in order; and what they run on: the multiprocessors of a GPU, and an
engine for copies in each direction. Large kernels fill a GPU, so that those of other
streams wait; small ones run beside each other. The host waits for a copy unless its
memory is pinned and `non_blocking` is given. Leaves out: the priority of a stream
(kept, but nothing overtakes). What work costs is in `cost.py`.
"""

import threading
from collections import deque

from simgpu.locking import one_at_a_time
from simgpu.timing import cost
from simgpu.timing.engine import MANY, Engine, book_together
from simgpu.timing.events import Event, StreamPosition, Wait

KEPT = 100_000  # events the log keeps; the oldest go first


class _HostTime(threading.local):
    """How late it is for each thread of the host, in simulated seconds."""

    def __init__(self, clock: "Clock"):  # in each thread that looks
        self.seconds = clock.latest


class Clock:
    """The time of each host thread, each stream's queue, and the log of events.

    A thread begins when its parent starts it, and who joins it is as late as its end.
    """

    def __init__(self, gpus: list, sanitizer):
        self.lock = sanitizer.lock
        self.gpus = gpus
        self.sanitizer = sanitizer
        self.events: deque[Event] = deque(maxlen=KEPT)
        self.waits: deque[Wait] = deque(maxlen=KEPT)
        self.recordings: list[list[Event]] = []
        self.recorded = 0  # made so far
        self.recorded_before = 0  # those made before the last clear()
        self.clear()

    @one_at_a_time
    def clear(self) -> None:
        """Forget every event and set the time to zero."""
        self.events.clear()
        self.waits.clear()
        self.recorded_before = self.recorded
        self.latest = 0.0  # of all threads, in simulated seconds
        self._time = _HostTime(self)
        self.done: dict[tuple[int, int], float] = {}  # (GPU, stream) -> seconds
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

    def now(self) -> tuple:
        """How late it is for this thread, for `go_on_from` in another one."""
        return self._time, self.host

    def go_on_from(self, moment: tuple | None, at_least: bool = False) -> None:
        """Be as late as another thread was, unless `clear` has come in between."""
        if moment is not None and moment[0] is self._time:
            self.host = max(moment[1], self.host) if at_least else moment[1]

    # -- work --------------------------------------------------------------------------

    def kernel(self, gpu, stream, name, nbytes, flops=0, elements=1, dtype="") -> None:
        """A kernel on a stream of `gpu`: it takes its time and is logged.

        Args:
            gpu: where it runs.
            stream: the number of the stream.
            name: of the operation.
            nbytes: read and written.
            flops: floating-point operations.
            elements: of the largest output.
            dtype: in which it computes: "float32", "tf32", ...; of no account without
                FLOPs.
        """
        seconds = cost.kernel_seconds(gpu.card, flops, nbytes, dtype)
        share = cost.kernel_share(gpu.card, elements)
        self._launch(gpu, stream, name, seconds, share, nbytes, flops)

    def collective(self, gpu, stream: int, name: str, nbytes: int, sent: int) -> None:
        """What a rank does in a collective: it sends, and receives as much.

        Args:
            gpu: the rank's.
            stream: the number of the stream.
            name: of the collective.
            nbytes: that the rank gives.
            sent: bytes that leave its GPU in all.
        """
        seconds = cost.collective_seconds(gpu, sent)
        share = cost.kernel_share(gpu.card, 1)  # it leaves room for other kernels
        self._launch(gpu, stream, name, seconds, share, nbytes, 0)

    def _launch(self, gpu, stream, name, seconds, share, nbytes, flops) -> None:
        index = gpu.index
        key = (index, stream)
        with self.lock:
            now = self._time
            launched = now.seconds
            now.seconds = host = launched + cost.LAUNCH
            if host > self.latest:
                self.latest = host
            ready = max(host, self.done.get(key, 0.0))
            engine = self.compute[index]
            start = engine.book(ready, seconds, share)
            if len(engine.times) > MANY:
                engine.forget(host)
            self.done[key] = end = start + seconds
            event = Event("kernel", name, gpu.name, start, end, nbytes, flops, "", "",
                          stream, launched)  # fmt: skip
            self.events.append(event)
            for recording in self.recordings:
                recording.append(event)

    @one_at_a_time
    def copy(self, source, target, nbytes: int, streams, pinned=False, wait=True):
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
        keys = [(gpu.index, s) for gpu, s in zip(ends, streams, strict=True)]
        launched = self.host
        self.host += cost.LAUNCH
        ready = max(self.host, *(self.done.get(key, 0.0) for key in keys))
        seconds = cost.copy_seconds(source, target, nbytes, pinned)
        start = book_together(self._copy_engines(source, target), ready, seconds)
        end = start + seconds
        for key in keys:
            self.done[key] = end
        a, b = (gpu.name if gpu else "cpu" for gpu in (source, target))
        self._log(
            Event("copy", f"{a} to {b}", ends[-1].name, start, end, nbytes, 0, a, b,
                  stream=streams[-1], launched=launched, source_stream=streams[0])
        )  # fmt: skip
        if len(ends) == 2:
            self.sanitizer.join_streams(keys)
        elif wait or not pinned:
            self._wait_until(end, f"wait for {a} to {b}")
            self.sanitizer.host_waited(keys)

    def _copy_engines(self, source, target) -> list[Engine]:
        """What a copy takes up: the way out of one GPU, the way into another."""
        peer = "peer " if source is not None and target is not None else ""
        ways = (("out", source), ("in", target))
        keys = [(peer + way, gpu.index) for way, gpu in ways if gpu is not None]
        for key in keys:
            if key not in self.links:
                self.links[key] = Engine()
        return [self.links[key] for key in keys]

    def _log(self, event: Event) -> None:
        self.events.append(event)
        for recording in self.recordings:
            recording.append(event)

    # -- waiting -----------------------------------------------------------------------

    @one_at_a_time
    def wait_for_gpu(self, gpu) -> None:
        """The host waits until `gpu` has nothing left to do."""
        keys = [key for key in self.keys() if key[0] == gpu.index]
        end = max((self.done.get(key, 0.0) for key in keys), default=0.0)
        self._wait_until(end, f"wait for cuda:{gpu.index}")
        self.sanitizer.host_waited(keys)

    @one_at_a_time
    def wait_for_stream(self, index: int, stream: int) -> None:
        """The host waits until a stream has nothing left to do."""
        key = (index, stream)
        self._wait_until(self.done.get(key, 0.0), f"wait for stream {stream}")
        self.sanitizer.host_waited([key])

    @one_at_a_time
    def wait_for_position(self, position: StreamPosition) -> None:
        """The host waits for the work before `position`."""
        if position.clock is not self:
            return
        self._wait_until(self._time_of(position), "wait for an event")
        self.sanitizer.host_saw(position.number)

    @one_at_a_time
    def record(self, index: int, stream: int) -> StreamPosition:
        """A position in a stream, after all that it has been given."""
        self.recorded += 1
        self.sanitizer.event_recorded(self.recorded, (index, stream))
        time = max(self.host, self.done.get((index, stream), 0.0))
        return StreamPosition(time, self.recorded, self)

    @one_at_a_time
    def reached(self, position: StreamPosition) -> bool:
        """Whether the work before `position` is done; asking lets no time pass."""
        if position.clock is not self:
            return True  # those GPUs are gone
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
        self.sanitizer.stream_waits(key, position.number)

    def stream_done(self, index: int, stream: int) -> bool:
        """Whether a stream has nothing left to do."""
        return self.done.get((index, stream), 0.0) <= self.host

    def keys(self) -> list[tuple[int, int]]:
        """Every stream that was ever given work: (GPU, number)."""
        return sorted({*self.done, *self.sanitizer.last})

    def between(self, first: StreamPosition, second: StreamPosition) -> float:
        """Simulated seconds from one position to another."""
        if second.number <= self.recorded_before or second.clock is not self:
            return second.time - first.time
        return self._time_of(second) - self._time_of(first)

    def _time_of(self, position: StreamPosition) -> float:
        known = position.clock is self and position.number > self.recorded_before
        return position.time if known else 0.0

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

    @one_at_a_time
    def wait_for_device(self, index: int) -> None:
        """The host gives a segment back, for which CUDA waits for the GPU."""
        self.wait_for_gpu(self.gpus[index])

    def total(self) -> float:
        """Simulated seconds until the host and every GPU are done."""
        return max([self.latest, *self.done.values()])
