"""The old names of tensor types: `torch.FloatTensor`, `torch.cuda.FloatTensor`."""

import torch

from simgpu._api.making import legacy
from simgpu._api.naming import as_device
from simgpu._dispatch.errors import TYPE_NAMES
from simgpu._errors import NotSimulated

_raw_set_default_tensor_type = torch.set_default_tensor_type
DTYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}
_raw_types = {name: getattr(torch, name) for name in DTYPES}


class TensorTypeMeta(type):
    def __instancecheck__(cls, value):
        if not isinstance(value, torch.Tensor) or value.dtype is not cls.dtype:
            return False
        return value.is_cuda is cls.on_gpu and value.layout is torch.strided

    def __str__(cls):
        return f"{cls.__module__}.{cls.__name__}"

    __repr__ = __str__


class TensorType(metaclass=TensorTypeMeta):
    """`torch.FloatTensor`, `torch.cuda.FloatTensor` and their kin."""

    dtype: torch.dtype
    on_gpu: bool

    def __new__(cls, *args, device=None, **kwargs):
        if not cls.on_gpu:
            return _raw_types[cls.__name__](*args, **kwargs)
        return legacy(cls.dtype, as_device(device) or torch.device("cuda"), args)


def tensor_types(module, on_gpu: bool) -> dict[str, type]:
    """The types of a module: "FloatTensor" -> what stands for it."""
    return {
        name: TensorTypeMeta(
            name,
            (TensorType,),
            {"dtype": dtype, "on_gpu": on_gpu, "__module__": module.__name__},
        )
        for name, dtype in DTYPES.items()
    }


def set_default_tensor_type(kind):
    """torch.set_default_tensor_type"""
    if isinstance(kind, str):
        package, _, name = kind.rpartition(".")
        kind = getattr(torch.cuda if package == "torch.cuda" else torch, name, kind)
    if isinstance(kind, TensorTypeMeta):
        if kind.on_gpu:
            raise NotSimulated(
                f"torch.set_default_tensor_type({kind})",
                'Write torch.set_default_device("cuda").',
            )
        kind = _raw_types[kind.__name__]
    return _raw_set_default_tensor_type(kind)
