"""Operations with `device=`: `zeros(..., device="cuda:1")`, `new_zeros`, and so on."""

import math

import torch

from simgpu._device.gpu import Gpu
from simgpu._dispatch import cpp_tensors
from simgpu._dispatch.named_devices import HOST, find_gpu, kept_on
from simgpu._dispatch.operation import handles
from simgpu._dispatch.operation_call import Call
from simgpu._dispatch.placement import pin

aten = torch.ops.aten


@handles("factory")
def create(call: Call):
    """Make a tensor on the device that was asked for, or else on its model's."""
    __tracebackhide__ = True
    device = call.kwargs.get("device")
    if device is None and len(call.args) > 2:
        _name_arguments(call)
        device = call.kwargs.get("device")
    if device is not None and device.type not in ("cuda", "cpu"):
        return call.func(*call.args, **call.kwargs)
    gpu = _gpu_for(call, device)
    pinned = call.kwargs.get("pin_memory")
    if gpu is not None or pinned:
        device = HOST if gpu is None else kept_on()
        call.kwargs = {**call.kwargs, "device": device, "pin_memory": False}
    if gpu is not None:
        if pinned:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        _refuse_too_large(call, gpu)
    out = call.run_on(gpu)
    if gpu is None and pinned:
        pin(out)
    elif gpu is None and not call.tensors:
        cpp_tensors.note(call.runtime, out)
    return out


def _name_arguments(call: Call) -> None:
    """Give by name what comes from the type on: a few take that by position."""
    names = [*call.operation.arguments]
    first = names.index("dtype") if "dtype" in names else len(names)
    if len(call.args) > first:
        given = dict(zip(names[first:], call.args[first:], strict=False))
        call.args, call.kwargs = call.args[:first], {**call.kwargs, **given}


def name_devices(call: Call) -> None:
    """Name the device on which a call makes its tensor, where C++ repeats the CPU."""
    device = call.kwargs.get("device")
    if device is None or device.type != "cpu" or not call.tensors:
        return
    thread = call.runtime.thread
    if not thread.asked_for_cpu and not thread.asked_for_copy:
        gpu = call.gpus[0]
        if gpu is not None:
            call.kwargs = {**call.kwargs, "device": gpu.device}


@handles("_assert_tensor_metadata")
def assert_metadata(call: Call):
    """What `torch.export` writes into its graphs before each change of device."""
    device = call.kwargs.get("device")
    if device is not None and find_gpu(device) is not call.gpus[0]:
        raise RuntimeError("Tensor device mismatch!")
    kwargs = {name: v for name, v in call.kwargs.items() if name != "device"}
    return call.func(*call.args, **kwargs)


def _gpu_for(call: Call, device: torch.device | None) -> Gpu | None:
    """Where a factory makes its tensor; None is the host."""
    __tracebackhide__ = True
    thread = call.runtime.thread
    if device is not None and device.type == "cuda":
        return find_gpu(device)
    if call.tensors and (device is None or not thread.asked_for_cpu):
        # nothing asked for, or C++ repeats the device that it sees: the input's
        return call.common_gpu()
    return None if thread.asked_for_cpu else thread.gpu_of_cpp_tensors


def _refuse_too_large(call: Call, gpu: Gpu) -> None:
    """Raise OutOfMemoryError before the host fills its own memory with zeros."""
    __tracebackhide__ = True
    size = call.args[0] if call.args else None
    if not isinstance(size, (list, tuple)) or not size:
        return
    is_strided = call.kwargs.get("layout") in (None, torch.strided)
    known = all(isinstance(length, int) for length in size)
    if not is_strided or not known or call.operation.name == "empty_strided":
        return
    nbytes = math.prod(size) * _dtype_of(call).itemsize
    gpu.memory.check_room(nbytes, call.runtime.stream_of(gpu))


def _dtype_of(call: Call) -> torch.dtype:
    """The type that a factory makes."""
    dtype = call.kwargs.get("dtype")
    if dtype is None and call.operation.name == "full":
        dtype = {bool: torch.bool, int: torch.int64}.get(type(call.args[1]))
    return dtype or torch.get_default_dtype()


@handles("_efficientzerotensor")
def make_real_zeros(call: Call):
    """Zeros without memory crash PyTorch where a mode is active: make real ones."""
    call.func = aten.zeros.default
    return create(call)
