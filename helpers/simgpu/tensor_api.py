"""What tensors, storages and factory functions say while GPUs are simulated.

Each entry stands for one method or function of PyTorch and answers as on a machine
with CUDA GPUs. Whatever is not replaced here reaches `placement.Placement` as an
operation. `replacements()` is this file's part of the table that `start()` applies.
"""

import contextlib

import torch
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.overrides import _get_current_function_mode_stack
from torch.storage import UntypedStorage, _StorageBase
from torch.utils._device import DeviceContext

from helpers.simgpu import placement, streams
from helpers.simgpu.placement import NotSimulated, gpu_of, is_plain, place

_Base = torch._C.TensorBase
_raw = {  # PyTorch's own, below our replacements
    name: getattr(torch.Tensor, name)
    for name in (
        "to", "cuda", "cpu", "numpy", "type", "new", "new_tensor", "get_device",
        "tolist", "copy_", "pin_memory", "data_ptr", "share_memory_", "is_shared",
        "__dlpack__", "__repr__", "__dlpack_device__", "__setitem__", "tensor_split",
    )
}  # fmt: skip
_raw_device = _Base.device
_raw_grad = _Base.grad
_SPARSE = (
    "sparse_coo_tensor", "sparse_csr_tensor", "sparse_csc_tensor", "sparse_bsr_tensor",
    "sparse_bsc_tensor", "sparse_compressed_tensor",
)  # fmt: skip
_raw_functions = {
    name: getattr(torch, name)
    for name in (
        "tensor",
        "as_tensor",
        "asarray",
        "device",
        "range",
        "set_default_tensor_type",
        "ctc_loss",
        *_SPARSE,
    )  # fmt: skip
}
_raw_storage = {
    name: getattr(_StorageBase, name) for name in ("clone", "cpu", "cuda", "to")
}
_raw_storage_device = UntypedStorage.device
_raw_storage_data_ptr = UntypedStorage.data_ptr
_raw_storage_resize = UntypedStorage.resize_
_raw_apply_function = vars(torch.autograd.Function)["apply"].__func__
_raw_apply_backward = BackwardCFunction.apply
_raw_run_backward = torch.autograd._engine_run_backward


class Property(property):
    """A property that looks like one of C++'s, as torch 2.11's _dynamo expects."""

    __objclass__ = torch.Tensor


# -- moving ----------------------------------------------------------------------------


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
    placement.current().thread.moving = True
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
    target = placement.current().find(device)
    if gpu_of(tensor) is target:
        keep = {} if memory_format is None else {"memory_format": memory_format}
        return _raw["to"](tensor, dtype or tensor.dtype, copy=copy, **keep)
    if dtype is tensor.dtype:
        dtype = None
    device = target.device if target else device
    tangents = forward_ad._current_level >= 0
    if torch.is_grad_enabled() and tensor.requires_grad or tangents:
        return _Move.apply(tensor, device, dtype, memory_format, non_blocking)
    with torch._C.DisableTorchFunctionSubclass():
        moved = _move(tensor.detach(), device, dtype, memory_format, non_blocking)
    kind = type(tensor)
    if kind is torch.Tensor or isinstance(tensor, torch.nn.Parameter):
        return moved
    return moved.as_subclass(kind)


def _parse_to(device=None, dtype=None, non_blocking=False, copy=False, *,
              memory_format=None):  # fmt: skip
    return _device(device), dtype, copy, memory_format, non_blocking


def _device(device):
    """A torch.device for anything that names one; None stays None."""
    if device is None or isinstance(device, torch.device):
        return device
    if isinstance(device, int):
        return placement.current().find(device).device
    return _raw_functions["device"](device)


def _to(self, *args, **kwargs):
    if not is_plain(self) or self.device.type == "meta":
        return _raw["to"](self, *args, **kwargs)
    first = args[0] if args else kwargs.get("other", kwargs.get("tensor"))
    if isinstance(first, torch.Tensor):  # to(other)
        rest = {k: v for k, v in kwargs.items() if k not in ("other", "tensor")}
        args = (first.device, first.dtype, *args[1:])
        how = _parse_to(*args, **rest)
    elif isinstance(first, torch.dtype):  # to(dtype)
        return _raw["to"](self, *args, **kwargs)
    else:
        how = _parse_to(*args, **kwargs)
    if how[0] is None or how[0].type not in ("cuda", "cpu"):
        return _raw["to"](self, *args, **kwargs)
    return move(self, *how)


