"""`torch.cuda.memory`: PyTorch's own functions stay, C++'s below them are answered."""

import sys

import torch
import torch.accelerator.memory

from simgpu import _runtime as state
from simgpu._api import allocator_settings
from simgpu._api.devices import device_count
from simgpu._api.patch import Patch, patches
from simgpu._api.refused import refuse
from simgpu._api.streams import number_of_handle
from simgpu._compat import torch_C
from simgpu._device.allocator import CachingAllocator
from simgpu._device.blocks import DEFAULT_POOL
from simgpu._device.history import CONTEXTS
from simgpu._device.host_memory import HostMemory
from simgpu._dispatch.named_devices import current_gpu, gpu_named
from simgpu._errors import NotSimulated


def allocator_of(index: int) -> CachingAllocator:
    """That of a GPU by its number, as C++ checks it."""
    if not 0 <= index < device_count():
        raise RuntimeError(f"Invalid device argument {index}: did you call init?")
    return gpu_named(index).memory


def _pinned() -> HostMemory:
    return state.current().host_memory


def _set_memory_fraction(fraction: float, index: int) -> None:
    allocator_settings.set_fraction([allocator_of(index)], fraction)


def _get_memory_fraction(index: int) -> float:
    fraction = allocator_of(index).fraction
    return 1.0 if fraction is None else fraction


def _empty_cache(pool: tuple[int, int] = DEFAULT_POOL) -> None:
    for gpu in state.current().gpus:
        gpu.memory.empty_cache(tuple(pool))


def mem_get_info(device=None) -> tuple[int, int]:
    """Bytes of the card that are free, and that there are."""
    share = gpu_named(device).memory.share
    share.open_context()
    return share.free, share.total


def _record_memory_history(enabled="all", context="all", stacks="all",
                           max_entries=sys.maxsize, clear_history=False,
                           compile_context=False, annotations=False,
                           skip_actions=(), of_pinned_memory=False,
                           of_gpus=True) -> None:  # fmt: skip
    if of_pinned_memory:  # the last two are new in 2.15
        raise NotSimulated("a history of pinned memory")
    if enabled not in (None, "state", "all"):
        raise RuntimeError("expected state to be 'state', 'all', or None")
    if context not in CONTEXTS:
        raise RuntimeError("expected context to be 'state', 'alloc', 'all', or None")
    if stacks not in ("python", "all"):
        raise RuntimeError("expected stacks to be 'python', or 'all'")
    state.current().initialize()
    most = 1 if enabled == "state" else max_entries
    if enabled is None or not of_gpus:
        most = None
    for gpu in state.current().gpus:
        if clear_history:
            gpu.memory.history.record(None, None)
        gpu.memory.history.record(most, context, skip_actions or ())


def _record_memory_history_legacy(enabled, *args) -> None:
    _record_memory_history("all" if enabled else None)


def memory_snapshot(pool=None) -> dict:
    """What `torch.cuda.memory._snapshot` returns.

    Args:
        pool: the two numbers of a private pool, if its segments alone are wanted; in
            newer versions also whether the events are.
    """
    only = DEFAULT_POOL if pool is None else tuple(pool[:2])
    with_events = pool is None or len(pool) < 3 or pool[2]
    histories = [gpu.memory.history for gpu in state.current().gpus]
    traces = [list(with_events and history.events or ()) for history in histories]
    return {
        "segments": [part for history in histories for part in history.snapshot(only)],
        "device_traces": traces,
        "allocator_settings": state.current().settings.as_dict(),
        "external_annotations": [],
    }  # fmt: skip


# -- memory that the program asks for by itself ----------------------------------------


def _raw_alloc(nbytes: int, handle: int) -> int:
    """The address of a new block of the current GPU, for a stream by its handle."""
    gpu = current_gpu()
    block = gpu.memory.malloc(nbytes, number_of_handle(gpu.index, handle))
    if block is None:
        return 0
    state.current().raw_blocks[block.address] = (gpu, block)
    return block.address


def _raw_delete(address: int) -> None:
    if not address:
        return
    if address not in state.current().raw_blocks:
        raise RuntimeError(f"invalid device pointer: {address:#x}")
    gpu, block = state.current().raw_blocks.pop(address)
    gpu.memory.free(block)


