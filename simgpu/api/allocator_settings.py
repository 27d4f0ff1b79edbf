"""Settings of PyTorch's allocator: `PYTORCH_ALLOC_CONF`, `_set_allocator_settings`.

Accepted: what changes nothing in the model. `expandable_segments:True` is accepted with
a warning: memory is counted as without it. What would change how blocks are chosen is
refused by its name.
"""

import os
import re
import warnings

from simgpu import runtime
from simgpu.errors import NotSimulated

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_SWITCHES = (
    "expandable_segments", "release_lock_on_cudamalloc",
    "pinned_use_cuda_host_register", "pinned_use_background_threads",
    "graph_capture_record_stream_reuse", "pinned_use_hip_host_register",
    "release_lock_on_hipmalloc",
)  # fmt: skip
_LEAST_SPLIT = 20  # MiB
_MOST_THREADS = 128
# "key:value" or "key:[...]"
_ENTRY = re.compile(r"([^,:\[\]]+):(\[[^\]]*\]|[^,:\[\]]+)")


def _check(condition, message: str) -> None:
    if not condition:
        raise ValueError(message)


def apply(settings: str) -> None:
    """Take the settings of a text such as "backend:native,expandable_segments:False".

    Raises:
        ValueError: for what PyTorch does not know.
        NotSimulated: for what changes how the allocator finds room.
    """
    text = re.sub(r"\s", "", settings or "")
    entries = _ENTRY.findall(text)
    _check(
        ",".join(map(":".join, entries)) == text,
        f"Error parsing CachingAllocator settings: {settings!r}",
    )
    for key, value in entries:
        _apply_one(key, value)


def _apply_one(key: str, value: str) -> None:
    if key in _SWITCHES:
        _check(value in ("True", "False"), f"Expected 'True' or 'False' for {key}")
        if key == "expandable_segments" and value == "True":
            warnings.warn(
                "simgpu: expandable_segments is not simulated; memory is counted as "
                "without it",
                stacklevel=2,
            )
    elif key == "pinned_num_register_threads":
        _check(
            value.isdigit() and int(value).bit_count() == 1,
            f"Number of register threads has to be power of 2, got {value}",
        )
        _check(
            int(value) <= _MOST_THREADS,
            "Number of register threads should be less than or equal to "
            f"{_MOST_THREADS}, got {value}",
        )
    elif key == "per_process_memory_fraction":
        _check(
            0 <= _number(key, value) <= 1,
            "per_process_memory_fraction is invalid, set it in [0.0, 1.0]",
        )
        for gpu in runtime.current().gpus:
            gpu.memory.fraction = float(value)
    elif key == "backend":
        _check(
            value in ("native", "cudaMallocAsync"),
            "Unknown allocator backend, options are native and cudaMallocAsync",
        )
        if value != "native":
            raise NotSimulated(f"the allocator backend {value}")
    elif key in ("max_split_size_mb", "max_non_split_rounding_mb"):
        _check(
            _number(key, value) >= _LEAST_SPLIT,
            f"CachingAllocator option {key} too small, must be >= {_LEAST_SPLIT}",
        )
        raise NotSimulated(f"the allocator setting {key}")
    elif key == "garbage_collection_threshold":
        _check(
            0 < _number(key, value) < 1,
            "garbage_collect_threshold is invalid, set it in (0.0, 1.0)",
        )
        raise NotSimulated(f"the allocator setting {key}")
    elif key in ("roundup_power2_divisions", "pinned_reserve_segment_size_mb"):
        raise NotSimulated(f"the allocator setting {key}")
    else:
        raise ValueError(f"Unrecognized key '{key}' in CUDA allocator config.")


def _number(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"expected a number for {key}, got {value}") from None


def apply_environment() -> None:
    """Take what the environment says, as PyTorch does when it is imported."""
    text = next(filter(None, map(os.environ.get, VARIABLES)), "")
    apply(text)