def _cuda(self, device=None, non_blocking=False, memory_format=None):
    if device is None:
        device = torch.device("cuda")
    device = _device(device)
    if device.type != "cuda":
        raise RuntimeError(f"Invalid device, must be cuda device, got {device.type}")
    if not is_plain(self):
        return self.to(device)
    return move(self, device, None, False, memory_format, non_blocking)


def _cpu(self, memory_format=torch.preserve_format):
    if not is_plain(self) or gpu_of(self) is None:
        return _raw["cpu"](self, memory_format=memory_format)
    return move(self, torch.device("cpu"), memory_format=memory_format)


def _type_as(self, other):
    return self.to(other.device, other.dtype)


def _setitem(self, index, value):
    crosses = isinstance(value, torch.Tensor) and gpu_of(self) is not gpu_of(value)
    if crosses and torch.is_grad_enabled() and value.requires_grad:
        value = value.to(self.device)  # so that its gradient finds the way back
    _raw["__setitem__"](self, index, value)


def _copy_(self, source, non_blocking=False):
    crosses = isinstance(source, torch.Tensor) and gpu_of(self) is not gpu_of(source)
    if crosses and torch.is_grad_enabled() and source.requires_grad:
        source = source.to(self.device)  # so that its gradient finds the way back
    return _raw["copy_"](self, source, non_blocking)


# -- asking ----------------------------------------------------------------------------


def _get_device_property(self):
    gpu = gpu_of(self)
    return _raw_device.__get__(self) if gpu is None else gpu.device


def _is_cuda(self):
    return self.device.type == "cuda"


def _is_cpu(self):
    return self.device.type == "cpu"


def _ctc_loss(log_probs, targets, input_lengths, target_lengths, *args, **kwargs):
    """torch.ctc_loss: the lengths may be anywhere, CUDA reads them on the host."""
    lengths = [
        value.tolist() if isinstance(value, torch.Tensor) else value
        for value in (input_lengths, target_lengths)
    ]
    return _raw_functions["ctc_loss"](log_probs, targets, *lengths, *args, **kwargs)


def _tensor_split(self, indices_or_sections=None, dim=0, **kwargs):
    if indices_or_sections is None:  # by one of its other names
        (indices_or_sections,) = kwargs.values()
    if isinstance(indices_or_sections, torch.Tensor) and indices_or_sections.is_cuda:
        raise RuntimeError(
            "tensor_split expected tensor_indices_or_sections to be on cpu, but it's "
            f"on {indices_or_sections.device}"
        )
    return _raw["tensor_split"](self, indices_or_sections, dim)


def _get_device(self):
    gpu = gpu_of(self)
    return _raw["get_device"](self) if gpu is None else gpu.index


def _repr(self, *, tensor_contents=None):
    """Printing is not part of the program: it leaves no trace in the log."""
    sim = placement.current()
    sim.thread.quiet += 1
    try:
        seen = sim.modes[1].look_at(self)
        return _raw["__repr__"](seen, tensor_contents=tensor_contents)
    finally:
        sim.thread.quiet -= 1


def _type(self, dtype=None, non_blocking=False, **kwargs):
    if dtype is None:
        return placement.type_name(self)
    if isinstance(dtype, _TensorTypeMeta):
        return (self.cuda() if dtype.on_gpu else self.cpu()).to(dtype.dtype)
    name = dtype if isinstance(dtype, str) else ""
    if name.startswith("torch.cuda."):
        return self.cuda().to(_DTYPES[name.removeprefix("torch.cuda.")])
    if name.startswith("torch.") and name.removeprefix("torch.") in _DTYPES:
        return self.cpu().to(_DTYPES[name.removeprefix("torch.")])
    return _raw["type"](self, dtype, non_blocking, **kwargs)


def _get_grad(self):
    return _raw_grad.__get__(self)


def _set_grad(self, value):
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


def _del_grad(self):
    _raw_grad.__delete__(self)


# -- leaving PyTorch -------------------------------------------------------------------


def _numpy(self, *, force=False):
    gpu = gpu_of(self)
    if gpu is None:
        return _raw["numpy"](self, force=force)
    if force:
        return _raw["numpy"](self.detach().cpu(), force=True)
    raise TypeError(
        f"can't convert {gpu.device} device type tensor to numpy. Use Tensor.cpu() to "
        "copy the tensor to host memory first."
    )


