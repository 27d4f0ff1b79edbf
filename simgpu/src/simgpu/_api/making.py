"""Functions that build tensors from data: `torch.tensor`, `as_tensor`, sparse ones.

Factories that fill memory (`zeros`, `new_ones`, ...) reach the dispatch mode as
operations (`_dispatch/factories.py`).
"""

from numbers import Integral

import torch

from simgpu._api.naming import as_device
from simgpu._compat import (
    DeviceContext,
    DisableTorchDispatch,
    DisableTorchFunction,
    FunctionalTensor,
    TorchDispatchModeKey,
    function_modes,
    get_dispatch_mode,
    raw_make_wrapper_subclass,
)
from simgpu._dispatch.copies import log_copy
from simgpu._dispatch.errors import TYPE_NAMES, type_name
from simgpu._dispatch.named_devices import HOST, find_gpu, kept_on
from simgpu._dispatch.placement import gpu_of, is_plain, place

_raw_tensor = torch.tensor
_raw_as_tensor = torch.as_tensor
_raw_asarray = torch.asarray
_raw_range = torch.range
_raw_new = torch.Tensor.new
_raw_to = torch.Tensor.to
_raw_new_object = torch.Tensor.__new__
_PROXY = TorchDispatchModeKey.PROXY
_DEVICE = 6  # position of the device among the arguments of a wrapper
_SPARSE = (
    "sparse_coo_tensor", "sparse_csr_tensor", "sparse_csc_tensor", "sparse_bsr_tensor",
    "sparse_bsc_tensor", "sparse_compressed_tensor",
)  # fmt: skip


def legacy(dtype: torch.dtype, device: torch.device, args: tuple) -> torch.Tensor:
    """What the old constructors make on a GPU: of sizes, a storage, or data.

    Raises:
        TypeError: for a tensor of another type or device.
    """
    first = args[0] if args else None
    if isinstance(first, torch.Size) or all(isinstance(n, Integral) for n in args):
        size = first if isinstance(first, torch.Size) else args
        return torch.empty(size or (0,), dtype=dtype, device=device)
    if isinstance(first, (torch.UntypedStorage, torch.TypedStorage)):
        return torch.empty(0, dtype=dtype, device=device).set_(first)
    if isinstance(first, torch.Tensor):
        gpu = find_gpu(device)
        if first.dtype is not dtype or gpu_of(first) is not gpu:
            wanted = f"torch.cuda.{TYPE_NAMES.get(dtype, dtype)}"
            raise TypeError(f"expected {wanted} (got {type_name(first)})")
        return first.detach()
    return tensor(first, dtype=dtype, device=device)


def _made(made, device):
    """A tensor that was just built on the host, where `device` asks for it."""
    gpu = find_gpu(device)
    if gpu is not None and kept_on() is not HOST:
        with DisableTorchDispatch():  # it crosses the link below
            made = _raw_to(made, kept_on())
    traced = get_dispatch_mode(_PROXY) is not None
    if gpu is not None and (traced or not is_plain(made)):  # by make_fx; a FakeTensor
        empty = torch.empty(made.shape, dtype=made.dtype, device=gpu.device)
        return empty.copy_(made)
    if gpu is not None:
        place(made, gpu)
        log_copy(None, gpu, made.numel() * made.element_size())
    return made


def _default(device, data=None):
    """What `device=` means where it was left out: the default device.

    Args:
        device: what the program has given.
        data: the tensor of which a new one is made; where it is, without a default.
    """
    device = as_device(device)
    if device is None:
        contexts = (
            mode.device
            for mode in reversed(function_modes())
            if isinstance(mode, DeviceContext)
        )
        device = next(contexts, None)
    if device is None and data is not None:
        return data.device
    return device or torch.device("cpu")


def tensor(data, *, dtype=None, device=None, requires_grad=False,
                         pin_memory=False):  # fmt: skip
    """torch.tensor"""
    raw = _raw_tensor
    if isinstance(data, torch.Tensor):
        device = _default(device, data)
        made = data.detach().to(device, dtype, copy=True)
        return made.requires_grad_() if requires_grad else made
    device = _default(device)
    if device.type not in ("cuda", "cpu"):
        return raw(data, dtype=dtype, device=device, requires_grad=requires_grad)
    with DisableTorchFunction():  # or the mode would send it here again
        made = raw(data, dtype=dtype, device="cpu")
    made = _made(made, device)
    _log_read_back(data)
    if pin_memory:
        made = made.pin_memory()
    return made.requires_grad_() if requires_grad else made


