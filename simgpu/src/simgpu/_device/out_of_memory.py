"""What PyTorch says when a GPU has no room."""

import os

import torch

from simgpu._compat import is_torch
from simgpu._device.sizes import show_bytes

FULL = "_simgpu_full"  # marks other errors that say so
_FRAGMENTED = (
    " If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
    "documentation for Memory Management  "
    "(https://docs.pytorch.org/docs/stable/notes/cuda.html"
    "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)
_EXPANDABLE = (
    " expandable_segments is enabled. If instead the process is running out of virtual "
    "address space (VSZ), expandable segments may be over-reserving VA (each segment "
    "reserves ~9/8 of device memory, times the number of streams); reduce it via "
    "PYTORCH_CUDA_ALLOC_CONF expandable_segments_reserve / "
    "expandable_segments_reserve_by_class."
)


def out_of_memory_of(error: BaseException | None) -> BaseException | None:
    """What said that a card is full, of an error that a program ended with.

    Args:
        error: itself, or what the program raised because of it.
    """
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError) or hasattr(error, FULL):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def refusal(memory, size: int, nbytes: int, stream: int, pool) -> Exception:
    """The error, counted and recorded.

    Args:
        memory: the allocator.
        size: of the block that found no room.
        nbytes: that the allocator asked CUDA for.
        stream: that was to use it.
        pool: that was to have it.
    """
    memory.counts["num_ooms"] += 1
    processes = memory.share.processes()
    free = memory.total - sum(processes.values())
    if memory.history.is_recording:
        frames = memory.history.frames()
        memory.history.note("oom", free, size, stream, frames, pool.id)
    for observer in memory.observers:
        observer(memory.index, nbytes, memory.allowed, free)
    return torch.OutOfMemoryError(words(memory, nbytes, processes))


def words(memory, nbytes: int, processes: dict[int, int]) -> str:
    """The message, in the words of c10/cuda/CUDACachingAllocator.cpp.

    Args:
        memory: the allocator.
        nbytes: of the segment that it asked for.
        processes: on the card -> bytes that each has, this one among them.
    """
    reserved = memory.both.reserved_bytes.current
    allocated = memory.both.allocated_bytes.current
    free = memory.total - sum(processes.values())
    cached = memory.private.free_bytes  # allocated, in these words
    private = (
        f"with {show_bytes(cached)} allocated in private pools (e.g., CUDA Graphs), "
    )
    users = "".join(
        f"{_name(pid)} has {show_bytes(used)} memory in use. "
        for pid, used in processes.items()
    )
    allowed = ""
    if memory.fraction is not None:
        most = int(memory.total * memory.fraction)
        allowed = f"{show_bytes(most)} allowed; "
    return (
        f"CUDA out of memory. Tried to allocate {show_bytes(nbytes)}. GPU "
        f"{memory.index} has a total capacity of {show_bytes(memory.total)} of which "
        f"{show_bytes(free)} is free. {users}{allowed}Of the allocated "
        f"memory {show_bytes(allocated + cached)} is allocated by PyTorch, "
        f"{private if cached else ''}and {show_bytes(reserved - allocated - cached)} "
        f"is reserved by PyTorch but unallocated."
        f"{_advice(memory.settings.expandable)}"
    )


def _advice(expandable: bool) -> str:
    """What to set, in the words of this PyTorch's version."""
    if not expandable or not is_torch((2, 14)):
        return _FRAGMENTED
    return _EXPANDABLE if is_torch((2, 15)) else ""


def _name(pid: int) -> str:
    if pid == os.getpid():
        return "Including non-PyTorch memory, this process"
    return f"Process {pid}"
