"""Time on simulated GPUs, and the log of what ran. Counted, never measured.

Models: a host that launches one operation after the other; streams, each of which
runs its operations in order; and what they run on: the multiprocessors of a GPU, and an
engine for copies in each direction. An operation takes the larger of FLOPs over rate
and bytes over bandwidth. Large kernels fill a GPU, so that those of other streams wait;
small ones run beside each other. A copy takes its bytes over the slowest link on its
way, and the host waits for it unless its memory is pinned and `non_blocking` is given.
Leaves out: that a kernel with few outputs does not reach the rate of the whole card (it
only leaves room for others), caches, the priority of a stream (kept, but nothing
overtakes), what the first use of CUDA, of each kernel and of each segment costs, and
what the host computes itself (the CPU's own operations cost nothing here).

The constants below are assumed, not measured, unless a source is given.
"""

import functools
import threading
from bisect import bisect_right
from collections import deque
from typing import NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from helpers.simgpu.races import Races, one_at_a_time

LAUNCH = 5e-6  # seconds of the host for each launch
EVENT = 1e-6  # seconds of the host to record, query or wait for an event
KERNEL = 2e-6  # seconds that the smallest kernel takes
COPY_LATENCY = 10e-6  # seconds before the first byte of a copy moves
OF_PEAK_FLOPS = 0.7  # a good matrix product reaches this share of the peak
OF_PEAK_BYTES = 0.8  # an element-wise kernel, or a pinned copy, of the bandwidth
FILLS = 16384  # elements of output for which a kernel takes up a multiprocessor
HOST_COPY = 10e9  # bytes a second that the host copies in its own memory
# Pinning: chosen so that x.pin_memory().to(gpu) takes twice as long as x.to(gpu), the
# worst that PyTorch's tutorial "A guide on good usage of non_blocking and pin_memory"
# measured
PIN_LATENCY = 20e-6  # seconds
PIN = 16e9  # bytes a second that the host pins
KEPT = 100_000  # events the log keeps; the oldest go first


class Event(NamedTuple):
    """One thing that ran: a kernel on a GPU, or a copy to or from one."""

    kind: str  # "kernel" or "copy"
    name: str  # the operation: "addmm"; for a copy "cpu to cuda:1"
    device: str  # whose stream it ran on
    start: float  # simulated seconds since the simulator started
    end: float
    nbytes: int  # bytes read and written, or copied
    flops: int
    source: str = ""  # of a copy
    target: str = ""
    stream: int = 0  # number of the stream on its device; 0 is the default one
    launched: float = 0.0  # when the host launched it
    source_stream: int = 0  # of a copy between GPUs: the stream that it held up there


class Wait(NamedTuple):
    """A time in which the host waited, or was busy with something else."""

    name: str  # "wait for cuda:0", "pin", or what `host_busy` was told
    start: float
    end: float


class Mark(NamedTuple):
    """A point in the work of a stream: all that it was given before is done."""

    time: float  # simulated seconds
    number: int  # names it
    clock: "Clock"  # whose time it is


class Engine:
    """Something that work shares: the multiprocessors of a GPU, or a copy engine."""

    def __init__(self):
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
        if len(self.times) < 4096:
            return
        first = bisect_right(self.times, before) - 1024
        if first > 0:
            del self.times[:first], self.used[:first]


class _HostTime(threading.local):
    """How late it is for each thread of the host, in simulated seconds."""

    def __init__(self, clock: "Clock"):  # in each thread that looks
        self.seconds = clock.latest


