"""Version counters of what an operation's own kernel counts as changed.

Mostly a kernel above the dispatch mode does it (`ADInplaceOrView`), and refuses tensors
of inference mode. Operations that write a list have none: what their kernels call
counts, or they do. Both are below the mode, where nothing counts.
"""

from collections.abc import Callable

import torch
from torch.autograd.graph import increment_version

from simgpu._compat import DispatchKey, has_kernel
from simgpu._dispatch.placement import is_dense, tensors_in

_OF_INFERENCE = (
    "Inplace update to inference tensor outside InferenceMode is not allowed.You can "
    "make a clone to get a normal tensor before doing inplace update.See "
    "https://github.com/pytorch/rfcs/pull/17 for more details."
)
COUNTS = DispatchKey.ADInplaceOrView


def counting(operation, run: Callable) -> Callable:
    """What runs an operation, and counts what its kernels would."""
    func, name = operation.func, operation.name
    if name.startswith("_foreach_") and name.endswith("_"):
        return _counts_in_place(run)
    outs = [a for a in operation.arguments.values() if a.is_out]
    if not outs or func.namespace != "aten" or has_kernel(func.name(), COUNTS):
        return run
    if has_kernel(func.name(), DispatchKey.CompositeImplicitAutograd):
        return run  # its parts count
    return _counts_outs(name, [a.name for a in outs], run)


def _counts_in_place(run: Callable) -> Callable:
    """Foreach operations: `increment_version` in ForeachBinaryOpList.cu and its kin."""

    def run_and_count(call):
        __tracebackhide__ = True
        results = run(call)
        count(call.args[0])
        return results

    return run_and_count


def _counts_outs(name: str, outs: list[str], run: Callable) -> Callable:
    """They `copy_` into each result."""
    resizes = name in ("split_with_sizes_copy", "unbind_copy")  # by `resize_`

    def run_and_count(call):
        __tracebackhide__ = True
        written = tensors_in([call.kwargs.get(out) for out in outs])
        shapes = [tensor.shape for tensor in written]
        quiet = name == "split_with_sizes_copy" and _is_one_kernel(call, written)
        results = run(call)
        if resizes:
            count([t for t, s in zip(written, shapes, strict=True) if t.shape != s])
        if not quiet:
            count(written)
        return results

    return run_and_count


def _is_one_kernel(call, outs: list[torch.Tensor]) -> bool:
    """Whether CUDA splits by a kernel of its own, which counts and refuses nothing.

    `split_with_sizes_copy_out_cuda` in TensorShape.cu.
    """
    given = call.tensors[0]
    return call.gpus[0] is not None and all(
        is_dense(tensor) and tensor.dtype == given.dtype for tensor in (given, *outs)
    )


def count(written) -> None:
    """They have changed.

    Raises:
        RuntimeError: if one is of inference mode, outside of it.
    """
    __tracebackhide__ = True
    increment_version(written)  # of inference tensors, Python's does nothing
    if not torch.is_inference_mode_enabled():
        if any(tensor.is_inference() for tensor in written):
            raise RuntimeError(_OF_INFERENCE)
