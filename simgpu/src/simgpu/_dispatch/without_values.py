"""Operations on tensors without values: what `simgpu.estimate` runs.

A tensor on a simulated GPU is then one on PyTorch's device "meta", which has a shape
and a storage of so many bytes, but no memory; its storage is marked like any other. So
the same operations are seen, allocated and timed, and PyTorch's own code for "meta"
works out the shapes. Leaves out whatever the host would have to read, but for one
assumption: `GradScaler` finds no gradient that is infinite or NaN.
"""

import functools
from typing import NamedTuple

import torch

from simgpu._dispatch.named_devices import META
from simgpu._dispatch.operation_call import Call
from simgpu._dispatch.placement import storage_of, tensors_in
from simgpu._errors import NotSimulated

# operations that read values -> what a program calls them
_READERS = {
    "_local_scalar_dense": "item()",
    "_to_copy": "a copy to the host",
    "copy_": "a copy to the host",
    "index": "indexing with a mask",
    "index_put_": "indexing with a mask",
}


class CallWithoutValues(Call):
    """A call whose GPU tensors are on "meta".

    To C++ "meta" is the device of all it sees, and so stands for the GPU.

    Raises:
        NotSimulated: where a value would be read, for collectives, and for tensors on
            "meta" that nobody has put on the GPU.
    """

    __slots__ = ("is_of_cpp",)

    def __init__(self, runtime, operation, func, args, kwargs):
        __tracebackhide__ = True
        super().__init__(runtime, operation, func, args, kwargs)
        device = kwargs.get("device")
        repeated = device is not None and device.type == "meta"
        if repeated:
            self.kwargs = {**kwargs, "device": runtime.gpus[0].device}
        # C++ makes a tensor of its own: with values, that is on the host and no kernel
        self.is_of_cpp = repeated and not self.tensors
        for tensor, gpu in zip(self.tensors, self.gpus, strict=True):
            if gpu is not runtime.gpus[0] and (gpu is not None or tensor.is_meta):
                raise NotSimulated(
                    f"{operation.name} of a tensor that is not on the estimated card",
                    "Pass it, or its module or optimizer, to simgpu.estimate.",
                )
        if operation.func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            raise NotSimulated(
                f"{operation.name} in simgpu.estimate", "Use estimate_collective."
            )
        if operation.size_is_read_back:
            self.read_values()
        special = _ON_META.get(operation.name)
        if special is not None:
            self.func = functools.partial(special, operation.func)

    def read_values(self) -> None:
        __tracebackhide__ = True
        name = self.operation.name
        if name == "_local_scalar_dense":
            value = getattr(storage_of(self.tensors[0]), "_simgpu_value", None)
            if value is not None:
                self.func = lambda *_: value
                return
        raise NotSimulated(
            f"reading values ({_READERS.get(name, name)})",
            "simgpu.estimate knows the shapes of tensors alone.",
        )

    def is_logged(self) -> bool:
        return super().is_logged() and not self.is_of_cpp

    def run_on(self, gpu):
        """Work out the shape of its result, as if it were computed on `gpu`."""
        __tracebackhide__ = True
        if gpu is not None:
            key = self._key() if self.operation.makes and self.tensors else None
            self.func = functools.partial(_on_meta, gpu, key, self.func)
        return super().run_on(gpu)

    def _key(self) -> tuple | None:
        """All that the shape of the result depends on; None if that is not known."""
        if None in self.gpus:
            return None  # a CPU scalar, whose value may be a number of the program
        values = (*self.args, *self.kwargs.items())
        return self.operation.func, torch.get_default_dtype(), *map(_described, values)

    def _draw(self, gpu):
        return self.func(*self.args, **self.kwargs)  # there is nothing to draw


def _on_meta(gpu, key: tuple | None, func, *args, **kwargs):
    """The result of `func`, to which tensors say that they are on "meta"."""
    if key in _known_results:
        return _known_results[key].made()
    gpu.alive = False
    try:
        out = func(*args, **kwargs)
    finally:
        gpu.alive = True
    if key is not None:
        _remember(key, out, tensors_in((*args, *kwargs.values())))
    return out


# -- results that were worked out before -----------------------------------------------


class _Result(NamedTuple):
    """The result of an operation whose tensors have memory of their own."""

    kind: type  # torch.Tensor, tuple or list
    parts: list  # (shape, strides, type) of each tensor; what is no tensor, itself

    def made(self):
        """The same again, with new tensors."""
        made = [_empty(*p) if type(p) is tuple else p for p in self.parts]
        return made[0] if self.kind is torch.Tensor else self.kind(made)


_MOST_KNOWN = 100_000
_known_results: dict[tuple, _Result] = {}


def _described(value):
    """What a shape may depend on of an argument, as something to look up by."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.layout
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return type(value), value  # 1, 1.0 and True are equal


def _empty(shape, strides, dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=META)


def _remember(key: tuple, out, inputs: list[torch.Tensor]) -> None:
    """Keep what can be made again: plain tensors that share no memory."""
    parts = [out] if isinstance(out, torch.Tensor) else out
    if not isinstance(parts, (list, tuple)):
        return
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    storages = [storage_of(tensor) for tensor in tensors]
    others = [storage_of(tensor) for tensor in inputs]
    for i, (tensor, storage) in enumerate(zip(tensors, storages, strict=True)):
        shared = any(storage is other for other in (*storages[:i], *others))
        if shared or not tensor.is_meta or tensor.layout is not torch.strided:
            return
        again = _empty(tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.storage_offset() or again.nbytes != storage.nbytes():
            return
    if len(_known_results) >= _MOST_KNOWN:
        _known_results.clear()
    kept = [
        (part.shape, part.stride(), part.dtype)
        if isinstance(part, torch.Tensor)
        else part
        for part in parts
    ]
    _known_results[key] = _Result(type(out), kept)


# Where PyTorch has no code for "meta", or its results are not those of a GPU tensor:
# each function takes PyTorch's own and its arguments.


def _find_no_infinity(func, gradients, found_inf, inverse_scale) -> None:
    """`GradScaler.unscale_`, where all gradients are finite."""
    storage_of(found_inf)._simgpu_value = 0.0


def _update_scale(func, scale, *args):
    return scale


def _convolve(func, x, weight, *args):
    """In channels_last if one of the two is."""
    out = func(x, weight, *args)
    last = torch.channels_last if out.dim() == 4 else torch.channels_last_3d
    if out.dim() < 4 or not any(_is_only(last, tensor) for tensor in (x, weight)):
        return out
    return out.contiguous(memory_format=last)


def _is_only(memory_format, tensor) -> bool:
    return not tensor.is_contiguous() and tensor.is_contiguous(
        memory_format=memory_format
    )


def _normalize_batch(func, x, weight, bias, mean, variance, training, *args):
    """In evaluation it keeps nothing for backward."""
    out, *kept = func(x, weight, bias, mean, variance, training, *args)
    return out, *(kept if training else [tensor.new_empty(0) for tensor in kept])


def _normalize_batch_backward(func, *args):
    """Only the gradients that are asked for, which the last argument says."""
    results = zip(func(*args), args[-1], strict=True)
    return tuple(gradient if wanted else None for gradient, wanted in results)


_ON_META = {
    "_amp_foreach_non_finite_check_and_unscale_": _find_no_infinity,
    "_amp_update_scale_": _update_scale,
    "convolution": _convolve,
    "native_batch_norm": _normalize_batch,
    "native_batch_norm_backward": _normalize_batch_backward,
}
