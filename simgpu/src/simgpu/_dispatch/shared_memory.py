"""Marks of storages that several processes use, and who still holds which.

The sender's block stays allocated until every receiver has let go of it, as in
CudaIPCTypes.cpp of PyTorch: each sending has a byte, in memory that both processes map,
which is 1 until the receiver is done with it. What a storage leaves behind that dies
before that waits "in limbo".
"""

import contextlib
import os
from collections import deque
from multiprocessing import util
from typing import NamedTuple

import torch
from torch.storage import UntypedStorage

from simgpu import _runtime as state
from simgpu._compat import (
    DisableTorchDispatch,
    DisableTorchFunction,
    new_shared_filename,
)
from simgpu._device.blocks import Block
from simgpu._device.gpu import Gpu
from simgpu._dispatch.operation import handles
from simgpu._dispatch.operation_call import Call, run_on_common_gpu
from simgpu._dispatch.placement import DeviceMemory, PartMemory, memory_of
from simgpu._errors import NotSimulated
from simgpu._lines import write_line

_SLOTS = 10000  # sendings that one piece of counters has room for
_AFTER_CHILDREN = -100  # multiprocessing has joined them before it calls what has this
_PRODUCER_ENDED = (
    "[W CudaIPCTypes.cpp:16] Producer process has been terminated before all shared "
    "CUDA tensors released. See Note [Sharing CUDA tensors]"
)


class Slot:
    """One sending: a byte of the sender's counters that the receiver sets to 0."""

    __slots__ = ("counters", "index")

    def __init__(self, counters: UntypedStorage, index: int):
        self.counters, self.index = counters, index

    @property
    def held(self) -> bool:
        """Whether the receiver has not let go of it yet."""
        return self.counters[self.index] != 0

    def release(self) -> None:
        self.counters[self.index] = 0


class _InLimbo(NamedTuple):
    """What is left of `SentMemory` whose storage is dead."""

    gpu: Gpu
    block: Block
    slots: list[Slot]


class Sharing:
    """What this process has sent, and what it holds of others."""

    def __init__(self):
        self.pid = os.getpid()
        self.limbo: deque[_InLimbo] = deque()
        self.received: set[Slot] = set()  # that this process holds
        self.handles: set[tuple] = set()  # of its own counters
        self._handle: tuple = ()  # of those with room
        self._counters: list[UntypedStorage] = []  # the last one has room
        self._next = _SLOTS
        self._opened: dict[tuple, UntypedStorage] = {}  # counters of others
        self._ended = False
        util.Finalize(None, end_of_process, exitpriority=_AFTER_CHILDREN)

    def new_slot(self) -> tuple[Slot, tuple]:
        """For a sending, with the handle of its counters."""
        if self._next == _SLOTS:
            self._counters = [held for held in self._counters if any(held)]
            self._counters.append(UntypedStorage(_SLOTS).fill_(0))
            self._handle, self._next = share(self._counters[-1]), 0
            self.handles.add(self._handle)
        slot = Slot(self._counters[-1], self._next)
        slot.counters[slot.index] = 1
        self._next += 1
        return slot, self._handle

    def slot_of(self, handle: tuple, index: int) -> Slot:
        """A sending of another process."""
        if handle not in self._opened:
            self._opened[handle] = new_shared_filename(*handle)
        return Slot(self._opened[handle], index)

    def end(self) -> None:
        """The process ends: what it holds is free; what it has sent may be held."""
        if not self._ended and self.pid == os.getpid():
            self._ended = True
            for slot in list(self.received):
                slot.release()
            if any(any(counters) for counters in self._counters):
                write_line(_PRODUCER_ENDED)

    def collect(self) -> None:
        """Free what is dead here and that no receiver holds any more."""
        for _ in range(len(self.limbo)):
            with contextlib.suppress(IndexError):  # another thread collects, too
                left = self.limbo.popleft()
                if any(slot.held for slot in left.slots):
                    self.limbo.append(left)
                else:
                    left.gpu.memory.free(left.block)


def sharing() -> Sharing:
    """That of this process; a forked child's is not its parent's."""
    runtime = state.current()
    if runtime.sharing is None or runtime.sharing.pid != os.getpid():
        runtime.sharing = Sharing()
        for gpu in runtime.gpus:
            gpu.memory.before_new_segment = runtime.sharing.collect
    return runtime.sharing


def end_of_process() -> None:
    """Called once before this process ends, after its children have."""
    if state.running is not None and state.running.sharing is not None:
        state.running.sharing.end()


class SentMemory(DeviceMemory):
    """The mark of a storage that lies in memory which other processes can map."""

    __slots__ = ("sharing", "slots")

    def __init__(self, memory: DeviceMemory, sharing: Sharing):
        self.gpu, self.nbytes, self.block = memory.gpu, memory.nbytes, memory.block
        self.arriving, self.awaited = memory.arriving, memory.awaited
        self.sharing = sharing
        self.slots: list[Slot] = []
        memory.block = None  # it is this mark's now

    def resize(self, nbytes: int) -> None:
        raise NotSimulated("resizing a GPU tensor that was sent to another process")

    def __del__(self):
        if any(slot.held for slot in self.slots):
            self.sharing.limbo.append(_InLimbo(self.gpu, self.block, self.slots))
        elif self.block is not None:
            self.gpu.memory.free(self.block)
        self.sharing.collect()


class ReceivedMemory(DeviceMemory):
    """The mark of a storage whose memory another process has allocated."""

    __slots__ = ("sharing", "slot")

    def __init__(self, gpu: Gpu, nbytes: int, sharing: Sharing, slot: Slot):
        self.gpu, self.nbytes, self.block = gpu, nbytes, None
        self.arriving = self.awaited = None
        self.sharing, self.slot = sharing, slot
        sharing.received.add(slot)

    def resize(self, nbytes: int) -> None:
        raise RuntimeError("Trying to resize storage that is not resizable")

    def __del__(self):
        if self.sharing.pid == os.getpid():  # and not in a forked child
            self.slot.release()
            self.sharing.received.discard(self.slot)


def move_to_shared_memory(storage: UntypedStorage) -> SentMemory:
    """Let a storage on a GPU lie where other processes can map it."""
    memory = storage._simgpu
    if isinstance(memory, PartMemory) or getattr(storage, "_simgpu_sliced", False):
        raise NotSimulated("sending slices of a storage to another process")
    if memory.arriving is not None:
        memory.arriving.settle()  # it would write where the values were before
    if not isinstance(memory, SentMemory):
        memory = storage._simgpu = SentMemory(memory, sharing())
        share(storage)
    return memory


def share(storage: UntypedStorage) -> tuple:
    """Move a storage to shared memory, unless it is there; returns PyTorch's handle."""
    with DisableTorchDispatch(), DisableTorchFunction():
        return storage._share_filename_cpu_()


def check_size(memory: DeviceMemory | None, nbytes: int) -> None:
    """Refuse to change the size of memory that several processes map.

    Raises:
        RuntimeError: for what was received.
        NotSimulated: for what was sent.
    """
    if isinstance(memory, SentMemory | ReceivedMemory) and nbytes != memory.nbytes:
        memory.resize(nbytes)


@handles("resize_")
def resize_(call: Call):
    """`x.resize_(...)`: PyTorch's own code for shared memory would crash."""
    tensor, size = call.tensors[0], call.args[1]
    numel = tensor.storage_offset() + torch.Size(size).numel()
    memory = memory_of(tensor)
    if memory is not None and numel * tensor.element_size() > memory.nbytes:
        check_size(memory, numel * tensor.element_size())
    return run_on_common_gpu(call)