def _tolist(self):
    return _raw["tolist"](self if gpu_of(self) is None else self.detach().cpu())


def _dlpack(self, *args, **kwargs):
    if gpu_of(self) is not None:
        raise NotSimulated("DLPack of a GPU tensor")
    return _raw["__dlpack__"](self, *args, **kwargs)


def _dlpack_device(self):
    if gpu_of(self) is not None:
        raise NotSimulated("DLPack of a GPU tensor")
    return _raw["__dlpack_device__"](self)


def _cuda_array_interface(self):
    raise AttributeError(
        "__cuda_array_interface__: a simulated GPU tensor has no CUDA memory to share"
    )


def _pin_memory(self, device=None):
    if gpu_of(self) is not None:
        raise RuntimeError(
            f"cannot pin '{placement.type_name(self)}' only dense CPU tensors can be "
            "pinned"
        )
    if self.is_pinned():
        return self
    return torch.ops.aten._pin_memory(self)


def _is_pinned(self, device=None):
    if not is_plain(self) or self.layout != torch.strided:
        return False
    return getattr(self.untyped_storage(), "_simgpu_pinned", False)


def _record_stream(self, stream):
    gpu, block = gpu_of(self), placement.block_of(self)
    if gpu is None:
        raise NotImplementedError(
            "Could not run 'aten::record_stream' with arguments from the 'CPU' backend."
        )
    if block is not None:
        gpu.memory.record_stream(block, stream.stream_id)


def _data_ptr(self):
    """The simulated address of a GPU tensor: memory that is reused has the same."""
    block = placement.block_of(self) if gpu_of(self) is not None else None
    if block is None:
        return _raw["data_ptr"](self)
    return block.address + self.storage_offset() * self.element_size()


def _share_memory_(self):
    return self if gpu_of(self) is not None else _raw["share_memory_"](self)


def _is_shared(self):
    return gpu_of(self) is not None or _raw["is_shared"](self)


# -- making ----------------------------------------------------------------------------


def _made(tensor, device):
    """A tensor that was just built on the host, where `device` asks for it."""
    sim = placement.current()
    gpu = sim.find(device)
    if gpu is not None:
        place(tensor, gpu)
        sim.log_copy(None, gpu, tensor.numel() * tensor.element_size())
    return tensor


def _default(device):
    """What `device=` means where it was left out: the default device."""
    device = _device(device)
    if device is None:
        contexts = (
            mode.device
            for mode in reversed(_get_current_function_mode_stack())
            if isinstance(mode, DeviceContext)
        )
        device = next(contexts, None)
    return device or torch.device("cpu")


def _new_tensor_function(data, *, dtype=None, device=None, requires_grad=False,
                         pin_memory=False):  # fmt: skip
    """torch.tensor"""
    raw = _raw_functions["tensor"]
    if isinstance(data, torch.Tensor):
        device = _device(device) or data.device
        made = data.detach().to(device, dtype, copy=True)
        return made.requires_grad_() if requires_grad else made
    device = _default(device)
    if device.type not in ("cuda", "cpu"):
        return raw(data, dtype=dtype, device=device, requires_grad=requires_grad)
    with torch._C.DisableTorchFunction():  # or the mode would send it here again
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
        placement.current().log_copy(gpu_of(data), None, data.element_size())


def _as_tensor(data, dtype=None, device=None):
    if isinstance(data, torch.Tensor):
        return data.to(_device(device) or data.device, dtype or data.dtype)
    device = _default(device)
    if device.type not in ("cuda", "cpu"):
        return _raw_functions["as_tensor"](data, dtype=dtype, device=device)
    made = _raw_functions["as_tensor"](data, dtype=dtype, device="cpu")
    return made.to(device)  # a copy: what numpy shares stays on the host


def _range(*args, device=None, **kwargs):
    """torch.range, which asks no mode what its device means."""
    made = _raw_functions["range"](*args, device="cpu", **kwargs)
    return place(made, placement.current().find(_default(device)))


