"""What `torch.cuda` and `torch.accelerator` say while GPUs are simulated.

Models: counting, naming and choosing devices, random numbers, memory, waiting; streams
and events are in `streams.py`. Leaves out: graphs, memory pools and other allocators,
NVML's sensors, sharing between processes. Whatever `torch.cuda` offers and this file
does not answer raises `NotSimulated`.
`replacements()` is this file's part of the table that `start()` applies.
"""

import os
import re
import sys
import uuid
from dataclasses import dataclass

import torch
import torch.accelerator.memory
import torch.cuda.nccl
import torch.cuda.nvtx
import torch.utils.dlpack
from torch.cuda._utils import _get_device_index

from helpers.simgpu import placement
from helpers.simgpu.memory import CONTEXTS, Memory
from helpers.simgpu.placement import NotSimulated, gpu_of

_raw_generator = torch._C.Generator


def _gpu(device=None) -> placement.Gpu:
    """The GPU that `device` names; None is the current one.

    Raises:
        ValueError: if it is not a CUDA device.
    """
    return placement.gpu_named(device)


def _known_gpu(device=None) -> placement.Gpu:
    """The same for calls that check the index themselves."""
    index = _get_device_index(device, optional=True)
    if not 0 <= index < device_count():
        raise AssertionError("Invalid device id")
    return _gpu(index)


# -- which GPUs there are ------------------------------------------------------------


def is_available() -> bool:
    """Fixes which GPUs are visible, without initialising CUDA."""
    return placement.current().see() > 0


def device_count() -> int:
    return placement.current().count()


def current_device() -> int:
    return placement.current().find(torch.device("cuda")).index


def set_device(device) -> None:
    _exchange_device(_get_device_index(device))


def _exchange_device(index: int) -> int:
    """Make `index` the current GPU (none if negative); returns the one before."""
    if index < 0:
        return -1
    before = current_device()
    thread = placement.current().thread
    thread.current = _gpu(index).index
    thread.chosen_in = torch._C._current_autograd_node()
    return before


def get_device_name(device=None) -> str:
    return get_device_properties(device).name


def get_device_capability(device=None) -> tuple[int, int]:
    return _known_gpu(device).card.capability


@dataclass(frozen=True)
class DeviceProperties:
    """The properties that can be known of a simulated GPU."""

    name: str
    major: int
    minor: int
    total_memory: int  # bytes
    multi_processor_count: int
    uuid: uuid.UUID
    pci_bus_id: int
    L2_cache_size: int  # bytes
    warp_size: int = 32
    is_integrated: int = 0
    is_multi_gpu_board: int = 0

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, "
            f"minor={self.minor}, total_memory={self.total_memory // 2**20}MB, "
            f"multi_processor_count={self.multi_processor_count}, uuid={self.uuid}, "
            f"pci_bus_id={self.pci_bus_id}, "
            f"L2_cache_size={self.L2_cache_size // 2**20}MB)"
        )


def get_device_properties(device=None) -> DeviceProperties:
    gpu = _known_gpu(device)
    return DeviceProperties(
        name=f"{gpu.card.name} (simulated)",
        major=gpu.card.capability[0],
        minor=gpu.card.capability[1],
        total_memory=gpu.memory.total,
        multi_processor_count=gpu.card.multi_processors,
        uuid=uuid.UUID(int=gpu.ordinal),
        pci_bus_id=gpu.ordinal,
        L2_cache_size=gpu.card.l2_cache,
    )


def can_device_access_peer(device, peer_device) -> bool:
    a, b = _known_gpu(device), _known_gpu(peer_device)
    return a is not b


def get_arch_list() -> list[str]:
    cards = {gpu.card.capability for gpu in placement.current().gpus}
    return [f"sm_{major}{minor}" for major, minor in sorted(cards)]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return including_emulation or _gpu().card.capability >= (8, 0)


def synchronize(device=None) -> None:
    placement.current().clock.wait_for_gpu(_gpu(device))


def init() -> None:
    placement.current().initialize()


def is_initialized() -> bool:
    sim = placement.current()
    return sim.initialized and not sim.forked


def _is_in_bad_fork() -> bool:
    return placement.current().forked


# -- memory ----------------------------------------------------------------------------