class Clock:
    """The time of each host thread, each stream's queue, and the log of events.

    A thread begins when its parent starts it, and who joins it is as late as its end.
    """

    def __init__(self, gpus: list, races: Races):
        self.lock = races.lock
        self.gpus = gpus
        self.races = races
        self.events: deque[Event] = deque(maxlen=KEPT)
        self.waits: deque[Wait] = deque(maxlen=KEPT)
        self.recordings: list[list[Event]] = []
        self.marks = 0  # made so far
        self.old_marks = 0  # those made before the last clear()
        self.clear()

    @one_at_a_time
    def clear(self) -> None:
        """Forget every event and set the time to zero."""
        self.events.clear()
        self.waits.clear()
        self.old_marks = self.marks
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

    def kernel(self, gpu, stream: int, func, args, kwargs, tensors, out) -> None:
        """Log `func` on a stream of `gpu`, which gave `out`; it takes its time.

        Args:
            tensors: what it reads.
        """
        outputs = [t for t in _as_tuple(out) if isinstance(t, torch.Tensor)]
        nbytes, elements = 0, 1
        for tensor in tensors:
            nbytes += _bytes_in(tensor)
        for tensor in outputs:
            nbytes += _bytes_in(tensor)
            elements = max(elements, tensor.numel())
        name = _name_of(func)
        flops = flops_of(func, args, kwargs, out)
        numbers = _numbers(name, outputs or list(tensors)) if flops else "float32"
        seconds = kernel_seconds(gpu.card, flops, nbytes, numbers)
        share = min(1.0, max(elements / FILLS, 1) / gpu.card.multi_processors)
        self._launch(gpu, stream, name, seconds, share, nbytes, flops)

    def collective(self, gpu, stream: int, name: str, nbytes: int, sent: int) -> None:
        """Log what a rank does in a collective: it sends, and takes in as much.

        Args:
            nbytes: that the rank hands over.
            sent: bytes that leave its GPU in all.
        """
        seconds = COPY_LATENCY + sent / copy_bandwidth(gpu, gpu, pinned=True)
        share = 1 / gpu.card.multi_processors  # it leaves room for other kernels
        self._launch(gpu, stream, name, seconds, share, nbytes, 0)

    def _launch(self, gpu, stream, name, seconds, share, nbytes, flops) -> None:
        key = (gpu.index, stream)
        with self.lock:
            launched = self.host
            self.host += LAUNCH
            ready = max(self.host, self.done.get(key, 0.0))
            engine = self.compute[gpu.index]
            start = engine.book(ready, seconds, share)
            engine.forget(self.host)
            self.done[key] = end = start + seconds
            self._log(
                Event("kernel", name, f"cuda:{gpu.index}", start, end, nbytes, flops,
                      stream=stream, launched=launched)
            )  # fmt: skip

    @one_at_a_time
    def copy(self, source, target, nbytes: int, streams, pinned=False, wait=True):
        """Log a copy of `nbytes` from `source` to `target` (a GPU, or None: host).

        Args:
            streams: the numbers of the streams, one for each end that is a GPU.
            pinned: whether the host's end is pinned.
            wait: whether the host waits for it (`non_blocking` was not given).
        """
        ends = [gpu for gpu in (source, target) if gpu is not None]
        keys = [(gpu.index, s) for gpu, s in zip(ends, streams, strict=True)]
        launched = self.host
        self.host += LAUNCH
        ready = max(self.host, *(self.done.get(key, 0.0) for key in keys))
        seconds = COPY_LATENCY + nbytes / copy_bandwidth(source, target, pinned)
        start = _book_all(self._links(source, target), ready, seconds)
        end = start + seconds
        for key in keys:
            self.done[key] = end
        a, b = (f"cuda:{gpu.index}" if gpu else "cpu" for gpu in (source, target))
        device = f"cuda:{ends[-1].index}"
        self._log(
            Event("copy", f"{a} to {b}", device, start, end, nbytes, 0, a, b,
                  stream=streams[-1], launched=launched, source_stream=streams[0])
        )  # fmt: skip
        if len(ends) == 2:
            self.races.meet(keys)
        elif wait or not pinned:
            self._wait_until(end, f"wait for {a} to {b}")
            self.races.host_waits(keys)

    def _links(self, source, target) -> list[Engine]:
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
        self.races.host_waits(keys)

    @one_at_a_time
    def wait_for_stream(self, index: int, stream: int) -> None:
        """The host waits until a stream has nothing left to do."""
        key = (index, stream)
        self._wait_until(self.done.get(key, 0.0), f"wait for stream {stream}")
        self.races.host_waits([key])

    @one_at_a_time
    def wait_for_mark(self, mark: Mark) -> None:
        """The host waits for the work before `mark`."""
        if mark.clock is not self:
            return
        self._wait_until(self._time_of(mark), "wait for an event")
        self.races.host_saw(mark.number)

    @one_at_a_time
    def mark(self, index: int, stream: int) -> Mark:
        """A mark in a stream, after all that it has been given."""
        self.marks += 1
        self.races.record(self.marks, (index, stream))
        time = max(self.host, self.done.get((index, stream), 0.0))
        return Mark(time, self.marks, self)

    @one_at_a_time
    def reached(self, mark: Mark) -> bool:
        """Whether the work before `mark` is done; asking lets no time pass."""
        if mark.clock is not self:
            return True  # those GPUs are gone
        if self._time_of(mark) > self.host:
            return False
        self.races.host_saw(mark.number)
        return True

    def forget(self, mark: Mark) -> None:
        """Nobody will ask for `mark` again."""
        if mark.clock is self:
            self.races.dead.append(mark.number)

    @one_at_a_time
    def stream_waits(self, index: int, stream: int, mark: Mark) -> None:
        """What a stream is given from now on starts after `mark`."""
        if mark.clock is not self:
            return
        key = (index, stream)
        self.done[key] = max(self.done.get(key, 0.0), self._time_of(mark))
        self.races.stream_waits(key, mark.number)

    def stream_done(self, index: int, stream: int) -> bool:
        """Whether a stream has nothing left to do."""
        return self.done.get((index, stream), 0.0) <= self.host

    def keys(self) -> list[tuple[int, int]]:
        """Every stream that was ever given work: (GPU, number)."""
        return sorted({*self.done, *self.races.last})

    def between(self, first: Mark, second: Mark) -> float:
        """Simulated seconds from one mark to another."""
        if second.number <= self.old_marks or second.clock is not self:
            return second.time - first.time
        return self._time_of(second) - self._time_of(first)

    def _time_of(self, mark: Mark) -> float:
        known = mark.clock is self and mark.number > self.old_marks
        return mark.time if known else 0.0

    def _wait_until(self, time: float, why: str) -> None:
        if time > self.host:
            self.waits.append(Wait(why, self.host, time))
            self.host = time

    # -- what the host does itself -----------------------------------------------------

    @one_at_a_time
    def event_call(self) -> None:
        """The host records, queries or waits for an event."""
        self.host += EVENT

    @one_at_a_time
    def busy(self, seconds: float, what: str) -> None:
        """The host does something else."""
        self._wait_until(self.host + seconds, what)

    @one_at_a_time
    def pin(self, nbytes: int) -> None:
        """The host pins new memory and copies `nbytes` into it."""
        seconds = PIN_LATENCY + nbytes / PIN + nbytes / HOST_COPY
        self._wait_until(self.host + seconds, "pin")

    @one_at_a_time
    def device_free(self, index: int) -> None:
        """The host gives a segment back, for which CUDA waits for the GPU."""
        self.wait_for_gpu(self.gpus[index])

    def total(self) -> float:
        """Simulated seconds until the host and every GPU are done."""
        return max([self.latest, *self.done.values()])