def _log_read_back(data) -> None:
    """GPU scalars in a list are read back one by one."""
    if isinstance(data, (list, tuple)):
        for item in data:
            _log_read_back(item)
    elif isinstance(data, torch.Tensor) and gpu_of(data) is not None:
        log_copy(gpu_of(data), None, data.element_size())


def as_tensor(data, dtype=None, device=None):
    if isinstance(data, torch.Tensor):
        return data.to(_default(device, data), dtype or data.dtype)
    device = _default(device)
    if device.type not in ("cuda", "cpu"):
        return _raw_as_tensor(data, dtype=dtype, device=device)
    made = _raw_as_tensor(data, dtype=dtype, device="cpu")
    return made.to(device)  # a copy: what numpy shares stays on the host


def range(*args, device=None, **kwargs):
    """torch.range, which asks no mode what its device means."""
    gpu = find_gpu(_default(device))
    made = _raw_range(*args, device="cpu" if gpu is None else kept_on(), **kwargs)
    return place(made, gpu)


def asarray(obj, *, dtype=None, device=None, copy=None, requires_grad=False):
    if isinstance(obj, torch.Tensor):
        device = _default(device, obj)
        if copy is False and device != obj.device:
            raise ValueError("can't alias tensor with different device")
        made = obj.to(device, dtype or obj.dtype, copy=bool(copy))
        return made.detach().requires_grad_(True) if requires_grad else made
    made = _raw_asarray(obj, dtype=dtype, device="cpu", copy=copy)
    made = made.to(_default(device))
    return made.requires_grad_() if requires_grad else made


def new_tensor(self, data, *, dtype=None, device=None, requires_grad=False,
                pin_memory=False):  # fmt: skip
    return tensor(
        data,
        dtype=dtype or (None if isinstance(data, torch.Tensor) else self.dtype),
        device=as_device(device) or self.device,
        requires_grad=requires_grad,
        pin_memory=pin_memory,
    )


def new(self, *args, **kwargs):
    device = as_device(kwargs.get("device")) or self.device
    if device.type != "cuda" or self.layout is not torch.strided:
        return _raw_new(self, *args, **kwargs)
    return legacy(self.dtype, device, args)


def _sparse_factory(name: str):
    """torch.sparse_coo_tensor and its kin, whose values may decide the device."""
    raw = getattr(torch, name)
    position = 1 if name == "sparse_coo_tensor" else 2

    def make(*args, device=None, **kwargs):
        values = args[position] if len(args) > position else kwargs.get("values")
        here = values.device if isinstance(values, torch.Tensor) else _default(None)
        device = as_device(device) or here
        args = [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]
        kwargs = {
            key: value.to(device) if isinstance(value, torch.Tensor) else value
            for key, value in kwargs.items()
        }
        with DisableTorchFunction():  # or the mode would send it here again
            made = raw(*args, device="cpu", **kwargs)
        return place(made, find_gpu(device))

    return make


sparse_factories = {name: _sparse_factory(name) for name in _SPARSE}


def new_tensor_object(*args, **kwargs):
    """`torch.Tensor(2, 3)`; for a subclass, C++ wants what no mode has seen yet.

    Without names of arguments, as torch._dynamo expects of a function in C++.
    """
    if args[0] is torch.Tensor:
        return _raw_new_object(*args, **kwargs)
    with DisableTorchDispatch():
        return _raw_new_object(*args, **kwargs)


def make_wrapper_subclass(cls, *args, **kwargs):
    """A tensor that wraps others; they know where they are, and C++ knows no GPU.

    Those of the functionalization of FakeTensors are the exception: so are the tensors
    that they wrap (`fake_tensors.py`).
    """
    device = args[_DEVICE] if len(args) > _DEVICE else kwargs.get("device")
    on_gpu = device is not None and torch.device(device).type == "cuda"
    if on_gpu and not issubclass(cls, FunctionalTensor):
        if len(args) > _DEVICE:
            args = (*args[:_DEVICE], HOST, *args[_DEVICE + 1 :])
        else:
            kwargs["device"] = HOST
    return raw_make_wrapper_subclass(cls, *args, **kwargs)
