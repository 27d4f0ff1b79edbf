"""`torch.cuda.Stream` and `torch.Stream`, and which stream is current.

Models: the current and the default stream of each GPU, and who waits for whom. As in
PyTorch, a new stream comes from a pool of 32 for each GPU and priority, and does not
wait for the default stream by itself. `cudart().cudaStreamCreate` makes others
(`cudart.py`). Leaves out: what a priority does, and streams of other libraries.
"""

import ctypes

import torch

from simgpu import _runtime as state
from simgpu._api.backward_streams import note_streams
from simgpu._api.cuda_events import CudaEvent, Event
from simgpu._compat import get_device_index
from simgpu._device.blocks import stream_handle
from simgpu._dispatch.named_devices import find_gpu, gpu_named
from simgpu._errors import NotSimulated

FIRST_EXTERNAL = 200  # number of the first stream that is not of a pool
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

    _event_class = Event

    def __new__(cls, device=None, priority=0, *, stream_id=None, device_index=None,
                device_type=_CUDA, **kwargs):  # fmt: skip
        if kwargs:
            raise NotSimulated(f"a stream with {', '.join(kwargs)}")
        runtime = state.current()
        self = object.__new__(cls)
        if device_index is not None:  # an existing one, by its numbers
            gpu = find_gpu(device_index)
            self._become(gpu, stream_id or 0)
            return self
        gpu = gpu_named(device)
        priority = min(max(priority, PRIORITIES[1]), PRIORITIES[0])
        gpu.memory.share.open_context()
        number = next(gpu.stream_counts[priority]) % POOL  # one step for all threads
        self._become(gpu, 1 + number - priority * POOL)
        runtime.sanitizer.watch_accesses()
        return self

    def _become(self, gpu, number: int) -> None:
        self._gpu = gpu
        self.stream_id = number
        self.device_index = gpu.index
        self.device_type = _CUDA
        self.device = gpu.device

    @property
    def priority(self) -> int:
        if self.stream_id == 0 or self.stream_id >= FIRST_EXTERNAL:
            return 0
        return -((self.stream_id - 1) // POOL)

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
        runtime = state.current()
        runtime.clock.forbid_waiting_for(self.device_index, self.stream_id)
        runtime.clock.event_call()
        done = runtime.clock.stream_done(self.device_index, self.stream_id)
        if done:
            runtime.sanitizer.host_waited([(self.device_index, self.stream_id)])
        return done

    def synchronize(self) -> None:
        """Make the host wait until its work is done."""
        clock = state.current().clock
        clock.forbid_waiting_for(self.device_index, self.stream_id)
        clock.wait_for_stream(self.device_index, self.stream_id)

    def wait_event(self, event: Event) -> None:
        """What it is given from now on waits for the event."""
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:
        """What it is given from now on waits for what `stream` was given before."""
        clock = state.current().clock
        clock.event_call()
        clock.event_call()
        position = clock.record(stream.device_index, stream.stream_id)
        clock.stream_waits(self.device_index, self.stream_id, position)
        clock.forget(position)

    def record_event(self, event: Event | None = None) -> Event:
        """Put an event into it; a new one if none is given."""
        event = self._event_class() if event is None else event
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        """Whether what it is given goes into a CUDA graph."""
        key = self.device_index, self.stream_id
        return key in getattr(state.current().clock, "captures", ())

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

    _event_class = CudaEvent

    def __eq__(self, other):
        return isinstance(other, CudaStream) and super().__eq__(other)

    __hash__ = Stream.__hash__

    def __repr__(self):
        return (
            f"<torch.cuda.Stream device={self.device} "
            f"cuda_stream={self.cuda_stream:#x}>"
        )


class ExternalStream(CudaStream):
    """`torch.cuda.ExternalStream`: a stream by the handle that CUDA knows it by.

    Raises:
        NotSimulated: for a handle that neither `Stream.cuda_stream` nor
            `cudart().cudaStreamCreate` has given out for this GPU.
    """

    def __new__(cls, stream_ptr, device=None, **kwargs):
        gpu = gpu_named(device)
        number = number_of_handle(gpu.index, stream_ptr)
        return super().__new__(cls, stream_id=number, device_index=gpu.index, **kwargs)

    def __init__(self, *args, **kwargs):
        pass


def number_of_handle(index: int, handle: int) -> int:
    """The stream of a GPU that has this handle.

    Raises:
        NotSimulated: if none has.
    """
    number = max(handle - stream_handle(index, 1), -16) // 16 + 1 if handle else 0
    if stream_handle(index, number) != handle or number >= 4096:
        raise NotSimulated(f"a stream of another library (handle {handle:#x})")
    return number


# -- which stream is current -----------------------------------------------------------


def _stream(number: int, device, kind=CudaStream) -> Stream:
    return kind(stream_id=number, device_index=device)


def current_stream(device=None) -> CudaStream:
    """The stream on which this thread's work for a GPU runs."""
    index = _index(device)
    return _stream(state.current().thread.streams.get(index, 0), index)


def default_stream(device=None) -> CudaStream:
    """The stream on which a GPU works if nobody says otherwise."""
    return _stream(0, _index(device))


def _index(device) -> int:
    """The GPU that `device` names, for calls that look for a stream of it."""
    index = get_device_index(device, optional=True)
    count = state.current().fix_visible()
    if index >= count:
        raise RuntimeError(
            f"Device index value {index} is out of index range [0, {count})"
        )
    return gpu_named(index).index


def set_stream(stream: Stream | None) -> None:
    """From now on this thread's work for the stream's GPU runs on it.

    The stream's GPU becomes the current one.
    """
    if stream is not None:
        runtime = state.current()
        torch.cuda.set_device(stream.device_index)
        runtime.thread.streams[stream.device_index] = stream.stream_id
        note_streams()
        if stream.stream_id:
            runtime.sanitizer.watch_accesses()


def accelerator_stream(device=None) -> Stream:
    stream = current_stream(device)
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index)
