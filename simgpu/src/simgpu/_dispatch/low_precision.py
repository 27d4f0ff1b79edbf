"""Products of bfloat16 and float16, computed in float32 and rounded once.

Models: what the cards do, which add products of half-precision numbers in float32. The
CPU's own kernels do the same where the CPU has instructions for it. Where it has not,
they take some thirty times as long, and round in another order: the values of a program
would depend on the machine. Leaves out: split-K reductions in half precision, which
`torch.backends.cuda.matmul` may allow.
"""

from collections.abc import Callable

import torch

from simgpu._dispatch.operation import handles
from simgpu._dispatch.operation_call import Call

HALF = (torch.bfloat16, torch.float16)


def widened(function: Callable) -> Callable:
    """A function that takes half precision in float32, and rounds all results."""

    def compute(*args, **kwargs):
        half = next((v.dtype for v in (*args, *kwargs.values()) if is_half(v)), None)
        if half is None:
            return function(*args, **kwargs)
        wide = {name: v.float() if is_half(v) else v for name, v in kwargs.items()}
        out = function(*(v.float() if is_half(v) else v for v in args), **wide)
        if isinstance(out, torch.Tensor):
            return out.to(half)
        return tuple(v.to(half) if isinstance(v, torch.Tensor) else v for v in out)

    compute.computes = function
    return compute


def is_half(value: object) -> bool:
    """Whether it is a tensor of bfloat16 or float16."""
    return isinstance(value, torch.Tensor) and value.dtype in HALF


def _take_out_dtype(call: Call) -> None:
    """`out_dtype=` of a product, which CUDA alone has: float32 is not rounded.

    Raises:
        RuntimeError: for types that CUDA refuses, in its words.
    """
    __tracebackhide__ = True
    kwargs = dict(call.kwargs)
    args = list(call.args)
    dtype = kwargs.pop("out_dtype") if "out_dtype" in kwargs else args.pop()
    out = kwargs.get("out")
    left, right = args[-2:]
    if left.dtype is not right.dtype:
        batches = "batch1 and batch2 must have the same dtype"
        is_batch = "bmm" in call.operation.name
        raise RuntimeError(batches if is_batch else "input dtypes must be the same")
    if dtype is not left.dtype and (dtype is not torch.float32 or not is_half(left)):
        raise RuntimeError(
            "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs"
        )
    if out is not None and out.dtype is not dtype:
        raise RuntimeError(
            "out_dtype must be the same as the dtype of the provided out tensor"
        )
    product_of = getattr(torch.ops.aten, call.operation.name).default

    def compute(*tensors, out=None, **numbers):
        found = product_of(
            *(t.float() if is_half(t) else t for t in tensors), **numbers
        )
        found = found.to(dtype)
        return found if out is None else out.resize_(found.shape).copy_(found)

    call.func, call.args, call.kwargs = compute, tuple(args), kwargs


@handles(
    "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "convolution",
    "convolution_backward",
)  # fmt: skip
def product(call: Call):
    """A product where its tensors are; PyTorch refuses tensors of several types."""
    __tracebackhide__ = True
    gpu = call.common_gpu()
    half = call.tensors[0].dtype
    if gpu is not None and "out_dtype" in call.operation.arguments:
        _take_out_dtype(call)
    elif gpu is not None and half in HALF and not call.operation.writes:
        if all(tensor.dtype is half for tensor in call.tensors):
            call.func = widened(call.func)
    return call.run_on(gpu)