def _book_all(engines: list[Engine], ready: float, seconds: float) -> float:
    """When work starts that needs all engines at once."""
    start = ready
    while (later := max(e.find(start, seconds) for e in engines)) > start:
        start = later
    for engine in engines:
        engine.book(start, seconds)
        engine.forget(ready)
    return start


def kernel_seconds(card, flops: int, nbytes: int, numbers: str = "float32") -> float:
    """Seconds of a kernel: the larger of its arithmetic and its traffic.

    Args:
        card: on which it runs.
        flops: floating-point operations.
        nbytes: read and written.
        numbers: what it computes in: "float32", "tf32", "bfloat16", ...
    """
    rate = card.flops.get(numbers, card.flops["float32"]) * OF_PEAK_FLOPS
    return max(flops / rate, nbytes / (card.memory_bandwidth * OF_PEAK_BYTES), KERNEL)


def copy_bandwidth(source, target, pinned: bool) -> float:
    """Bytes a second of a copy between two GPUs, or a GPU and the host (None)."""
    ends = [gpu for gpu in (source, target) if gpu is not None]
    if len(ends) == 2 and all(gpu.card.nvlink_bandwidth for gpu in ends):
        return min(gpu.card.nvlink_bandwidth for gpu in ends) * OF_PEAK_BYTES
    link = min(gpu.card.pcie_bandwidth for gpu in ends) * OF_PEAK_BYTES
    return link if pinned or len(ends) == 2 else min(link, HOST_COPY)


def _bytes_in(tensor: torch.Tensor) -> int:
    """Bytes that an operation moves of a tensor: each that it has, once."""
    if tensor.layout is not torch.strided:
        return tensor._nnz() * tensor.element_size()
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes and 0 in tensor.stride():  # expanded: the same bytes again and again
        return min(nbytes, tensor.untyped_storage().nbytes())
    return nbytes


@functools.cache
def _name_of(func) -> str:
    return func._schema.name.removeprefix("aten::")


def _numbers(name: str, tensors: list) -> str:
    """In which numbers a kernel computes; float32 may be rounded to TF32."""
    numbers = str(tensors[0].dtype).removeprefix("torch.")
    if numbers != "float32":
        return numbers
    if name.startswith(("convolution", "cudnn")):
        return "tf32" if torch.backends.cudnn.allow_tf32 else numbers
    return numbers if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _as_tuple(out) -> tuple:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


@functools.cache
def _formula(func):
    return flop_registry.get(func.overloadpacket)


def flops_of(func, args, kwargs, out) -> int:
    """Floating-point operations of `func`, by PyTorch's own formulas.

    Operations without one (element-wise ones, reductions) count as bytes alone.
    """
    formula = _formula(func)
    if formula is None:
        return 0
    key = (func, *(_shape(value) for value in (*args, *kwargs.values())))
    if key not in _known_flops:
        if len(_known_flops) >= KEPT:
            _known_flops.clear()
        _known_flops[key] = int(formula(*args, **kwargs, out_val=out))
    return _known_flops[key]


_known_flops: dict[tuple, int] = {}


def _shape(value):
    """What the formulas read of an argument, as something to look up by."""
    if isinstance(value, torch.Tensor):
        return value.shape
    return tuple(map(_shape, value)) if isinstance(value, (list, tuple)) else value
