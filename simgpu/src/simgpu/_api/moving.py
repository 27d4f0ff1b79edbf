"""`x.to(...)`, `x.cuda(1)`, `x.cpu()`: tensors that move between devices.

A move is a differentiable copy; the copy itself is `_dispatch/copies.py`.
"""

import torch

from simgpu import _runtime as state
from simgpu._api.naming import as_device
from simgpu._compat import (
    DisableTorchFunctionSubclass,
    FakeTensor,
    add_batch_dim,
    forward_ad_level,
    is_legacy_batchedtensor,
    raw_parse_to,
    remove_batch_dim,
)
from simgpu._dispatch.named_devices import find_gpu
from simgpu._dispatch.placement import gpu_of, inner_tensors, is_plain

_raw_to = torch.Tensor.to
_raw_cpu = torch.Tensor.cpu
_raw_copy = torch.Tensor.copy_
_raw_setitem = torch.Tensor.__setitem__


class _Move(torch.autograd.Function):
    """The differentiable copy between devices: its gradient goes the way back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor, *how):
        return _move(tensor, *how)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.device, ctx.dtype = inputs[0].device, inputs[0].dtype
        ctx.move = inputs[1:]

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to(ctx.device, ctx.dtype), None, None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return _move(tangent, *ctx.move)


_Move._backward_cls.__name__ = "ToCopyBackward0"  # as a printed tensor names it


def _move(tensor, device, dtype, memory_format, non_blocking):
    state.current().thread.asked_for_copy = True
    return torch.ops.aten._to_copy(
        tensor,
        device=device,
        dtype=dtype,
        memory_format=memory_format or torch.preserve_format,
        non_blocking=non_blocking,
    )


def move(tensor, device: torch.device, dtype=None, copy=False, memory_format=None,
         non_blocking=False):  # fmt: skip
    """`tensor` on `device`: itself if nothing changes, otherwise a copy."""
    target = find_gpu(device)
    if gpu_of(tensor) is target:
        keep = {} if memory_format is None else {"memory_format": memory_format}
        return _raw_to(tensor, dtype or tensor.dtype, copy=copy, **keep)
    if is_legacy_batchedtensor(tensor):  # of is_grads_batched=True
        whole = remove_batch_dim(tensor, 1, 1, 0)
        moved = move(whole, device, dtype, copy, memory_format, non_blocking)
        return add_batch_dim(moved, 0, 1)
    if dtype is tensor.dtype:
        dtype = None
    device = target.device if target else device
    tangents = forward_ad_level() >= 0
    if torch.is_grad_enabled() and tensor.requires_grad or tangents:
        return _Move.apply(tensor, device, dtype, memory_format, non_blocking)
    with DisableTorchFunctionSubclass():
        if tensor.requires_grad:
            tensor = tensor.detach()
        moved = _move(tensor, device, dtype, memory_format, non_blocking)
    kind = type(tensor)
    if kind is torch.Tensor or isinstance(tensor, torch.nn.Parameter):
        return moved
    return moved.as_subclass(kind)


def _parse_to(device=None, dtype=None, non_blocking=False, copy=False, *,
              memory_format=None):  # fmt: skip
    return as_device(device), dtype, copy, memory_format, non_blocking


def to(self, *args, **kwargs):
    wraps = not is_plain(self)
    if type(self) is FakeTensor:
        return _raw_to(self, *map(_with_index, args), **_with_index(kwargs))
    if wraps and not inner_tensors(self) or self.device.type == "meta":
        return _raw_to(self, *args, **kwargs)
    first = args[0] if args else kwargs.get("other", kwargs.get("tensor"))
    if isinstance(first, torch.Tensor):  # to(other)
        rest = {k: v for k, v in kwargs.items() if k not in ("other", "tensor")}
        args = (first.device, first.dtype, *args[1:])
        how = _parse_to(*args, **rest)
    elif isinstance(first, torch.dtype):  # to(dtype)
        return _raw_to(self, *args, **kwargs)
    else:
        how = _parse_to(*args, **kwargs)
    if how[0] is None or how[0].type not in ("cuda", "cpu"):
        return _raw_to(self, *args, **kwargs)
    return _move_wrapper(self, *how) if wraps else move(self, *how)


def to_overload(self, device=None, dtype=None, non_blocking=False, copy=False,
                memory_format=None, layout=None, pin_memory=None):  # fmt: skip
    """`aten::to.device` and `.dtype_layout`, which graphs of `torch.export` call."""
    device = self.device if device is None else device
    return to(self, device, dtype or self.dtype, non_blocking, copy,
              memory_format=memory_format)  # fmt: skip


def _with_index(value):
    """ "cuda" as C++ must be told it where there are FakeTensors: "cuda:0"."""
    if isinstance(value, dict):
        return {name: _with_index(item) for name, item in value.items()}
    if isinstance(value, (str, int, torch.device)) and not isinstance(value, bool):
        device = as_device(value)
        return find_gpu(device).device if device.type == "cuda" else device
    return value


def _move_wrapper(self, device, dtype, copy, memory_format, non_blocking):
    """A subclass such as DTensor, which hands the operation to what it wraps."""
    dtype = dtype or self.dtype
    if find_gpu(device) is gpu_of(self) and dtype is self.dtype and not copy:
        return self
    return _move(self, device, dtype, memory_format, non_blocking)


def cuda(self, device=None, non_blocking=False, memory_format=None):
    if device is None:
        device = torch.device("cuda")
    device = as_device(device)
    if device.type != "cuda":
        raise RuntimeError(f"Invalid device, must be cuda device, got {device.type}")
    if not is_plain(self):
        return self.to(device)
    return move(self, device, None, False, memory_format, non_blocking)


def cpu(self, memory_format=torch.preserve_format):
    if not is_plain(self) and inner_tensors(self):
        return self.to(torch.device("cpu"), memory_format=memory_format)
    if not is_plain(self) or gpu_of(self) is None:
        return _raw_cpu(self, memory_format=memory_format)
    return move(self, torch.device("cpu"), memory_format=memory_format)


def type_as(self, other):
    return self.to(other.device, other.dtype)


def setitem(self, index, value):
    crosses = isinstance(value, torch.Tensor) and gpu_of(self) is not gpu_of(value)
    if crosses and (
        torch.is_grad_enabled()
        and value.requires_grad  # its gradient comes back
        or value.dim() == 0
        and gpu_of(value)  # C++ copies it if it is on a GPU
    ):
        value = value.to(self.device)
    _raw_setitem(self, index, value)


def copy_(self, source, non_blocking=False):
    if isinstance(self, FakeTensor) and self.device.type == "cuda":
        # Python's method would ask for CUDA, and the operation does not
        return torch.ops.aten.copy_.default(self, source, non_blocking)
    crosses = isinstance(source, torch.Tensor) and gpu_of(self) is not gpu_of(source)
    if crosses and torch.is_grad_enabled() and source.requires_grad:
        source = source.to(self.device)  # so that its gradient finds the way back
    return _raw_copy(self, source, non_blocking)


def parse_module_to(*args, **kwargs):
    """`nn.Module.to` reads its arguments with this."""
    first = args[0] if args else kwargs.get("tensor")
    if isinstance(first, torch.Tensor):  # to(other)
        memory_format = kwargs.get("memory_format")
        return first.device, first.dtype, any(args[1:2]), memory_format
    if args and isinstance(args[0], int):
        args = (torch.device("cuda", args[0]), *args[1:])
    if isinstance(kwargs.get("device"), int):
        kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
    return raw_parse_to(*args, **kwargs)
