"""Which GPUs there are and which one is current: `torch.cuda`, `torch.accelerator`."""

import os

import torch

from simgpu import _runtime as state
from simgpu._api.properties import DeviceProperties
from simgpu._compat import (
    check_stray_context,
    current_autograd_node,
    get_device_index,
    is_absent,
)
from simgpu._device.gpu import Gpu
from simgpu._dispatch.named_devices import current_gpu, gpu_named

CUDA_VERSION = "13.0"  # what PyTorch 2.11 is built for


def known_gpu(device=None) -> Gpu:
    """The GPU that `device` names, for calls that check the index themselves."""
    init()
    index = get_device_index(device, optional=True)
    if not 0 <= index < device_count():
        raise AssertionError("Invalid device id")
    return gpu_named(index)


def is_available() -> bool:
    """Fixes which GPUs are visible, without initialising CUDA; NVML not even that.

    As in CUDA, what is fixed cannot be used in a forked child.
    """
    if os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "1":
        return device_count() > 0
    return state.current().fix_visible() > 0


def device_count() -> int:
    return state.current().count()


def current_device() -> int:
    return current_gpu().index


def set_device(device) -> None:
    index = get_device_index(device)
    exchange_device(index)
    if index >= 0:
        current_gpu().memory.share.open_context()
    if index >= 0 and not is_absent(check_stray_context):  # since 2.15
        check_stray_context(index)


def exchange_device(index: int) -> int:
    """Make `index` the current GPU (none if negative); returns the one before."""
    if index < 0:
        return -1
    before = current_device()
    if index != before:
        gpu_named(index).memory.share.open_context()
    maybe_exchange_device(index)
    return before


def maybe_exchange_device(index: int) -> int:
    """The same, where a context ends: CUDA is not used on the GPU for that alone."""
    if index < 0:
        return -1
    before = current_device()
    thread = state.current().thread
    thread.device = gpu_named(index).index
    thread.device_chosen_in = current_autograd_node()
    return before


def get_device_properties(device=None) -> DeviceProperties:
    return DeviceProperties(known_gpu(device))


def get_device_name(device=None) -> str:
    return get_device_properties(device).name


def get_device_capability(device=None) -> tuple[int, int]:
    return known_gpu(device).card.capability


def can_device_access_peer(device, peer_device) -> bool:
    a = known_gpu(device)
    index = get_device_index(peer_device)
    if not 0 <= index < device_count():
        raise AssertionError("Invalid peer device id")
    return a is not gpu_named(index)


def get_arch_list() -> list[str]:
    cards = {gpu.card.capability for gpu in state.current().gpus}
    return [f"sm_{major}{minor}" for major, minor in sorted(cards)]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return including_emulation or gpu_named().card.capability >= (8, 0)


def synchronize(device=None) -> None:
    gpu = gpu_named(device)
    gpu.memory.share.open_context()
    clock = state.current().clock
    clock.forbid_waiting(gpu.index)
    clock.wait_for_gpu(gpu)


def init() -> None:
    state.current().initialize()


def is_initialized() -> bool:
    runtime = state.current()
    return runtime.initialized and not runtime.forked


def is_in_bad_fork() -> bool:
    return state.current().forked


# -- torch.accelerator -----------------------------------------------------------------


def get_accelerator(check=None) -> torch.device:
    return torch.device("cuda")


def current_accelerator(check_available: bool = False) -> torch.device | None:
    if check_available and not is_available():
        return None
    return torch.device("cuda")


class device_index(torch.cuda.device):
    """The context `torch.accelerator.device_index(1)`; None changes nothing."""

    def __init__(self, device: int | None, /):
        super().__init__(-1 if device is None else device)
