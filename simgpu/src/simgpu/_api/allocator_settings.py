"""Settings of PyTorch's allocator: `PYTORCH_ALLOC_CONF`, `_set_allocator_settings`.

Those that change how it finds room are in `_device/settings.py`. Others that change
nothing in the model are accepted. Refused by name: another backend, and freeing blocks
by their age, which takes effect where the program has set a fraction, too.
"""

import os
import re

from simgpu import _runtime as state
from simgpu._device.cards import MIB
from simgpu._device.settings import INTERVALS, Settings
from simgpu._errors import NotSimulated

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
    """Take the settings of a text such as "max_split_size_mb:128,backend:native".

    Those that it does not name, and that the allocator uses, are as at the start.

    Raises:
        ValueError: for what PyTorch does not know.
        NotSimulated: for what is not modelled and changes how the allocator works.
    """
    text = re.sub(r"\s", "", settings or "")
    entries = _ENTRY.findall(text)
    _check(
        ",".join(map(":".join, entries)) == text,
        f"Error parsing CachingAllocator settings: {settings!r}",
    )
    settings = state.current().settings
    settings.reset()
    settings.text = text
    for key, value in entries:
        _KEYS.get(key, _unknown)(settings, key, value)


def _unknown(settings: Settings, key: str, value: str) -> None:
    raise ValueError(f"Unrecognized key '{key}' in CUDA allocator config.")


def _switch(settings: Settings, key: str, value: str) -> None:
    _check(value in ("True", "False"), f"Expected 'True' or 'False' for {key}")
    if key == "expandable_segments":
        settings.expandable = value == "True"


def _threads(settings: Settings, key: str, value: str) -> None:
    _check(
        value.isdigit() and _is_power_of_two(int(value)),
        f"Number of register threads has to be power of 2, got {value}",
    )
    _check(
        int(value) <= _MOST_THREADS,
        "Number of register threads should be less than or equal to "
        f"{_MOST_THREADS}, got {value}",
    )


def _fraction(settings: Settings, key: str, value: str) -> None:
    fraction = _number(key, value)
    _check(0 <= fraction <= 1, f"{key} is invalid, set it in [0.0, 1.0]")
    set_fraction([gpu.memory for gpu in state.current().gpus], fraction)


def _backend(settings: Settings, key: str, value: str) -> None:
    _check(
        value in ("native", "cudaMallocAsync"),
        "Unknown allocator backend, options are native and cudaMallocAsync",
    )
    if value != "native":
        raise NotSimulated(f"the allocator backend {value}")


def _largest(settings: Settings, key: str, value: str) -> None:
    mib = _number(key, value)
    _check(
        mib >= _LEAST_SPLIT,
        f"CachingAllocator option {key} too small, must be >= {_LEAST_SPLIT}",
    )
    name = "max_split" if key == "max_split_size_mb" else "most_waste"
    setattr(settings, name, int(mib) * MIB)


def _threshold(settings: Settings, key: str, value: str) -> None:
    share = _number(key, value)
    _check(0 < share < 1, "garbage_collect_threshold is invalid, set it in (0.0, 1.0)")
    if any(gpu.memory.fraction is not None for gpu in state.current().gpus):
        raise NotSimulated(f"{key} with a fraction of the memory")
    settings.collect_from = share


def _divisions(settings: Settings, key: str, value: str) -> None:
    """ "4" for all sizes, or "[64:8,128:2,>:1]" by the size in MiB."""
    if not value.startswith("["):
        number = int(_number(key, value))
        _check(_is_power_of_two(number), "For roundups, the divisons has to be power "
               "of 2")  # fmt: skip
        settings.divide([number] * INTERVALS)
        return
    divisions, last = [0] * INTERVALS, None
    for entry in value[1:-1].split(","):
        size, _, text = entry.partition(":")
        number = int(_number(key, text))
        _check(
            number == 0 or _is_power_of_two(number),
            "For roundups, the divisons has to be power of 2 or 0 to disable roundup",
        )
        if size == ">":
            first = last or 0
            divisions[first:] = [number] * (INTERVALS - first)
            continue
        mib = int(_number(key, size))
        _check(
            _is_power_of_two(mib), "For roundups, the intervals have to be power of 2"
        )
        index = min(mib.bit_length() - 1, INTERVALS - 1)
        if last is None:
            divisions[:index] = [number] * index
        divisions[index] = number
        last = index
    settings.divide(divisions)


def _reserve(settings: Settings, key: str, value: str) -> None:
    raise NotSimulated(f"the allocator setting {key}")


_KEYS = {
    **dict.fromkeys(_SWITCHES, _switch),
    "pinned_num_register_threads": _threads,
    "pinned_reserve_segment_size_mb": _reserve,
    "per_process_memory_fraction": _fraction,
    "backend": _backend,
    "max_split_size_mb": _largest,
    "max_non_split_rounding_mb": _largest,
    "garbage_collection_threshold": _threshold,
    "roundup_power2_divisions": _divisions,
}


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _number(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"expected a number for {key}, got {value}") from None


def set_fraction(memories: list, fraction: float) -> None:
    """Let the program take no more than this share of each card.

    Raises:
        NotSimulated: if blocks should be freed by their age.
    """
    if state.current().settings.collect_from:
        raise NotSimulated("garbage_collection_threshold with a fraction of the memory")
    for memory in memories:
        memory.fraction = fraction


def apply_environment() -> None:
    """Take what the environment says, as PyTorch does when it is imported."""
    apply(next(filter(None, map(os.environ.get, VARIABLES)), ""))