# PyTorch's own functions for memory stay as they are: what they ask of C++ is answered.


def _memory(index: int) -> Memory:
    if not 0 <= index < device_count():
        raise RuntimeError(f"Invalid device argument {index}: did you call init?")
    return _gpu(index).memory


def _set_memory_fraction(fraction: float, index: int) -> None:
    _memory(index).fraction = fraction


def _get_memory_fraction(index: int) -> float:
    memory = _memory(index)
    return memory.limit / memory.total


def _empty_cache(*args) -> None:
    for gpu in placement.current().gpus:
        gpu.memory.empty_cache()


def mem_get_info(device=None) -> tuple[int, int]:
    """Bytes of the card that are free, and that there are."""
    memory = _gpu(device).memory
    return memory.total - memory.reserved, memory.total


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
    init()
    most = None if enabled is None else 1 if enabled == "state" else max_entries
    for gpu in placement.current().gpus:
        if clear_history:
            gpu.memory.record_history(None, None)
        gpu.memory.record_history(most, context)


def _record_memory_history_legacy(enabled, *args) -> None:
    _record_memory_history("all" if enabled else None)


def _memory_snapshot(pool=None) -> dict:
    """What `torch.cuda.memory._snapshot` returns."""
    if pool is not None and tuple(pool[:2]) != (0, 0):
        raise NotSimulated("a snapshot of a memory pool")
    memories = [gpu.memory for gpu in placement.current().gpus]
    traces = [list(memory.history or ()) for memory in memories]
    return {
        "segments": [part for memory in memories for part in memory.snapshot()],
        "device_traces": traces,
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1,
            "garbage_collection_threshold": 0.0, "expandable_segments": False,
            "pinned_num_register_threads": 1, "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False, "roundup_power2_divisions": {},
        },
        "external_annotations": [],
    }  # fmt: skip


def _refuse(call: str):
    def refused(*args, **kwargs):
        raise NotSimulated(call)

    refused.__name__ = call.rsplit(".", 1)[-1]
    return refused


_C_MEMORY = {
    "_cuda_memoryStats": lambda index: _memory(index).stats(),
    "_cuda_resetPeakMemoryStats": lambda index: _memory(index).reset_peaks(),
    "_cuda_resetAccumulatedMemoryStats": lambda index: _memory(index).reset_sums(),
    "_cuda_emptyCache": _empty_cache,
    "_cuda_setMemoryFraction": _set_memory_fraction,
    "_cuda_getMemoryFraction": lambda index: (
        _memory(index).limit / _memory(index).total
    ),
    "_cuda_memorySnapshot": _memory_snapshot,
    "_cuda_record_memory_history": _record_memory_history,
    "_cuda_record_memory_history_legacy": _record_memory_history_legacy,
    "_cuda_getAllocatorBackend": lambda: "native",
    "_cuda_setMemoryMetadata": _refuse("torch.cuda.memory._set_memory_metadata"),
    "_cuda_getMemoryMetadata": _refuse("torch.cuda.memory._get_memory_metadata"),
    "_cuda_cudaHostAllocator": _refuse("torch.cuda.memory._host_allocator"),
    "_accelerator_setAllocatorSettings": _refuse("changing the allocator's settings"),
    "_accelerator_isAllocatorInitialized": lambda: True,
    "_accelerator_getDeviceStats": lambda index: _memory(index).stats(),
    "_accelerator_resetPeakStats": lambda index: _memory(index).reset_peaks(),
    "_accelerator_resetAccumulatedStats": lambda index: _memory(index).reset_sums(),
    "_accelerator_emptyCache": _empty_cache,
    "_accelerator_getMemoryInfo": mem_get_info,
}
# what they are asked by, and so stays as it is
_MEMORY_CALLS = {
    "empty_cache", "memory_stats", "memory_stats_as_nested_dict", "memory_allocated",
    "max_memory_allocated", "memory_reserved", "max_memory_reserved",
    "memory_cached", "max_memory_cached", "memory_snapshot", "memory_summary",
    "reset_accumulated_memory_stats", "reset_peak_memory_stats",
    "reset_max_memory_allocated", "reset_max_memory_cached",
    "set_per_process_memory_fraction", "get_per_process_memory_fraction",
    "get_allocator_backend",
}  # fmt: skip


