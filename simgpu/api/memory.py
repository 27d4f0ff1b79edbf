"""`torch.cuda.memory`: PyTorch's own functions stay, C++'s below them are answered."""

import sys

from simgpu import runtime
from simgpu.api.devices import device_count
from simgpu.api.refused import refuse
from simgpu.device.allocator import CachingAllocator
from simgpu.device.history import CONTEXTS
from simgpu.dispatch.devices import gpu_named
from simgpu.errors import NotSimulated


def _memory(index: int) -> CachingAllocator:
    if not 0 <= index < device_count():
        raise RuntimeError(f"Invalid device argument {index}: did you call init?")
    return gpu_named(index).memory


def _set_memory_fraction(fraction: float, index: int) -> None:
    _memory(index).fraction = fraction


def _get_memory_fraction(index: int) -> float:
    memory = _memory(index)
    return memory.limit / memory.total


def _empty_cache(*args) -> None:
    for gpu in runtime.current().gpus:
        gpu.memory.empty_cache()


def mem_get_info(device=None) -> tuple[int, int]:
    """Bytes of the card that are free, and that there are."""
    memory = gpu_named(device).memory
    return memory.free_on_card, memory.total


def _record_memory_history(enabled="all", context="all", stacks="all",
                           max_entries=sys.maxsize, clear_history=False,
                           compile_context=False, annotations=False,
                           skip_actions=()) -> None:  # fmt: skip
    if enabled not in (None, "state", "all"):
        raise RuntimeError("expected state to be 'state', 'all', or None")
    if context not in CONTEXTS:
        raise RuntimeError("expected context to be 'state', 'alloc', 'all', or None")
    if stacks not in ("python", "all"):
        raise RuntimeError("expected stacks to be 'python', or 'all'")
    if skip_actions:
        raise NotSimulated("skip_actions of torch.cuda.memory._record_memory_history")
    runtime.current().initialize()
    most = None if enabled is None else 1 if enabled == "state" else max_entries
    for gpu in runtime.current().gpus:
        if clear_history:
            gpu.memory.history.record(None, None)
        gpu.memory.history.record(most, context)


def _record_memory_history_legacy(enabled, *args) -> None:
    _record_memory_history("all" if enabled else None)


def _memory_snapshot(pool=None) -> dict:
    """What `torch.cuda.memory._snapshot` returns."""
    if pool is not None and tuple(pool[:2]) != (0, 0):
        raise NotSimulated("a snapshot of a memory pool")
    memories = [gpu.memory for gpu in runtime.current().gpus]
    traces = [list(memory.history.events or ()) for memory in memories]
    return {
        "segments": [part for memory in memories for part in memory.history.snapshot()],
        "device_traces": traces,
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1,
            "garbage_collection_threshold": 0.0, "expandable_segments": False,
            "pinned_num_register_threads": 1, "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False, "roundup_power2_divisions": {},
        },
        "external_annotations": [],
    }  # fmt: skip


C_FUNCTIONS = {
    "_cuda_memoryStats": lambda index: _memory(index).stats(),
    "_cuda_resetPeakMemoryStats": lambda index: _memory(index).reset_peaks(),
    "_cuda_resetAccumulatedMemoryStats": lambda index: _memory(index).reset_sums(),
    "_cuda_emptyCache": _empty_cache,
    "_cuda_setMemoryFraction": _set_memory_fraction,
    "_cuda_getMemoryFraction": _get_memory_fraction,
    "_cuda_memorySnapshot": _memory_snapshot,
    "_cuda_record_memory_history": _record_memory_history,
    "_cuda_record_memory_history_legacy": _record_memory_history_legacy,
    "_cuda_getAllocatorBackend": lambda: "native",
    "_cuda_setMemoryMetadata": refuse("torch.cuda.memory._set_memory_metadata"),
    "_cuda_getMemoryMetadata": refuse("torch.cuda.memory._get_memory_metadata"),
    "_cuda_cudaHostAllocator": refuse("torch.cuda.memory._host_allocator"),
    "_accelerator_setAllocatorSettings": refuse("changing the allocator's settings"),
    "_accelerator_isAllocatorInitialized": lambda: True,
    "_accelerator_getDeviceStats": lambda index: _memory(index).stats(),
    "_accelerator_resetPeakStats": lambda index: _memory(index).reset_peaks(),
    "_accelerator_resetAccumulatedStats": lambda index: _memory(index).reset_sums(),
    "_accelerator_emptyCache": _empty_cache,
    "_accelerator_getMemoryInfo": mem_get_info,
}
# what they are asked by, and so stays as it is
KEPT = {
    "empty_cache", "memory_stats", "memory_stats_as_nested_dict", "memory_allocated",
    "max_memory_allocated", "memory_reserved", "max_memory_reserved",
    "memory_cached", "max_memory_cached", "memory_snapshot", "memory_summary",
    "reset_accumulated_memory_stats", "reset_peak_memory_stats",
    "reset_max_memory_allocated", "reset_max_memory_cached",
    "set_per_process_memory_fraction", "get_per_process_memory_fraction",
    "get_allocator_backend",
}  # fmt: skip
