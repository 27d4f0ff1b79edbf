"""Streams and events of simulated GPUs, under PyTorch's names.

Models: `torch.cuda.Stream` and `Event`, `torch.Stream` and `torch.Event`, the current
and the default stream of each GPU, and who waits for whom. As in PyTorch, a new stream
comes from a pool of 32 for each GPU and priority, and does not wait for the default
stream by itself. Leaves out: what a priority does, streams made by other libraries,
events shared between processes, and the stream of each backward step: backward runs on
the current stream, which first waits for every other (so a gradient that another stream
has not finished is not seen as a race).
`replacements()` is this file's part of the table that `start()` applies.

Taught in 04-overlap-with-streams.
"""

import ctypes

import torch
import torch.cuda.streams

from helpers.simgpu import placement
from helpers.simgpu.clock import Mark
from helpers.simgpu.memory import stream_handle
from helpers.simgpu.placement import NotSimulated

POOL = 32  # streams of each GPU and priority, handed out in turn
PRIORITIES = (0, -3)  # the least and the greatest
_CUDA = 1  # the number of the device type in C++


class Stream:
    """`torch.Stream`: work that a GPU does in order.

    Args:
        device: the GPU; None is the current one.
        priority: 0 to -3; smaller is more urgent (kept, but nothing overtakes).

    Raises:
        RuntimeError: for a device that is not a GPU.
    """

    def __new__(cls, device=None, priority=0, *, stream_id=None, device_index=None,
                device_type=_CUDA, **kwargs):  # fmt: skip
        if kwargs:
            raise NotSimulated(f"a stream with {', '.join(kwargs)}")
        sim = placement.current()
        self = object.__new__(cls)
        if device_index is not None:  # an existing one, by its numbers
            gpu = sim.find(device_index)
            self._become(gpu, stream_id or 0)
            return self
        gpu = placement.gpu_named(device)
        priority = min(max(priority, PRIORITIES[1]), PRIORITIES[0])
        taken = gpu.streams_made.get(priority, 0)
        gpu.streams_made[priority] = taken + 1
        self._become(gpu, 1 + taken % POOL - priority * POOL)
        sim.races.watch()
        return self

    def _become(self, gpu, number: int) -> None:
        self._gpu = gpu
        self.stream_id = number
        self.device_index = gpu.index
        self.device_type = _CUDA
        self.device = gpu.device

    @property
    def priority(self) -> int:
        return 0 if self.stream_id == 0 else -((self.stream_id - 1) // POOL)

    @classmethod
    def priority_range(cls) -> tuple[int, int]:
        """The least and the greatest priority."""
        return PRIORITIES

    @property
    def cuda_stream(self) -> int:
        """The handle that CUDA would know it by; 0 is the default stream."""
        return stream_handle(self.device_index, self.stream_id)

    native_handle = cuda_stream

    @property
    def _as_parameter_(self):
        return ctypes.c_void_p(self.cuda_stream)

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.cuda_stream)

    def query(self) -> bool:
        """Whether all its work is done; asking takes the host a moment."""
        clock = placement.current().clock
        clock.event_call()
        return clock.stream_done(self.device_index, self.stream_id)

    def synchronize(self) -> None:
        """Make the host wait until its work is done."""
        clock = placement.current().clock
        clock.wait_for_stream(self.device_index, self.stream_id)

    def wait_event(self, event: "Event") -> None:
        """What it is given from now on waits for the event."""
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:
        """What it is given from now on waits for what `stream` was given before."""
        clock = placement.current().clock
        clock.event_call()
        clock.event_call()
        mark = clock.mark(stream.device_index, stream.stream_id)
        clock.stream_waits(self.device_index, self.stream_id, mark)
        clock.forget(mark)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Put an event into it; a new one if none is given."""
        event = _event_like(self) if event is None else event
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured: never."""
        return False

    def __enter__(self):
        self._before = (
            torch.cuda.current_device(), current_stream(self.device),
            getattr(self, "_before", None),
        )  # fmt: skip
        set_stream(self)
        return self

    def __exit__(self, *exc_info):
        device, stream, self._before = self._before
        set_stream(stream)
        torch.cuda.set_device(device)

    def __eq__(self, other):
        return (
            isinstance(other, Stream)
            and self.stream_id == other.stream_id
            and self.device == other.device
        )

    def __hash__(self):
        return hash((self.stream_id, self.device))

    def __repr__(self):
        return (
            f"torch.Stream device_type=cuda, device_index={self.device_index}, "
            f"stream_id={self.stream_id}"
        )


class CudaStream(Stream):
    """`torch.cuda.Stream`."""

    def __eq__(self, other):
        return isinstance(other, CudaStream) and super().__eq__(other)

    __hash__ = Stream.__hash__

    def __repr__(self):
        return (
            f"<torch.cuda.Stream device={self.device} "
            f"cuda_stream={self.cuda_stream:#x}>"
        )