# -- random numbers --------------------------------------------------------------------


class _GeneratorMeta(type(_raw_generator)):
    def __instancecheck__(cls, value):
        return isinstance(value, _raw_generator)


class Generator(_raw_generator, metaclass=_GeneratorMeta):
    """`torch.Generator(device="cuda:1")`, made of a CPU generator."""

    gpu = None

    def __new__(cls, device="cpu"):
        device = torch.device(device)
        if device.type not in ("cpu", "cuda"):
            return _raw_generator(device)
        gpu = placement.current().find(device)
        return _raw_generator.__new__(cls, "cpu") if gpu is None else new_generator(gpu)

    @property
    def device(self):
        return self.gpu.device if self.gpu else torch.device("cpu")

    def clone_state(self) -> "Generator":
        made = Generator() if self.gpu is None else new_generator(self.gpu)
        return made.set_state(self.get_state())

    def __reduce__(self):
        return _rebuild_generator, (str(self.device), self.get_state())


def new_generator(gpu) -> Generator:
    """A new generator of a GPU, such as the one it draws from by default."""
    made = _raw_generator.__new__(Generator, "cpu")
    made.gpu = gpu
    placement.gpu_generators[made._cdata] = made
    return made


def _rebuild_generator(device: str, state: torch.Tensor) -> Generator:
    return Generator(device).set_state(state)


def manual_seed(seed: int) -> None:
    _gpu().generator.manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for gpu in placement.current().gpus:
        gpu.generator.manual_seed(int(seed))


def seed() -> None:
    _gpu().generator.seed()


def seed_all() -> None:
    manual_seed_all(_gpu().generator.seed())


def initial_seed() -> int:
    return _gpu().generator.initial_seed()


def get_rng_state(device="cuda") -> torch.Tensor:
    return _gpu(device).generator.get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [gpu.generator.get_state() for gpu in placement.current().gpus]


def set_rng_state(new_state, device="cuda") -> None:
    _gpu(device).generator.set_state(new_state)


def set_rng_state_all(new_states) -> None:
    for gpu, state in zip(placement.current().gpus, new_states, strict=True):
        gpu.generator.set_state(state)


# -- torch.accelerator -----------------------------------------------------------------


def current_accelerator(check_available: bool = False) -> torch.device | None:
    if check_available and not is_available():
        return None
    return torch.device("cuda")


class device_index(torch.cuda.device):
    """The context `torch.accelerator.device_index(1)`."""


# -- refused ---------------------------------------------------------------------------

# torch.cuda's names that work as they are, or are data
_KEPT = {
    "CudaError", "DeferredCudaCallError", "check_error", "cudaStatus", "has_half",
    "has_magma", "device", "device_of", "is_tf32_supported", "ipc_collect",
    "Stream", "Event", "StreamContext", "stream", "current_stream", "default_stream",
    "set_stream", *_MEMORY_CALLS,
}  # fmt: skip


def _refused_class(call: str):
    def refuse(cls, *args, **kwargs):
        raise NotSimulated(call)

    return type(call.rsplit(".", 1)[-1], (), {"__new__": refuse})


def _refused() -> list[tuple[object, str, object]]:
    """Every public call of torch.cuda and torch.accelerator without an answer."""
    answered = set(_CUDA) | _KEPT
    table = []
    for module, names in (
        (torch.cuda, torch.cuda.__all__),
        (torch.cuda.memory, torch.cuda.memory.__all__),
        (torch.cuda.streams, ("ExternalStream",)),
        (torch.accelerator, torch.accelerator.__all__),
        (torch.accelerator.memory, torch.accelerator.memory.__all__),
        (torch, ("compile",)),
        (torch.cuda.nccl, _NCCL),
    ):
        ours = module.__name__.startswith("torch.accelerator")
        known = set(_ACCELERATOR) | _ACCELERATOR_KEPT if ours else answered
        for name in names:
            value = getattr(module, name, None)
            if name in known or not callable(value):
                continue
            if name.endswith(("Tensor", "Storage")):  # tensor_api.py; legacy storages
                continue
            call = f"{module.__name__}.{name}"
            make = _refused_class if isinstance(value, type) else _refuse
            table.append((module, name, make(call)))
    return table


_NCCL = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")

