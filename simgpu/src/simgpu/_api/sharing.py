"""GPU tensors that several processes use: what CUDA's handles to memory do.

The sender's storage moves to shared memory of the host, which the receiver maps; so
what one of them writes, the other reads. As on a real machine,

* the receiver's allocator counts nothing for it, and does not send it on; its context
  takes its place on the card;
* the number of the GPU travels and not the card, so CUDA_VISIBLE_DEVICES should be the
  same on both sides;
* an event that another process has recorded can be waited for.

Leaves out: an order in time. Each process has a clock of its own, and what another one
has sent or recorded is done at once; only the host's time for a handle is counted.
"""

from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler

import torch
from torch.multiprocessing import reductions
from torch.storage import UntypedStorage

from simgpu import _runtime as state
from simgpu._api.cuda_events import CudaEvent
from simgpu._compat import new_shared_filename, raw_share_cuda, tree_leaves
from simgpu._dispatch.named_devices import find_gpu
from simgpu._dispatch.placement import memory_of, memory_of_storage, storage_of
from simgpu._dispatch.shared_memory import (
    ReceivedMemory,
    move_to_shared_memory,
    share,
    sharing,
)
from simgpu._errors import NotSimulated
from simgpu._timing import cost

_SENT_ON = (
    "Attempted to send CUDA tensor received from another process; this is not "
    "currently supported. Consider cloning before sending."
)
_ADVICE = "A spawned process has simulated GPUs only under python -m simgpu."
_raw_put = Queue.put


def rebuild_event(device: torch.device, handle: bytes) -> torch.cuda.Event:
    """An event that another process has sent."""
    return torch.cuda.Event.from_ipc_handle(device, handle)


def reduce_event(event: CudaEvent) -> tuple:
    """How `pickle` sends an event; PyTorch's own function has changed its name."""
    return rebuild_event, (event.device, event.ipc_handle())


ForkingPickler.register(CudaEvent, reduce_event)


def share_cuda(storage) -> tuple:
    """`UntypedStorage._share_cuda_`: what a receiver needs.

    Returns:
        The number of the GPU, the handle of the memory, its bytes, where it begins; the
        handle of the counters, and which of them; an event, and whether to wait for it.

    Raises:
        RuntimeError: for what was received, and in a forked child.
        NotSimulated: where spawned processes have no GPUs: after `simgpu.start()`.
    """
    memory = memory_of_storage(storage)
    if memory is None:
        return raw_share_cuda(storage)
    runtime = state.current()
    if runtime.forked:
        raise torch.AcceleratorError("CUDA error: initialization error")
    if isinstance(memory, ReceivedMemory):
        raise RuntimeError(_SENT_ON)
    if runtime.for_children is None:  # it would wait for ever in a process without GPUs
        raise NotSimulated("sharing a GPU tensor between processes", _ADVICE)
    if memory.nbytes == 0:
        return memory.gpu.index, None, 0, 0, b"", 0, b"", False
    memory = move_to_shared_memory(storage)
    handle = share(storage)
    storage._shared_incref()  # for the receiver, who may be late
    slot, counters = sharing().new_slot()
    memory.slots = [held for held in memory.slots if held.held]
    memory.slots.append(slot)
    runtime.clock.event_call()
    place = (counters, handle), slot.index
    return memory.gpu.index, handle, memory.nbytes, 0, *place, b"", False


def new_shared_cuda(
    device: int, handle: tuple, nbytes: int, offset: int, counters: tuple, index: int,
    *event,
) -> UntypedStorage:  # fmt: skip
    """`UntypedStorage._new_shared_cuda`: a storage over the sender's memory.

    Raises:
        torch.AcceleratorError: in the process that has sent it; if that one has ended;
            for a number of a GPU that is not here.
    """
    gpu, runtime = find_gpu(device), state.current()
    if counters[0] in sharing().handles:
        raise torch.AcceleratorError("CUDA error: invalid device context")
    try:
        slot = sharing().slot_of(counters[0], index)
        storage = new_shared_filename(*handle)
    except RuntimeError as error:
        raise torch.AcceleratorError(
            "CUDA error: invalid resource handle (the process that has sent the "
            "tensor has ended)"
        ) from error
    gpu.memory.share.open_context()
    storage._shared_decref()
    storage._simgpu = ReceivedMemory(gpu, nbytes, sharing(), slot)
    runtime.clock.busy(cost.OPEN_HANDLE, "open a handle")
    return storage


def release_ipc_counter(counters: tuple, index: int) -> None:
    """`UntypedStorage._release_ipc_counter_cuda`: the storage was here already."""
    sharing().slot_of(counters[0], index).release()
    storage = reductions.storage_from_cache(UntypedStorage, (counters[1], 0))
    if storage is not None:
        storage._shared_decref()


def ipc_collect() -> None:
    """`torch.cuda.ipc_collect`: free what receivers have let go of."""
    if state.current().sharing is not None:
        state.current().sharing.collect()


def put(queue, obj, *args, **kwargs) -> None:
    """`Queue.put`: another thread pickles it later, while the program goes on to write.

    So tensors move to shared memory here, where nobody writes to them.
    """
    if state.running is not None and not state.running.forked:
        for value in tree_leaves(obj):
            if isinstance(value, torch.nn.Module):
                for tensor in (*value.parameters(), *value.buffers()):
                    _prepare(tensor)
            elif isinstance(value, torch.Tensor):
                _prepare(value)
    _raw_put(queue, obj, *args, **kwargs)


def _prepare(tensor: torch.Tensor) -> None:
    memory = memory_of(tensor)
    sendable = tensor.is_leaf or not tensor.requires_grad
    if memory is None or not memory.nbytes or not sendable:
        return
    if tensor.layout is torch.strided and not isinstance(memory, ReceivedMemory):
        move_to_shared_memory(storage_of(tensor))
