"""Operations on tensors without values: what `simgpu.estimate` runs.

A tensor on a simulated GPU is then one on PyTorch's device "meta", which has a shape
and a storage of so many bytes, but no memory; its storage is marked like any other. So
the same operations are seen, allocated and timed, and PyTorch's own code for "meta"
works out the shapes: see `result_shapes.py`. Leaves out whatever the host would have to
read, but for one assumption: `GradScaler` finds no gradient that is infinite or NaN.
"""

import functools

import torch

from simgpu._dispatch.named_devices import META
from simgpu._dispatch.operation_call import Call
from simgpu._dispatch.placement import storage_of, tensors_in
from simgpu._dispatch.result_shapes import Known, Part, as_on_gpu, key_of, result_of
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
        special = _NEEDS_NONE.get(operation.name)
        if special is not None:
            self.func = functools.partial(special, operation.func)
        else:
            self.func = as_on_gpu(func)

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
        return key_of(self.operation.func, self.args, self.kwargs)

    def _draw(self, gpu):
        return self.func(*self.args, **self.kwargs)  # there is nothing to draw


def _on_meta(gpu, key: tuple | None, func, *args, **kwargs):
    """The result of `func`, to which tensors say that they are on "meta"."""
    if key in _known:
        return _known[key].made(_new)
    gpu.alive = False
    try:
        out = func(*args, **kwargs)
    finally:
        gpu.alive = True
    if key is not None:
        _remember(key, out, tensors_in((*args, *kwargs.values())))
    return out


# -- results that were worked out before -----------------------------------------------

_known = Known()


def _new(part: Part) -> torch.Tensor:
    return torch.empty_strided(part.shape, part.strides, dtype=part.dtype, device=META)


def _remember(key: tuple, out, inputs: list[torch.Tensor]) -> None:
    """Keep what can be made again: plain tensors that share no memory."""
    if not isinstance(out, (torch.Tensor, list, tuple)):
        return
    tensors = tensors_in([out])
    storages = [storage_of(tensor) for tensor in tensors]
    others = [storage_of(tensor) for tensor in inputs]
    for i, (tensor, storage) in enumerate(zip(tensors, storages, strict=True)):
        shared = any(storage is other for other in (*storages[:i], *others))
        if shared or not tensor.is_meta or tensor.layout is not torch.strided:
            return
        part = Part(tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.storage_offset() or part.nbytes != storage.nbytes():
            return
    _known.keep(key, result_of(out))


# -- what reads values in PyTorch, and need not here -----------------------------------
# each function takes PyTorch's own and its arguments


def _find_no_infinity(func, gradients, found_inf, inverse_scale) -> None:
    """`GradScaler.unscale_`, where all gradients are finite."""
    storage_of(found_inf)._simgpu_value = 0.0


def _update_scale(func, scale, *args):
    return scale


_NEEDS_NONE = {
    "_amp_foreach_non_finite_check_and_unscale_": _find_no_infinity,
    "_amp_update_scale_": _update_scale,
}