class Event:
    """`torch.Event`: a mark in the work of a stream.

    Args:
        device: a GPU; the event belongs to the GPU of the stream that records it first.
        enable_timing: whether `elapsed_time` may ask for it.
        blocking: whether waiting for it frees the processor (no difference here).
    """

    def __init__(self, device=None, *, enable_timing=False, blocking=False,
                 interprocess=False):  # fmt: skip
        self._begin(enable_timing, blocking, interprocess)

    def _begin(self, enable_timing, blocking, interprocess) -> None:
        if interprocess:
            raise NotSimulated("an event shared between processes")
        self.enable_timing, self.blocking = enable_timing, blocking
        self._mark: Mark | None = None
        self._index: int | None = None
        placement.current().races.start()

    @property
    def device(self) -> torch.device | None:
        return None if self._index is None else torch.device("cuda", self._index)

    @property
    def event_id(self) -> int:
        return 0 if self._mark is None else id(self)

    cuda_event = event_id

    def record(self, stream: Stream | None = None) -> None:
        """Put it into a stream (the current one if none is given).

        Raises:
            RuntimeError: if it was recorded on another GPU before.
        """
        stream = current_stream() if stream is None else stream
        clock = placement.current().clock
        if self._mark is not None and self._mark.clock is not clock:
            self._mark = self._index = None  # of GPUs that are gone
        if self._index not in (None, stream.device_index):
            raise RuntimeError(
                f"Event device {self._index} does not match recording stream's device "
                f"{stream.device_index}."
            )
        clock.event_call()
        if self._mark is not None:
            clock.forget(self._mark)
        self._index = stream.device_index
        self._mark = clock.mark(stream.device_index, stream.stream_id)

    def wait(self, stream: Stream | None = None) -> None:
        """What `stream` (or the current one) is given from now on waits for it."""
        stream = current_stream() if stream is None else stream
        if self._mark is not None:
            clock = placement.current().clock
            clock.event_call()
            clock.stream_waits(stream.device_index, stream.stream_id, self._mark)

    def query(self) -> bool:
        """Whether the work before it is done; asking takes the host a moment."""
        clock = placement.current().clock
        clock.event_call()
        return self._mark is None or clock.reached(self._mark)

    def synchronize(self) -> None:
        """Make the host wait until the work before it is done."""
        if self._mark is not None:
            placement.current().clock.wait_for_mark(self._mark)

    def elapsed_time(self, end_event: "Event") -> float:
        """Simulated milliseconds from this event to `end_event`.

        Raises:
            ValueError: if one of them does not keep time or was not recorded.
            RuntimeError: if the GPU has not reached them yet, or they are on two GPUs.
        """
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError(
                "Both events must be created with argument 'enable_timing=True'."
            )
        if self._mark is None or end_event._mark is None:
            raise ValueError(
                "Both events must be recorded before calculating elapsed time."
            )
        if self._index != end_event._index:
            raise RuntimeError(
                f"Event device {self._index} does not match other's device "
                f"{end_event._index}."
            )
        clock = placement.current().clock
        if not (clock.reached(self._mark) and clock.reached(end_event._mark)):
            raise RuntimeError(
                "Both events must be completed before calculating elapsed time."
            )
        return clock.between(self._mark, end_event._mark) * 1e3

    def ipc_handle(self):
        raise NotSimulated("an event shared between processes")

    @classmethod
    def from_ipc_handle(cls, device, handle):
        raise NotSimulated("an event shared between processes")

    def __del__(self):
        if getattr(self, "_mark", None) is not None:
            self._mark.clock.forget(self._mark)

    def __repr__(self):
        return f"torch.Event device={self.device}, event_id={self.event_id:#x}"


class CudaEvent(Event):
    """`torch.cuda.Event`."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False,
                 external=False):  # fmt: skip
        if external:
            raise NotSimulated("an event of a CUDA graph")
        self._begin(enable_timing, blocking, interprocess)

    def __repr__(self):
        if self._mark is None:
            return "<torch.cuda.Event uninitialized>"
        return f"<torch.cuda.Event {self.event_id:#x}>"


def _event_like(stream: Stream) -> Event:
    return CudaEvent() if isinstance(stream, CudaStream) else Event()


# -- which stream is current -----------------------------------------------------------


def _stream(number: int, device, kind=CudaStream) -> Stream:
    return kind(stream_id=number, device_index=placement.gpu_named(device).index)


def current_stream(device=None) -> CudaStream:
    """The stream on which this thread's work for a GPU runs."""
    index = placement.gpu_named(device).index
    return _stream(placement.current().thread.streams.get(index, 0), index)


def default_stream(device=None) -> CudaStream:
    """The stream on which a GPU works if nobody says otherwise."""
    return _stream(0, device)


def set_stream(stream: Stream | None) -> None:
    """From now on this thread's work for the stream's GPU runs on it.

    The stream's GPU becomes the current one.
    """
    if stream is not None:
        sim = placement.current()
        torch.cuda.set_device(stream.device_index)
        sim.thread.streams[stream.device_index] = stream.stream_id
        if stream.stream_id:
            sim.races.watch()


def _accelerator_stream(device=None) -> Stream:
    stream = current_stream(device)
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index)


def join_streams() -> None:
    """The current stream of each GPU waits for all the others (before backward)."""
    sim = placement.current()
    clock = sim.clock
    for index, number in clock.keys():
        current = sim.thread.streams.get(index, 0)
        if number != current:
            mark = clock.mark(index, number)
            clock.stream_waits(index, current, mark)
            clock.forget(mark)


def replacements() -> list[tuple[object, str, object]]:
    """(owner, attribute, new value) for everything in this file."""
    return [
        (torch, "Stream", Stream),
        (torch, "Event", Event),
        *(
            (module, name, new)
            for module in (torch.cuda, torch.cuda.streams)
            for name, new in (("Stream", CudaStream), ("Event", CudaEvent))
        ),
        (torch.cuda, "current_stream", current_stream),
        (torch.cuda, "default_stream", default_stream),
        (torch.cuda, "set_stream", set_stream),
        (torch.accelerator, "current_stream", _accelerator_stream),
        (torch.accelerator, "set_stream", set_stream),
    ]