def _asarray(obj, *, dtype=None, device=None, copy=None, requires_grad=False):
    if isinstance(obj, torch.Tensor):
        device = _device(device) or obj.device
        if copy is False and device != obj.device:
            raise ValueError("can't alias tensor with different device")
        made = obj.to(device, dtype or obj.dtype, copy=bool(copy))
        return made.detach().requires_grad_(True) if requires_grad else made
    made = _raw_functions["asarray"](obj, dtype=dtype, device="cpu", copy=copy)
    made = made.to(_default(device))
    return made.requires_grad_() if requires_grad else made


def _new_tensor(self, data, *, dtype=None, device=None, requires_grad=False,
                pin_memory=False):  # fmt: skip
    return _new_tensor_function(
        data,
        dtype=dtype or (None if isinstance(data, torch.Tensor) else self.dtype),
        device=_device(device) or self.device,
        requires_grad=requires_grad,
        pin_memory=pin_memory,
    )


def _new(self, *args, **kwargs):
    device = _device(kwargs.pop("device", None)) or self.device
    return _made(_raw["new"](self, *args, **kwargs), device)


def _sparse_factory(name: str):
    """torch.sparse_coo_tensor and its kin, whose values may decide the device."""
    position = 1 if name == "sparse_coo_tensor" else 2

    def make(*args, device=None, **kwargs):
        values = args[position] if len(args) > position else kwargs.get("values")
        here = values.device if isinstance(values, torch.Tensor) else _default(None)
        device = _device(device) or here
        args = [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]
        kwargs = {
            key: value.to(device) if isinstance(value, torch.Tensor) else value
            for key, value in kwargs.items()
        }
        with torch._C.DisableTorchFunction():  # or the mode would send it here again
            made = _raw_functions[name](*args, device="cpu", **kwargs)
        return place(made, placement.current().find(device))

    return make


_sparse_factories = {name: _sparse_factory(name) for name in _SPARSE}


def _new_device(*args, **kwargs):
    """torch.device(1) is the GPU with index 1."""
    first = args[0] if args else kwargs.get("type")
    if isinstance(first, int) and not isinstance(first, bool):
        return _raw_functions["device"]("cuda", first)
    return _raw_functions["device"](*args, **kwargs)


def _parse_module_to(*args, **kwargs):
    """`nn.Module.to` reads its arguments with this."""
    first = args[0] if args else kwargs.get("tensor")
    if isinstance(first, torch.Tensor):  # to(other)
        memory_format = kwargs.get("memory_format")
        return first.device, first.dtype, any(args[1:2]), memory_format
    if args and isinstance(args[0], int):
        args = (torch.device("cuda", args[0]), *args[1:])
    if isinstance(kwargs.get("device"), int):
        kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
    return _raw_parse_module_to(*args, **kwargs)


_raw_parse_module_to = torch._C._nn._parse_to


# -- storages --------------------------------------------------------------------------


def _storage_device(self):
    gpu = placement.gpu_of_storage(self)
    return _raw_storage_device.__get__(self) if gpu is None else gpu.device


def _storage_data_ptr(self):
    its = getattr(self, "_simgpu", None)
    if placement.gpu_of_storage(self) is None or its.block is None:
        return _raw_storage_data_ptr(self)
    return its.block.address


def _storage_resize(self, size: int):
    """Also counts what the storage takes then."""
    _raw_storage_resize(self, size)
    its = getattr(self, "_simgpu", None)
    if placement.gpu_of_storage(self) is not None and its.nbytes != self.nbytes():
        its.resize(self.nbytes())
    return self


