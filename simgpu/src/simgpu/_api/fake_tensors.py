"""FakeTensors on simulated GPUs: `FakeTensorMode`, `torch.export`, `make_fx`.

Models: tensors without values that C++ itself takes for CUDA's, as in a build with
CUDA. They take no memory and no time. Leaves out: backward through them, for which
C++ wants an accelerator.

C++ asks a table of device types what the current stream of a device is. A build
without CUDA has no entry for it and ends the process where a FakeTensor's gradient is
prepared; a build with CUDA asks its driver. While GPUs are simulated, CUDA has the
entry of the CPU, which does nothing.
"""

import ctypes
from pathlib import Path

import torch

from simgpu._api.patch import Patch, patches
from simgpu._compat import (
    FakeTensor,
    FakeTensorMode,
    FunctionalTensor,
    fake_tensor_module,
    from_functional_tensor,
    raw_run_fallback_kernel,
)
from simgpu._errors import NotSimulated

_CPU, _CUDA = 0, 1  # c10::DeviceType
_TABLE = "_ZN3c104impl26device_guard_impl_registryE"  # device_guard_impl_registry
_LIBRARIES = ("libc10.so", "libc10.dylib")
_raw_enter = FakeTensorMode.__enter__
_NO_CUDA = ("'CUDA' backend", "NVIDIA driver")  # words of C++, with CUDA or without
_before = None  # CUDA's own entry


def _device_guards():
    """C++'s table of device types; None where it cannot be reached (Windows)."""
    for name in _LIBRARIES:
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            try:
                return (ctypes.c_void_p * 2).in_dll(ctypes.CDLL(str(path)), _TABLE)
            except ValueError:
                return None
    return None


def start() -> None:
    """CUDA has the CPU's entry in the table."""
    global _before
    guards = _device_guards()
    if guards is not None and guards[_CUDA] != guards[_CPU]:
        _before = guards[_CUDA]
        guards[_CUDA] = guards[_CPU]


def stop() -> None:
    """It has its own again, or none."""
    guards = _device_guards()
    if guards is not None and guards[_CUDA] == guards[_CPU]:
        guards[_CUDA] = _before


def enter_mode(self):
    """`with FakeTensorMode():`"""
    guards = _device_guards()
    if guards is None or not guards[_CUDA]:
        raise NotSimulated("FakeTensorMode on this platform")
    if self.propagate_real_tensors:
        raise NotSimulated("torch.export.draft_export: FakeTensors with real values")
    return _raw_enter(self)


def run_fallback_kernel(fake_mode, func, *args, **kwargs):
    """An operation without a formula for shapes is run on zeros: CUDA's would."""
    try:
        return raw_run_fallback_kernel(fake_mode, func, *args, **kwargs)
    except RuntimeError as error:
        if any(words in str(error) for words in _NO_CUDA):
            raise NotSimulated(f"{func} of a FakeTensor on a GPU") from None
        raise


def refuse_backward(outputs) -> None:
    """C++ cannot go backward through FakeTensors on a GPU.

    Raises:
        NotSimulated: if one of the outputs is one.
    """
    for output in outputs:
        if isinstance(output, FunctionalTensor):  # of torch._functorch.aot_autograd
            output = from_functional_tensor(output.elem)
        if isinstance(output, FakeTensor) and output.device.type == "cuda":
            raise NotSimulated("backward through a FakeTensor on a GPU")


def rows() -> list[Patch]:
    """Their part of the table of replacements."""
    return [
        # a CUDA build would make a real CUDA tensor beside the first fake one
        *patches(fake_tensor_module, "there is no CUDA context",
                 init_gpu_context=lambda device: None,
                 run_fallback_kernel=run_fallback_kernel),
        *patches(FakeTensorMode, "there is a CUDA device, and no CUDA",
                 __enter__=enter_mode, avoid_device_init=True),
    ]  # fmt: skip
