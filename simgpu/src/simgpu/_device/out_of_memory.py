"""What PyTorch says when a GPU has no room."""

import os

import torch

from simgpu._device.cards import show_bytes

FULL = "_simgpu_full"  # marks other errors that say so
_DOCS = (
    "https://docs.pytorch.org/docs/stable/notes/cuda.html"
    "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
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
        f"memory {show_bytes(allocated)} is allocated by PyTorch, and "
        f"{show_bytes(reserved - allocated)} is reserved by PyTorch but unallocated. "
        "If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  "
        f"See documentation for Memory Management  ({_DOCS})"
    )


def _name(pid: int) -> str:
    if pid == os.getpid():
        return "Including non-PyTorch memory, this process"
    return f"Process {pid}"
