"""Values that only a kernel of CUDA can see are wrong: an assert on the device.

On the CPU an index out of range is an error of the call. CUDA's kernel finds it later:
the call returns, the kernel prints its assertion, and the next call that waits for the
GPU raises. From then on the GPU is of no use to the process: each kernel and each copy
raises again. Models: which operations assert, when it is raised, and that
`CUDA_LAUNCH_BLOCKING=1` raises at the call; a line of our own says which call it was.
Leaves out: a line for each thread that fails, and the numbers of lines in PyTorch's
files. The results, which nobody gets to see, are those of indices that are zero.
"""

import os
import re
from collections.abc import Callable
from typing import NamedTuple

import torch

from simgpu._cuda_errors import words_of_cuda
from simgpu._frames import called_from
from simgpu._lines import write_line

_INDEX = '"index out of bounds"'
_SCATTER = f"idx_dim >= 0 && idx_dim < index_size && {_INDEX}"
_GATHER = (
    'ind >=0 && ind < ind_dim_size && "vectorized gather kernel index out of bounds"'
)
_PROBABILITY = "probability tensor contains either `inf`, `nan` or element < 0"
_CLASS = "t >= 0 && t < n_classes"
_INTEGERS = (torch.int64, torch.int32)
_ERROR_ASSERT = 710  # cudaErrorAssert


class _Assertion(NamedTuple):
    """Of a kernel: the file of aten/src/ATen/native/cuda, the function, what holds."""

    file: str
    function: str
    condition: str


_ASSERTIONS = {
    **dict.fromkeys(
        ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"),
        _Assertion("IndexKernel.cu", "operator()",
                   f"-sizes[i] <= index && index < sizes[i] && {_INDEX}"),
    ),
    **dict.fromkeys(
        ("gather", "scatter", "scatter_", "scatter_add", "scatter_add_",
         "scatter_reduce", "scatter_reduce_"),
        _Assertion("ScatterGatherKernel.cu", "operator()", _SCATTER),
    ),
    **dict.fromkeys(
        ("embedding", "index_select"),
        _Assertion("IndexKernelUtils.cu", "vectorized_gather_kernel", _GATHER),
    ),
    **dict.fromkeys(
        ("index_add", "index_add_"),
        _Assertion("Indexing.cu", "indexFuncSmallIndex", "dstIndex < dstAddDimSize"),
    ),
    **dict.fromkeys(
        ("index_copy", "index_copy_"),
        _Assertion("IndexKernel.cu", "operator()", 'idx >= 0 && idx < self_dim_size && '
                   '"index_copy_(): index out of bounds"'),
    ),
    **dict.fromkeys(
        ("index_fill", "index_fill_"),
        _Assertion("IndexKernel.cu", "operator()", "idx >= -self_dim_size && idx < "
                   'self_dim_size && "Index out of bounds"'),
    ),
    **dict.fromkeys(
        ("take", "put", "put_"),
        _Assertion("IndexKernel.cu", "operator()", "offset < numel && "
                   '"cuda_take_put_kernel() index out of bounds"'),
    ),
    **{
        f"nll_loss_{way}": _Assertion(
            "Loss.cu", f"nll_loss_{way}_reduce_cuda_kernel_2d", _CLASS
        )
        for way in ("forward", "backward")
    },
    **{
        f"nll_loss2d_{way}": _Assertion(
            "NLLLoss2d.cu", f"nll_loss2d_{way}_kernel", _CLASS
        )
        for way in ("forward", "backward")
    },
    **dict.fromkeys(
        ("_embedding_bag", "_embedding_bag_forward_only"),
        _Assertion("EmbeddingBag.cu", "EmbeddingBag_updateOutputKernel_sum_mean",
                   "input_idx < numRows"),
    ),
    **dict.fromkeys(
        ("multi_margin_loss", "multi_margin_loss_backward"),
        _Assertion("MultiMarginLoss.cu", "MultiMarginLoss_forward_kernel",
                   "target_k >= 0 && target_k < dim && "
                   '"target index is out of bounds"'),
    ),
    **dict.fromkeys(
        ("multilabel_margin_loss_forward", "multilabel_margin_loss_backward"),
        _Assertion("MultiLabelMarginCriterion.cu",
                   "multilabel_margin_loss_forward_kernel", "target_idx < dim"),
    ),
    **dict.fromkeys(
        ("binary_cross_entropy", "binary_cross_entropy_backward"),
        _Assertion("Loss.cu", "operator()", "input_val >= zero && input_val <= one"),
    ),
    "multinomial": _Assertion("TensorCompare.cu", "_assert_async_cuda_kernel",
                              _PROBABILITY),
    "_assert_async": _Assertion("TensorCompare.cu", "_assert_async_cuda_kernel",
                                "input[0] != 0"),
}  # fmt: skip
# what the CPU says of such values; all else is found on the host on CUDA, too
_FOUND_BY_KERNEL = re.compile(
    r"out of (bounds|range)|not in the valid range|between 0 and 1|"
    r"Expected Tensor with single nonzero value|" + re.escape(_PROBABILITY)
)


