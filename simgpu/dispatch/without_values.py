"""Operations on tensors without values: what `simgpu.estimate` runs.

A tensor on a simulated GPU is then one on PyTorch's device "meta", which has a shape
and a storage of so many bytes, but no memory; its storage is marked like any other. So
the same operations are seen, allocated and timed, and PyTorch's own code for "meta"
works out the shapes. Leaves out whatever the host would have to read, but for one
assumption: `GradScaler` finds no gradient that is infinite or NaN.
"""

import functools

import torch

from simgpu.dispatch.call import Call
from simgpu.dispatch.placement import gpu_of, storage_of
from simgpu.errors import NotSimulated

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

    __slots__ = ()

    def __init__(self, runtime, operation, func, args, kwargs):
        __tracebackhide__ = True
        super().__init__(runtime, operation, func, args, kwargs)
        device = kwargs.get("device")
        if device is not None and device.type == "meta":
            self.kwargs = {**kwargs, "device": runtime.gpus[0].device}
        for tensor in self.tensors:
            gpu = gpu_of(tensor)
            if gpu is not runtime.gpus[0] and (gpu is not None or tensor.is_meta):
                raise NotSimulated(
                    f"{operation.name} of a tensor that is not on the estimated card",
                    "Pass it, or its module or optimizer, to simgpu.estimate.",
                )
        if func.namespace in ("c10d", "_c10d_functional"):
            raise NotSimulated(
                f"{operation.name} in simgpu.estimate", "Use estimate_collective."
            )
        if operation.size_is_read_back:
            self.read_values()
        special = _ON_META.get(operation.name)
        if special is not None:
            self.func = functools.partial(special, func)

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

    def run_on(self, gpu):
        """Work out the shape of its result, as if it were computed on `gpu`."""
        __tracebackhide__ = True
        if gpu is not None:
            self.func = functools.partial(_on_meta, gpu, self.func)
        return super().run_on(gpu)

    def _draw(self, gpu):
        return self.func(*self.args, **self.kwargs)  # there is nothing to draw


def _on_meta(gpu, func, *args, **kwargs):
    """Call `func`, to which the tensors on `gpu` say that they are on "meta"."""
    gpu.alive = False
    try:
        return func(*args, **kwargs)
    finally:
        gpu.alive = True


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


_ON_META = {
    "_amp_foreach_non_finite_check_and_unscale_": _find_no_infinity,
    "_amp_update_scale_": _update_scale,
    "convolution": _convolve,
    "native_batch_norm": _normalize_batch,
}