_CUDA = {
    f.__name__: f
    for f in (
        is_available, device_count, current_device, set_device, get_device_name,
        get_device_capability, get_device_properties, can_device_access_peer,
        get_arch_list, is_bf16_supported, synchronize, init, is_initialized,
        mem_get_info, manual_seed, manual_seed_all, seed, seed_all, initial_seed,
        get_rng_state, get_rng_state_all, set_rng_state, set_rng_state_all,
        _is_in_bad_fork,
    )
} | {
    "is_current_stream_capturing": lambda: False,
    "_lazy_init": init,
    "_exchange_device": _exchange_device,
    "_maybe_exchange_device": _exchange_device,
}  # fmt: skip

_ACCELERATOR = {
    "is_available": is_available,
    "device_count": device_count,
    "current_accelerator": current_accelerator,
    "current_device_index": current_device,
    "current_device_idx": current_device,
    "set_device_index": set_device,
    "set_device_idx": set_device,
    "device_index": device_index,
    "synchronize": synchronize,
    "get_memory_info": mem_get_info,
}
_ACCELERATOR_KEPT = {"current_stream", "set_stream", *_MEMORY_CALLS}


class _Nvtx:
    """Marks for a profiler that nobody runs; ranges are counted all the same."""

    def __init__(self):
        self.depth = self.started = 0

    def rangePushA(self, message: str) -> int:
        self.depth += 1
        return self.depth - 1

    def rangePop(self) -> int:
        self.depth -= 1
        return self.depth

    def rangeStartA(self, message: str) -> int:
        self.started += 1
        return self.started

    def rangeEnd(self, number: int) -> None:
        pass

    def markA(self, message: str) -> None:
        pass


def replacements(sim) -> list[tuple[object, str, object]]:
    """(owner, attribute, new value) for everything in this file."""
    random = ("manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed",
              "get_rng_state", "get_rng_state_all", "set_rng_state",
              "set_rng_state_all")  # fmt: skip
    memory = _CUDA.keys() & set(torch.cuda.memory.__all__)
    accelerator_memory = _ACCELERATOR.keys() & set(torch.accelerator.memory.__all__)
    return [
        *((torch.cuda, name, new) for name, new in _CUDA.items()),
        *((torch.cuda.random, name, _CUDA[name]) for name in random),
        *((torch.cuda.memory, name, _CUDA[name]) for name in memory),
        *((torch.accelerator, name, new) for name, new in _ACCELERATOR.items()),
        (torch.cuda.memory, "_lazy_init", init),
        # a CUDA build would make a real CUDA tensor beside the first fake one
        (torch._subclasses.fake_tensor, "init_gpu_context", lambda device: None),
        *((torch._C, name, new) for name, new in _C_MEMORY.items()),
        *(
            (torch.accelerator.memory, name, _ACCELERATOR[name])
            for name in accelerator_memory
        ),
        *_refused(),
        (torch.cuda, "default_generators", sim.generators),
        (torch.cuda, "_initialized", True),  # checkpoints ask, to keep random states
        (torch.cuda.nvtx, "_nvtx", _Nvtx()),
        (torch, "Generator", Generator),
        (torch.backends.cuda, "is_built", lambda: True),
        (torch.backends.cudnn, "is_acceptable", lambda tensor: False),
        (torch.utils.dlpack, "to_dlpack", _to_dlpack),
    ]


_raw_to_dlpack = torch.utils.dlpack.to_dlpack


def _to_dlpack(tensor):
    if gpu_of(tensor) is not None:
        raise NotSimulated("DLPack of a GPU tensor")
    return _raw_to_dlpack(tensor)


def visible_ordinals(count: int) -> list[int]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves of `count`, in its order.

    As in CUDA, the list ends at the first entry that names no GPU.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(range(count))
    ordinals: list[int] = []
    for entry in text.split(","):
        entry = entry.strip()
        if entry.startswith(("GPU-", "MIG-")):
            raise NotSimulated(f"CUDA_VISIBLE_DEVICES={entry}", "Use whole numbers.")
        if not re.fullmatch("[0-9]+", entry) or int(entry) >= count:
            break
        if int(entry) in ordinals:  # CUDA refuses a list that names one twice
            return []
        ordinals.append(int(entry))
    return ordinals