def _storage_bytes(storage) -> torch.Tensor:
    """The bytes of a storage as a tensor on the same device."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage)


def _storage_clone(self):
    if placement.gpu_of_storage(self) is None:
        return _raw_storage["clone"](self)
    return _storage_bytes(self).clone().untyped_storage()


def _storage_cpu(self):
    return _storage_to(self, device=torch.device("cpu"))


def _storage_cuda(self, device=None, non_blocking=False):
    return _storage_to(self, device="cuda" if device is None else device)


def _storage_to(self, *, device, non_blocking=False):
    device = _device(device)
    if device.type not in ("cuda", "cpu"):
        return _raw_storage["to"](self, device=device, non_blocking=non_blocking)
    if placement.current().find(device) is placement.gpu_of_storage(self):
        return self
    return _storage_bytes(self).to(device).untyped_storage()


def _share_cuda(self, *args, **kwargs):
    raise NotSimulated("sharing a GPU tensor between processes")


# -- autograd, optimizers --------------------------------------------------------------


def _run_backward(outputs, gradients, *args, **kwargs):
    """The engine checks the device of each gradient it is given."""
    __tracebackhide__ = True
    streams.join_streams()
    for i, (output, gradient) in enumerate(zip(outputs, gradients, strict=False)):
        if isinstance(output, torch.Tensor) and isinstance(gradient, torch.Tensor):
            if gpu_of(output) is not gpu_of(gradient) and gradient.dim() > 0:
                raise RuntimeError(
                    f"Function {output.grad_fn.name() if output.grad_fn else 'root'} "
                    f"returned an invalid gradient at index {i} - expected device "
                    f"{output.device} but got {gradient.device}"
                )
    thread = placement.current().thread
    chosen = thread.current, thread.chosen_in
    try:
        with _function_mode():
            return _raw_run_backward(outputs, gradients, *args, **kwargs)
    finally:
        thread.current, thread.chosen_in = chosen


def _function_mode():
    """Our mode for the Python code that backward runs: `Tensor.backward` pops it."""
    if any(type(m) is placement.Functions for m in _get_current_function_mode_stack()):
        return contextlib.nullcontext()
    sim = placement.current()
    return placement.Functions(sim, sim.handlers)


def _apply_function(cls, *args, **kwargs):
    """`torch.autograd.Function.apply`: its node must know where its tensors live."""
    out = _raw_apply_function(cls, *args, **kwargs)
    outputs = out if isinstance(out, tuple) else (out,)
    for tensor in placement.tensors_in(outputs):
        node = tensor.grad_fn
        if isinstance(node, BackwardCFunction):
            node._simgpu_outputs = [
                gpu_of(t) if isinstance(t, torch.Tensor) else None for t in outputs
            ]
            node._simgpu_inputs = [
                (t.requires_grad, gpu_of(t)) if isinstance(t, torch.Tensor) else None
                for t in args
            ]
            break
    return out


def _apply_backward(self, *gradients):
    """The backward of a Python Function: the engine makes and checks its gradients."""
    for gradient, gpu in zip(
        gradients, getattr(self, "_simgpu_outputs", ()), strict=False
    ):
        if isinstance(gradient, torch.Tensor) and gpu_of(gradient) is None:
            place(gradient, gpu)  # zeros that the engine made for an unused output
    out = _raw_apply_backward(self, *gradients)
    results = list(out) if isinstance(out, tuple) else [out]
    inputs = getattr(self, "_simgpu_inputs", ())
    position = -1
    for i, (gradient, its) in enumerate(zip(results, inputs, strict=False)):
        if its is None:
            continue
        position += 1
        wanted, gpu = its
        if not wanted or not isinstance(gradient, torch.Tensor):
            continue
        if gpu_of(gradient) is not gpu:
            device = gpu.device if gpu else torch.device("cpu")
            if gradient.dim():
                raise RuntimeError(
                    f"Function {self.name()} returned an invalid gradient at index "
                    f"{position} - expected device {device} but got {gradient.device}"
                )
            results[i] = gradient.to(device)
    return tuple(results) if isinstance(out, tuple) else results[0]


def _group_by_device_and_dtype(lists, with_indices=False):
    """Optimizers make one group for each device and dtype."""
    groups: dict = {}
    for i, first in enumerate(lists[0]):
        key = (first.device, first.dtype)
        if key not in groups:
            groups[key] = ([[] for _ in lists], [])
        columns, indices = groups[key]
        for column, tensors in zip(columns, lists, strict=True):
            if tensors:
                column.append(tensors[i])
        if with_indices:
            indices.append(i)
    return groups


# -- old names of tensor types ---------------------------------------------------------

_DTYPES = {name: dtype for dtype, name in placement._LEGACY.items()}
_raw_types = {name: getattr(torch, name) for name in _DTYPES}


class _TensorTypeMeta(type):
    def __instancecheck__(cls, value):
        if not isinstance(value, torch.Tensor) or value.dtype is not cls.dtype:
            return False
        return value.is_cuda is cls.on_gpu and value.layout is torch.strided

    def __str__(cls):
        return f"{cls.__module__}.{cls.__name__}"

    __repr__ = __str__


class TensorType(metaclass=_TensorTypeMeta):
    """`torch.FloatTensor`, `torch.cuda.FloatTensor` and their kin."""

    dtype: torch.dtype
    on_gpu: bool

    def __new__(cls, *args, **kwargs):
        if not cls.on_gpu:
            return _raw_types[cls.__name__](*args, **kwargs)
        raise NotSimulated(
            f"the constructor {cls}", 'Write torch.tensor(..., device="cuda").'
        )


def _tensor_types(module, on_gpu: bool) -> list[tuple[object, str, object]]:
    return [
        (
            module,
            name,
            _TensorTypeMeta(
                name,
                (TensorType,),
                {"dtype": dtype, "on_gpu": on_gpu, "__module__": module.__name__},
            ),
        )
        for name, dtype in _DTYPES.items()
    ]


def _set_default_tensor_type(kind):
    """torch.set_default_tensor_type"""
    if isinstance(kind, str):
        package, _, name = kind.rpartition(".")
        kind = getattr(torch.cuda if package == "torch.cuda" else torch, name, kind)
    if isinstance(kind, _TensorTypeMeta):
        if kind.on_gpu:
            raise NotSimulated(
                f"torch.set_default_tensor_type({kind})",
                'Write torch.set_default_device("cuda").',
            )
        kind = _raw_types[kind.__name__]
    return _raw_functions["set_default_tensor_type"](kind)


def replacements() -> list[tuple[object, str, object]]:
    """(owner, attribute, new value) for everything in this file."""
    tensor_methods = {
        "to": _to,
        "cuda": _cuda,
        "cpu": _cpu,
        "copy_": _copy_,
        "type_as": _type_as,
        "__setitem__": _setitem,
        "device": Property(_get_device_property),
        "is_cuda": Property(_is_cuda),
        "is_cpu": Property(_is_cpu),
        "get_device": _get_device,
        "grad": Property(_get_grad, _set_grad, _del_grad),
        "type": _type,
        "__repr__": _repr,
        "numpy": _numpy,
        "tolist": _tolist,
        "__dlpack__": _dlpack,
        "__dlpack_device__": _dlpack_device,
        "__cuda_array_interface__": Property(_cuda_array_interface),
        "pin_memory": _pin_memory,
        "record_stream": _record_stream,
        "data_ptr": _data_ptr,
        "is_pinned": _is_pinned,
        "share_memory_": _share_memory_,
        "is_shared": _is_shared,
        "new": _new,
        "new_tensor": _new_tensor,
    }
    return [
        *((torch.Tensor, name, new) for name, new in tensor_methods.items()),
        *_tensor_types(torch, on_gpu=False),
        *_tensor_types(torch.cuda, on_gpu=True),
        (torch, "set_default_tensor_type", _set_default_tensor_type),
        (torch, "get_device", _get_device),
        (torch, "tensor", _new_tensor_function),
        (torch, "as_tensor", _as_tensor),
        (torch, "asarray", _asarray),
        *((torch, name, make) for name, make in _sparse_factories.items()),
        (torch, "range", _range),
        (torch, "ctc_loss", _ctc_loss),
        (torch._C._nn, "_parse_to", _parse_module_to),
        (torch._C, "_group_tensors_by_device_and_dtype", _group_by_device_and_dtype),
        (torch.autograd, "_engine_run_backward", _run_backward),
        (torch.autograd.Function, "apply", classmethod(_apply_function)),
        (BackwardCFunction, "apply", _apply_backward),
        (UntypedStorage, "device", Property(_storage_device)),
        (UntypedStorage, "data_ptr", _storage_data_ptr),
        (UntypedStorage, "resize_", _storage_resize),
        (UntypedStorage, "_share_cuda_", _share_cuda),
        (_StorageBase, "clone", _storage_clone),
        (_StorageBase, "cpu", _storage_cpu),
        (_StorageBase, "cuda", _storage_cuda),
        (_StorageBase, "to", _storage_to),
    ]


def handlers() -> dict:
    """torch function -> what answers it, for `placement.Functions`."""
    return {
        torch.get_device: _get_device,
        _raw_functions["tensor"]: _new_tensor_function,
        _raw_functions["as_tensor"]: _as_tensor,
        _raw_functions["asarray"]: _asarray,
        **{_raw_functions[name]: make for name, make in _sparse_factories.items()},
        _raw_functions["device"]: _new_device,
        _raw_parse_module_to: _parse_module_to,
        _raw["new_tensor"]: _new_tensor,
        _raw["tensor_split"]: _tensor_split,
        torch.tensor_split: _tensor_split,
    }