def _enable_caching(value: bool) -> None:
    if not value:
        raise NotSimulated("torch.cuda.caching_allocator_enable(False)")


def _set_metadata(text: str) -> None:
    for gpu in state.current().gpus:
        gpu.memory.history.metadata = text


def _attach_observer(observer) -> None:
    """Call `observer(GPU, bytes, bytes allowed, bytes free)` before an error.

    The bytes are those of the segment that CUDA was asked for.
    """
    for gpu in state.current().gpus:
        gpu.memory.observers.append(observer)


C_FUNCTIONS = {
    "_cuda_memoryStats": lambda index: allocator_of(index).stats(),
    "_cuda_resetPeakMemoryStats": lambda index: allocator_of(index).reset_peaks(),
    "_cuda_resetAccumulatedMemoryStats": lambda index: allocator_of(index).reset_sums(),
    "_cuda_emptyCache": _empty_cache,
    "_cuda_setMemoryFraction": _set_memory_fraction,
    "_cuda_getMemoryFraction": _get_memory_fraction,
    "_cuda_memorySnapshot": memory_snapshot,
    "_cuda_record_memory_history": _record_memory_history,
    "_cuda_record_memory_history_legacy": _record_memory_history_legacy,
    "_cuda_getAllocatorBackend": lambda: "native",
    "_cuda_isHistoryEnabled": lambda: current_gpu().memory.history.is_recording,
    "_cuda_setMemoryMetadata": _set_metadata,
    "_cuda_getMemoryMetadata": lambda: current_gpu().memory.history.metadata,
    "_cuda_attach_out_of_memory_observer": _attach_observer,
    "_cuda_cudaCachingAllocator_raw_alloc": _raw_alloc,
    "_cuda_cudaCachingAllocator_raw_delete": _raw_delete,
    "_cuda_cudaCachingAllocator_enable": _enable_caching,
    "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
    "_cuda_hostMemoryStats": lambda: _pinned().stats(),
    "_cuda_resetPeakHostMemoryStats": lambda: _pinned().reset_peaks(),
    "_cuda_resetAccumulatedHostMemoryStats": lambda: _pinned().reset_sums(),
    "_host_emptyCache": lambda: _pinned().empty_cache(),
    "_accelerator_emptyHostCache": lambda: _pinned().empty_cache(),
    "_cuda_cudaHostAllocator": refuse("torch.cuda.memory._host_allocator"),
    "_accelerator_setAllocatorSettings": allocator_settings.apply,
    "_accelerator_isAllocatorInitialized": lambda: True,
    "_accelerator_getDeviceStats": lambda index: allocator_of(index).stats(),
    "_accelerator_resetPeakStats": lambda index: allocator_of(index).reset_peaks(),
    "_accelerator_resetAccumulatedStats": lambda i: allocator_of(i).reset_sums(),
    "_accelerator_emptyCache": _empty_cache,
    "_accelerator_getMemoryInfo": mem_get_info,
}


def rows() -> list[Patch]:
    """Their part of the table of replacements."""
    why = "memory is counted"
    return [
        *patches(torch.cuda, why, mem_get_info=mem_get_info),
        *patches(torch.cuda.memory, why, mem_get_info=mem_get_info),
        *patches(torch.accelerator.memory, why, get_memory_info=mem_get_info),
        *patches(torch_C, why, **C_FUNCTIONS),
    ]


# what they are asked by, and so stays as it is
KEPT = {
    "empty_cache", "memory_stats", "memory_stats_as_nested_dict", "memory_allocated",
    "max_memory_allocated", "memory_reserved", "max_memory_reserved",
    "memory_cached", "max_memory_cached", "memory_snapshot", "memory_summary",
    "reset_accumulated_memory_stats", "reset_peak_memory_stats",
    "reset_max_memory_allocated", "reset_max_memory_cached",
    "set_per_process_memory_fraction", "get_per_process_memory_fraction",
    "get_allocator_backend", "host_memory_stats", "host_memory_stats_as_nested_dict",
    "reset_accumulated_host_memory_stats", "reset_peak_host_memory_stats",
    "empty_host_cache", "caching_allocator_alloc", "caching_allocator_delete",
    "caching_allocator_enable", "caching_allocator_disabled", "use_mem_pool",
    "graph_pool_handle",
}  # fmt: skip
