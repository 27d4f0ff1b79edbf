"""`torch.cuda.Event` and `torch.Event`: positions in the work of a stream.

An event of another process is always over: what was recorded in it is done (see
`sharing.py`). Leaves out: events that
are nodes of a CUDA graph (`external=True`).
"""

import os

import torch

from simgpu import _runtime as state
from simgpu._cuda_errors import words_of_cuda
from simgpu._dispatch.named_devices import gpu_named
from simgpu._errors import NotSimulated
from simgpu._timing.events import StreamPosition

_HANDLE = 64  # bytes of a handle: sizeof(cudaIpcEventHandle_t)


class Event:
    """`torch.Event`: a position in the work of a stream.

    Args:
        device: a GPU; the event belongs to the GPU of the stream that records it first.
        enable_timing: whether `elapsed_time` may ask for it.
        blocking: whether waiting for it frees the processor (no difference here).
    """

    def __init__(self, device=None, *, enable_timing=False, blocking=False,
                 interprocess=False):  # fmt: skip
        if interprocess:
            raise NotSimulated("a torch.Event shared between processes")
        self._begin(enable_timing, blocking)

    def _begin(self, enable_timing, blocking) -> None:
        self.enable_timing, self.blocking = enable_timing, blocking
        self._position: StreamPosition | None = None
        self._index: int | None = None
        state.current().sanitizer.follow_events()

    @property
    def device(self) -> torch.device | None:
        return None if self._index is None else torch.device("cuda", self._index)

    @property
    def event_id(self) -> int:
        return 0 if self._position is None else id(self)

    cuda_event = event_id

    def record(self, stream=None) -> None:
        """Put it into a stream (the current one if none is given).

        Raises:
            RuntimeError: if it was recorded on another GPU before.
        """
        index, number = _stream_numbers(stream)
        clock = state.current().clock
        if self._position is not None and self._position.clock is not clock:
            self._position = self._index = None  # of GPUs that are gone
        if self._index not in (None, index):
            raise RuntimeError(
                f"Event device {self._index} does not match recording stream's device "
                f"{index}."
            )
        clock.event_call()
        if self._position is not None:
            clock.forget(self._position)
        self._index = index
        self._position = clock.record(index, number)

    def wait(self, stream=None) -> None:
        """What `stream` (or the current one) is given from now on waits for it."""
        if self._position is not None:
            index, number = _stream_numbers(stream)
            clock = state.current().clock
            clock.event_call()
            clock.stream_waits(index, number, self._position)

    def query(self) -> bool:
        """Whether the work before it is done; asking takes the host a moment."""
        clock = state.current().clock
        clock.forbid_waiting()
        clock.event_call()
        return self._position is None or clock.reached(self._position)

    def synchronize(self) -> None:
        """Make the host wait until the work before it is done."""
        if self._position is not None:
            clock = state.current().clock
            clock.forbid_waiting()
            clock.wait_for_position(self._position)

    def elapsed_time(self, end_event: "Event") -> float:
        """Simulated milliseconds from this event to `end_event`.

        Raises:
            ValueError: if one of them does not keep time or was not recorded.
            RuntimeError: if the GPU has not reached them yet.
            torch.AcceleratorError: if they are of two GPUs, in CUDA's words.
        """
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError(
                "Both events must be created with argument 'enable_timing=True'."
            )
        if self._position is None or end_event._position is None:
            raise ValueError(
                "Both events must be recorded before calculating elapsed time."
            )
        clock = state.current().clock
        if not (clock.reached(self._position) and clock.reached(end_event._position)):
            raise RuntimeError(
                "Both events must be completed before calculating elapsed time."
            )
        if self._index != end_event._index:
            raise torch.AcceleratorError(
                words_of_cuda(
                    "invalid resource handle", "cudaErrorInvalidResourceHandle"
                )
            )
        return clock.between(self._position, end_event._position) * 1e3

    def ipc_handle(self):
        raise NotSimulated("a torch.Event shared between processes")

    @classmethod
    def from_ipc_handle(cls, device, handle):
        raise NotSimulated("a torch.Event shared between processes")

    def __del__(self):
        if getattr(self, "_position", None) is not None:
            self._position.clock.forget(self._position)

    def __repr__(self):
        return f"torch.Event device={self.device}, event_id={self.event_id:#x}"


class CudaEvent(Event):
    """`torch.cuda.Event`."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False,
                 external=False):  # fmt: skip
        if external:
            raise NotSimulated("an event with external=True, for CUDA graphs")
        if interprocess and enable_timing:
            raise torch.AcceleratorError("CUDA error: invalid argument")
        self._interprocess = interprocess
        self._begin(enable_timing, blocking)

    def ipc_handle(self) -> bytes:
        """Names it for other processes; an event that has no GPU gets the current one.

        Raises:
            torch.AcceleratorError: if it was not made with `interprocess=True`.
        """
        if not self._interprocess:
            raise torch.AcceleratorError("CUDA error: invalid resource handle")
        if self._index is None:
            self._index = gpu_named().index
        return f"{os.getpid()} {id(self)}".encode().ljust(_HANDLE, b"\0")

    @classmethod
    def from_ipc_handle(cls, device, handle: bytes) -> "CudaEvent":
        """The event of another process; what that one has recorded is done.

        Raises:
            torch.AcceleratorError: in the process that has made it.
        """
        if len(handle) != _HANDLE:
            raise TypeError(
                f"cudaIpcEventHandle_t expects byte-like object of size {_HANDLE}"
            )
        if int(handle.split()[0]) == os.getpid():
            raise torch.AcceleratorError("CUDA error: invalid device context")
        event = cls(interprocess=True)
        event._index = gpu_named(device).index
        return event

    def __repr__(self):
        if self._position is None:
            return "<torch.cuda.Event uninitialized>"
        return f"<torch.cuda.Event {self.event_id:#x}>"


def _stream_numbers(stream) -> tuple[int, int]:
    """(GPU, number) of a stream; None is the current one."""
    if stream is not None:
        return stream.device_index, stream.stream_id
    gpu = gpu_named()
    return gpu.index, state.current().stream_of(gpu)
