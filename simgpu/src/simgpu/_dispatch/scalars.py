"""Tensors without dimensions on another device than the rest of an operation.

CUDA lets one of the CPU's join most kernels that work element by element (those that
PyTorch's native_functions.yaml excuses from its check of devices, "NoCheck"): PyTorch's
TensorIterator passes its value along. It must not be written to. A few operations read
such a value on the host, or copy it to their device, wherever it is.

Sources: TensorIteratorBase::compute_types, Fill.cpp, TensorCompare.cpp (`where`),
TensorAdvancedIndexing.cpp, cuda/IndexKernel.cu (`masked_fill_`).
"""

import functools

import torch

from simgpu._dispatch.declarations import declaration, has_cuda_kernel

_raw_register_hook = torch.Tensor.register_hook
# TensorIterator is not told that scalars may join
_WITHOUT_SCALARS = {"addcdiv", "addcdiv_", "binary_cross_entropy"}
_TOO_MANY = "Trying to pass too many CPU scalars to non-CPU kernel!"
# CUDA's kernel passes along the value of `tensor2` only
_ADDCMUL = (
    "CPU Scalar support for self argument is not supported when calling addcmul on "
    "CUDA tensors.",
    "CPU Scalar support for tensor1 argument is not supported when calling addcmul on "
    "CUDA tensors. However, CPU Scalar support for tensor2 is supported, please swap "
    "your tensor1 and tensor2 terms.",
)


@functools.cache
def joins_scalars(func) -> bool:
    """Whether CUDA lets a CPU tensor without dimensions join this operation."""
    name = func._schema.name.removeprefix("aten::")
    entry = declaration(func)
    if "NoCheck" in entry:
        return name not in _WITHOUT_SCALARS
    return torch.Tag.pointwise in func.tags and not has_cuda_kernel(entry)


def joining(call) -> list[torch.Tensor]:
    """The CPU tensors without dimensions that may join a call on a GPU.

    Raises:
        RuntimeError: if they are too many, or in the wrong place.
    """
    if not joins_scalars(call.operation.func):
        return []
    written = [
        tensor
        for argument, tensor in call.named_arguments()
        if argument.name in call.operation.writes
    ]
    found = [
        tensor
        for tensor, gpu in zip(call.tensors, call.gpus, strict=True)
        if gpu is None and tensor.dim() == 0 and tensor.device.type == "cpu"
        and not any(tensor is other for other in written)
    ]  # fmt: skip
    if call.operation.name in ("addcmul", "addcmul_"):
        for tensor, words in zip(call.args[:2], _ADDCMUL, strict=True):
            if any(tensor is scalar for scalar in found):
                raise RuntimeError(words)
    if len(found) > 1 and "out" not in call.kwargs:
        raise RuntimeError(_TOO_MANY)
    return found


def send_gradient_back(runtime, scalar: torch.Tensor) -> None:
    """A scalar that joined an operation elsewhere gets its gradient where it is."""
    if scalar.requires_grad and scalar not in runtime.scalars_with_hook:
        runtime.scalars_with_hook.add(scalar)
        device = scalar.device
        _raw_register_hook(scalar, lambda gradient: gradient.to(device))
