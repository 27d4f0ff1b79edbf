"""What a tensor says of itself: its device, its type, its gradient, its text."""

import torch

from simgpu import _runtime as state
from simgpu._api.tensor_types import DTYPES, TensorTypeMeta
from simgpu._compat import TensorBase
from simgpu._dispatch import device_asserts
from simgpu._dispatch.errors import type_name
from simgpu._dispatch.mode import settle_streams
from simgpu._dispatch.placement import gpu_of
from simgpu._dispatch.sanitizing import look_at
from simgpu._errors import NotSimulated

_raw_device = TensorBase.device
_raw_grad = TensorBase.grad
_raw_get_device = torch.Tensor.get_device
_raw_type = torch.Tensor.type
_raw_repr = torch.Tensor.__repr__


class Property(property):
    """A property that looks like one of C++'s, as torch 2.11's _dynamo expects."""

    __objclass__ = torch.Tensor


def device_of(self):
    gpu = gpu_of(self)
    return _raw_device.__get__(self) if gpu is None else gpu.device


def is_cuda(self):
    return self.device.type == "cuda"


def is_cpu(self):
    return self.device.type == "cpu"


def is_meta(self):
    return self.device.type == "meta"


def get_device(self):
    gpu = gpu_of(self)
    return _raw_get_device(self) if gpu is None else gpu.index


def represent(self, *, tensor_contents=None):
    """Printing is not part of the program: it leaves no trace in the log."""
    runtime = state.current()
    if runtime.without_values and gpu_of(self) is not None:
        raise NotSimulated(
            "printing a tensor", "simgpu.estimate knows the shapes of tensors alone."
        )
    if runtime.failed and (gpu := gpu_of(self)) is not None:
        device_asserts.check(runtime.failed, [gpu.index])
    if runtime.dry is not None:
        runtime.dry.note_printed(self)
    settle_streams(runtime)
    runtime.thread.unlogged += 1
    try:
        seen = look_at(runtime, self)
        return _raw_repr(seen, tensor_contents=tensor_contents)
    finally:
        runtime.thread.unlogged -= 1


def type_of(self, dtype=None, non_blocking=False, **kwargs):
    if dtype is None:
        return type_name(self)
    if isinstance(dtype, TensorTypeMeta):
        return (self.cuda() if dtype.on_gpu else self.cpu()).to(dtype.dtype)
    name = dtype if isinstance(dtype, str) else ""
    if name.startswith("torch.cuda."):
        return self.cuda().to(DTYPES[name.removeprefix("torch.cuda.")])
    if name.startswith("torch.") and name.removeprefix("torch.") in DTYPES:
        return self.cpu().to(DTYPES[name.removeprefix("torch.")])
    return _raw_type(self, dtype, non_blocking, **kwargs)


def get_grad(self):
    return _raw_grad.__get__(self)


def set_grad(self, value):
    if isinstance(value, torch.Tensor) and gpu_of(value) is not gpu_of(self):
        raise RuntimeError(
            "attempting to assign a gradient with device type "
            f"'{value.device.type}' to a tensor with device type '{self.device.type}'. "
            "Please ensure that the gradient and the tensor are on the same device"
            if value.device.type != self.device.type
            else "attempting to assign a gradient located on device with index "
            f"'{value.device.index}' to a tensor located on device with index "
            f"'{self.device.index}'. Please ensure that the gradient and the tensor "
            "are on the same device"
        )
    _raw_grad.__set__(self, value)


def delete_grad(self):
    _raw_grad.__delete__(self)
