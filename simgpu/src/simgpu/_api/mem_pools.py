"""`torch.cuda.MemPool`, `use_mem_pool`, `graph_pool_handle`: C++'s part below them.

A class stands for C++'s, below PyTorch's own in Python; its functions stay, and what
they call is answered by the allocators' private pools (`_device/private_pools.py`). As
on a card, a pool takes what the thread allocates that has entered it, and not what a
backward pass does, which runs in threads of its own there. Leaves out, and refuses:
`use_on_oom`, `no_split`, an allocator of one's own.
"""

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.cuda.graphs

from simgpu import _runtime as state
from simgpu._api.memory import allocator_of
from simgpu._api.patch import Patch, patches
from simgpu._api.rebased import rebased
from simgpu._compat import current_graph_task_id, torch_C
from simgpu._device.gpu import Gpu
from simgpu._device.private_pools import PoolId, new_pool_id
from simgpu._dispatch.named_devices import current_gpu
from simgpu._errors import NotSimulated

_REFUSED = {
    "allocator": "Only a GPU has its libraries; MemPool() takes PyTorch's memory.",
    "use_on_oom": "MemPool() keeps its memory to itself, also where the GPU is full.",
    "no_split": "MemPool() splits its segments as all others are split.",
}


class CppMemPool:
    """`torch._C._MemPool`: a pool of the GPU that is current, released when it dies.

    Args:
        allocator: where its memory comes from, if not from the GPU.
        is_user_created: whether a program makes it, and not the capture of a graph.
        use_on_oom: whether others may have its memory when the GPU is full.
        no_split: whether its segments stay whole.

    Raises:
        NotSimulated: for what pools of the model do not have.
    """

    _gpus: tuple[Gpu, ...] = ()  # should `__init__` refuse, nothing is to be released

    def __init__(self, allocator=None, is_user_created: bool = True,
                 use_on_oom: bool = False, no_split: bool = False):  # fmt: skip
        given = {"allocator": allocator, "use_on_oom": use_on_oom, "no_split": no_split}
        for name, value in given.items():
            if value:
                call = f"torch.cuda.MemPool({name}=...)"
                raise NotSimulated(call, _REFUSED[name])
        self._gpu = current_gpu()
        self._id = new_pool_id(is_user_created)
        self._gpu.memory.private.create(self._id)
        self._process = os.getpid()
        # others have such a pool once something allocates to it there
        self._gpus = tuple(state.current().gpus)

    @property
    def id(self) -> PoolId:
        """What it is called by."""
        return self._id

    @property
    def device(self) -> int:
        """The number of its GPU."""
        return self._gpu.index

    def use_count(self) -> int:
        """How many need it on its GPU: itself, and what allocates to it."""
        return self._gpu.memory.private.use_count(self._id)

    def __del__(self):
        if not self._gpus or self._process != os.getpid():
            return  # a forked child has its parent's objects, and none of its GPUs
        for gpu in self._gpus:
            gpu.memory.private.retire(self._id, held=gpu is self._gpu)


MemPool: Any = rebased(torch.cuda.MemPool, CppMemPool)


# -- what allocates to a pool ----------------------------------------------------------


def _allocating_thread() -> tuple[int, bool]:
    """Which thread a card's program would allocate in: a backward pass has others."""
    in_backward = current_graph_task_id() != -1
    own = in_backward and torch.autograd.is_multithreading_enabled()
    return threading.get_ident(), own


def _begin_in_thread(index: int, pool: PoolId) -> None:
    thread = _allocating_thread()
    _begin(index, pool, lambda stream: _allocating_thread() == thread)


def _begin_in_stream(index: int, pool: PoolId) -> None:
    current = state.current().stream_of(state.current().gpus[index])
    _begin(index, pool, lambda stream: stream == current)


def _begin_everywhere(index: int, pool: PoolId) -> None:
    _begin(index, pool, lambda stream: True)


def _begin(index: int, pool: PoolId, wanted: Callable[[int], bool]) -> None:
    allocator_of(index).private.begin(tuple(pool), wanted, captures=False)


def _end(index: int, pool: PoolId) -> None:
    allocator_of(index).private.end(tuple(pool))


def _release(index: int, pool: PoolId) -> None:
    allocator_of(index).private.release(tuple(pool))


_FUNCTIONS = {  # `torch.cuda.memory` has its own names for these
    "_cuda_beginAllocateCurrentThreadToPool": _begin_in_thread,
    "_cuda_beginAllocateToPool": _begin_everywhere,
    "_cuda_endAllocateToPool": _end,
    "_cuda_releasePool": _release,
}


def rows() -> list[Patch]:
    """Their part of the table of replacements."""
    why = "the allocator is simulated"
    handle = {"_graph_pool_handle": lambda: new_pool_id(user=True)}
    return [
        *patches(torch.cuda, why, MemPool=MemPool),
        *patches(torch.cuda.memory, why, MemPool=MemPool, **_FUNCTIONS),
        *patches(torch.cuda.graphs, why, **handle),
        *patches(torch_C, why, _MemPool=CppMemPool, **_FUNCTIONS, **handle,
                 _cuda_beginAllocateCurrentStreamToPool=_begin_in_stream),
    ]  # fmt: skip