def asserting(name: str, run: Callable) -> Callable:
    """What runs an operation of aten, with the assertions of CUDA's kernel for it."""
    assertion = _ASSERTIONS.get(name)
    if assertion is None:
        return run

    def run_asserting(call):
        __tracebackhide__ = True
        try:
            return run(call)
        except (IndexError, RuntimeError) as error:
            gpu = next(filter(None, call.gpus), None)
            if gpu is None or not _FOUND_BY_KERNEL.search(str(error)):
                raise
            out = _without_wrong_values(call, gpu, error)
            fail(call.runtime, gpu.index, name, error)
            return out

    return run_asserting


def fail(runtime, index: int, name: str, error: Exception) -> None:
    """The kernel of an operation asserts; the GPU will be of no use.

    Raises:
        torch.AcceleratorError: if the program asked that each launch waits.
    """
    __tracebackhide__ = True
    if index not in runtime.failed:
        file, function, condition = _ASSERTIONS[name]
        write_line(
            f"/pytorch/aten/src/ATen/native/cuda/{file}: {function}: block: [0,0,0], "
            f"thread: [0,0,0] Assertion `{condition}` failed.\n"
            f"simgpu: on cuda:{index}, {name} in {called_from()}: "
            f"{str(error).splitlines()[0]}"
        )
        if not runtime.failed:
            _watch(runtime.clock, runtime.failed)
        runtime.failed[index] = False
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        report(runtime.failed, index)


def _without_wrong_values(call, gpu, error: Exception):
    """The results of a call, whatever is in them, as tensors of the right shape.

    Raises:
        Exception: the CPU's, if it has none.
    """
    if call.operation.name == "_assert_async":
        return None
    args, kwargs = harmless(call.operation.name, call.args, call.kwargs)
    again = type(call)(call.runtime, call.operation, call.operation.func, args, kwargs)
    try:
        return again.run_on(gpu)
    except (IndexError, RuntimeError):
        raise error from None


def harmless(name: str, args, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments of an operation with which no kernel asserts, in the same shapes."""
    first = next((a for a in args if isinstance(a, torch.Tensor)), None)

    def without(value):
        if isinstance(value, (list, tuple)):
            return type(value)(without(item) for item in value)
        if isinstance(value, torch.Tensor) and value.dtype in _INTEGERS:
            return torch.zeros_like(value) if value is not first else value
        return value

    made = tuple(map(without, args))
    if name == "embedding":  # its first tensor is the weight
        made = (args[0], torch.zeros_like(args[1]), *made[2:])
    if name in ("multinomial", "binary_cross_entropy", "binary_cross_entropy_backward"):
        made = tuple(
            torch.full_like(v, 0.5) if isinstance(v, torch.Tensor) else v for v in made
        )
    return made, {key: without(value) for key, value in kwargs.items()}


def is_found_by_kernel(name: str, error: Exception) -> bool:
    """Whether only a kernel of CUDA would find what the CPU says of an operation."""
    return name in _ASSERTIONS and bool(_FOUND_BY_KERNEL.search(str(error)))


def check(failed: dict[int, bool], gpus) -> None:
    """The host waits for GPUs.

    Args:
        failed: the GPUs of which a kernel has asserted -> whether that was raised.
        gpus: the numbers of those that it waits for.

    Raises:
        torch.AcceleratorError: if a kernel of one of them has asserted.
    """
    __tracebackhide__ = True
    for index in gpus:
        if index in failed:
            report(failed, index)


def report(failed: dict[int, bool], index: int) -> None:
    """Raise what has happened on a GPU."""
    __tracebackhide__ = True
    failed[index] = True
    error = torch.AcceleratorError(
        words_of_cuda("device-side assert triggered", "cudaErrorAssert")
    )
    error.error_code = _ERROR_ASSERT
    raise error


def _watch(clock, failed: dict[int, bool]) -> None:
    """From now on each call of the clock asks whether its GPUs are of use.

    Only after a kernel has asserted, so that no call is slower before.
    """

    def before(name: str, ask: Callable) -> None:
        run = getattr(clock, name)

        def asked(*args, **kwargs):
            __tracebackhide__ = True
            ask(*args, **kwargs)
            return run(*args, **kwargs)

        setattr(clock, name, asked)

    def launch(gpu, *_, **__):
        __tracebackhide__ = True
        if failed.get(gpu.index):
            report(failed, gpu.index)

    def copy(source, target, nbytes, streams, pinned=False, wait=True):
        __tracebackhide__ = True
        ends = [gpu.index for gpu in (source, target) if gpu is not None]
        waits = len(ends) == 1 and (wait or not pinned)
        check(failed, [i for i in ends if waits or failed.get(i)])

    def wait_for_gpu(gpu):
        __tracebackhide__ = True
        check(failed, [gpu.index])

    def of_stream(index, *_):
        __tracebackhide__ = True
        check(failed, [index])

    def of_any(*_):
        __tracebackhide__ = True
        check(failed, list(failed))

    before("kernel", launch)
    before("spin", launch)
    before("meet", launch)
    before("copy", copy)
    before("wait_for_gpu", wait_for_gpu)
    before("wait_for_stream", of_stream)
    before("stream_done", of_stream)
    before("wait_for_position", of_any)
    before("reached", of_any)
