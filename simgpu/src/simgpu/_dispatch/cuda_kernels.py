"""What the CPU computes and CUDA does not: operations, quantized tensors, dtypes.

`guarded` puts a question before what runs an operation, once for each overload: only
those that CUDA refuses with some tensors have one. Operations without a kernel stand in
`without_cuda.py`. Dtypes and the names in the messages are those of PyTorch's CUDA
files (`AT_DISPATCH...` of aten/src/ATen/native/cuda), and its database of operations
(`dtypesIfCUDA`) says which are refused. Leaves out: dtypes that neither has, where the
message may name the CPU's kernel.

The other way round, `compute_as_cuda` computes in a wider dtype what only CUDA has:
some operations on half precision, on complex numbers of it, `histc` of integers, `abs`
and `trace` of booleans.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from simgpu._compat import DispatchKey, DispatchKeySet
from simgpu._dispatch.device_asserts import asserting
from simgpu._dispatch.errors import scalar_type_name
from simgpu._dispatch.without_cuda import LACKING
from simgpu._errors import NotSimulated

_NO_BACKEND = DispatchKey.HPU  # one for which PyTorch has no kernel of its own
_REAL = frozenset([torch.float16, torch.bfloat16, torch.float32, torch.float64])
_COMPLEX = frozenset([torch.complex64, torch.complex128])
_ALL_COMPLEX = _COMPLEX | {torch.complex32}
_WIDE = frozenset([torch.float32, torch.float64])
_INTEGER = frozenset(
    [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
)  # fmt: skip


class _Kernel(NamedTuple):
    """A kernel of CUDA."""

    # as its message says it, or what makes that of a call; "" if it is not refused
    name: str | Callable
    dtypes: frozenset  # that it has code for


def _convolution_name(call) -> str:
    """Which kernel convolves what cuDNN does not take."""
    x, weight = call.args[:2]
    dilation, transposed, groups = call.args[5], call.args[6], call.args[8]
    dims = max(x.dim() - 2, 2)  # one dimension is run as two
    if transposed:
        return f"slow_conv_transpose{dims}d_out_cuda"
    if groups > 1 and groups == x.shape[1] and weight.shape[0] % groups == 0:
        return "conv_depthwise2d_forward_cuda" if dims == 2 else "conv_depthwise3d"
    dilated = dims == 3 or any(step != 1 for step in dilation)
    return "slow_conv_dilated<>" if dilated else "slow_conv2d_cuda"


def _scatter_reduce_name(call) -> str:
    kind = call.argument(4, "reduce")
    return "" if kind == "sum" else f"scatter_reduce_cuda_{kind}_"


_PRODUCT = _REAL | _COMPLEX
# operation -> the kernel that CUDA runs for it
KERNELS = {
    **dict.fromkeys(("mm", "addmm", "addbmm"), _Kernel("addmm_cuda", _PRODUCT)),
    **dict.fromkeys(("bmm", "baddbmm"), _Kernel("baddbmm_cuda", _PRODUCT)),
    **dict.fromkeys(("mv", "addmv"), _Kernel("addmv_impl_cuda", _PRODUCT)),
    **dict.fromkeys(("dot", "vdot"), _Kernel("dot", _PRODUCT)),
    "convolution": _Kernel(_convolution_name, _REAL | _ALL_COMPLEX),
    "max_pool2d_with_indices": _Kernel("max_pool2d_with_indices_out_cuda_frame", _REAL),
    "max_pool3d_with_indices": _Kernel("max_pool3d_with_indices_out_frame", _REAL),
    "avg_pool2d": _Kernel("avg_pool2d_out_cuda_frame", _REAL),
    "avg_pool3d": _Kernel("avg_pool3d_out_cuda", _REAL),
    "upsample_bilinear2d": _Kernel("upsample_bilinear2d_out_frame", _REAL),
    "upsample_bicubic2d": _Kernel("upsample_bicubic2d_out_frame", _REAL),
    "_upsample_bilinear2d_aa": _Kernel("upsample_gen2d_aa_out_cuda", _REAL),
    "_upsample_bicubic2d_aa": _Kernel("upsample_gen2d_aa_out_cuda", _REAL),
    "angle": _Kernel("angle_cuda", _WIDE | _ALL_COMPLEX | _INTEGER | {torch.bool}),
    "igamma": _Kernel("igamma_cuda", _WIDE),
    "igammac": _Kernel("igammac_cuda", _WIDE),
    "histc": _Kernel("histc", _WIDE | _INTEGER),
    "scatter_reduce": _Kernel(_scatter_reduce_name, _REAL | _INTEGER),
}
for _name in ("addmm", "addbmm", "baddbmm", "addmv", "igamma", "igammac",
              "scatter_reduce"):  # fmt: skip
    KERNELS[f"{_name}_"] = KERNELS[_name]
# CUDA has them for weights that cuDNN has packed, and PyTorch's modules, as ours, have
# weights that the CPU has packed
_PACKED_WEIGHTS = {
    "quantized::linear", "quantized::linear_relu", "quantized::conv1d",
    "quantized::conv1d_relu", "quantized::conv2d.new", "quantized::conv2d_relu.new",
}  # fmt: skip
_OF_CUDNN = {"quantized::add", "quantized::add_relu", "quantized::max_pool2d"}


def guarded(func, name: str, run: Callable) -> Callable:
    """What runs an operation, behind the question whether CUDA has a kernel for it.

    Args:
        func: the operation, an overload.
        name: of the operation, without its namespace.
        run: what runs it.
    """
    if func.name() in _OF_CUDNN:
        return _not_simulated_on_gpus(func, run)
    if func.name() in LACKING["CUDA"] or func.name() in _PACKED_WEIGHTS:
        return _refused_on_gpus(func, run)
    if func.namespace != "aten":
        lacking = func.name() in LACKING["QuantizedCUDA"]
        return _refused_on_gpus(func, run) if lacking else run
    if name == "quantize_per_tensor" and func._overloadname == "default":
        run = _refused_below_a_byte(run)
    called = _lacks_quantized(func)
    if called is not None:
        run = _refused_if_quantized(called, run)
    run = asserting(name, run)
    kernel = KERNELS.get(name)
    return run if kernel is None else _refused_by_dtype(kernel, run)


def _refused_on_gpus(func, run: Callable) -> Callable:
    """CUDA has no kernel: nothing on a GPU may come here."""

    def refuse(call):
        __tracebackhide__ = True
        if not any(call.gpus):
            return run(call)
        quantized = any(tensor.is_quantized for tensor in call.tensors)
        key = "QuantizedCUDA" if quantized else "CUDA"
        raise NotImplementedError(_no_kernel(call, func, key))

    return refuse


def _not_simulated_on_gpus(func, run: Callable) -> Callable:
    def refuse(call):
        __tracebackhide__ = True
        if any(call.gpus):
            raise NotSimulated(f"{func.name()} on a GPU, of cuDNN")
        return run(call)

    return refuse


def _refused_if_quantized(called, run: Callable) -> Callable:
    def refuse_quantized(call):
        __tracebackhide__ = True
        tensors = call.tensors
        if tensors and tensors[0].is_quantized and any(call.gpus):
            raise NotImplementedError(_no_kernel(call, called, "QuantizedCUDA"))
        return run(call)

    return refuse_quantized


def _refused_below_a_byte(run: Callable) -> Callable:
    def refuse_parts(call):
        __tracebackhide__ = True
        dtype = call.argument(3, "dtype")
        if dtype in (torch.quint4x2, torch.quint2x4) and any(call.gpus):
            name = "QUInt4x2" if dtype is torch.quint4x2 else "QUInt2x4"
            raise NotImplementedError(
                '"quantize_tensor_per_tensor_affine_cuda" not implemented for '
                f"'{name}'"
            )
        return run(call)

    return refuse_parts


def _lacks_quantized(func):
    """Of an operation on quantized tensors, the overload that CUDA has no kernel for.

    It is the operation itself, or what it is computed by: `eq.Scalar` calls
    `eq.Scalar_out`.
    """
    packet, overload = func.overloadpacket, func._overloadname
    if func._schema.name.removeprefix("aten::") == "mean":
        return packet.out
    out = "out" if overload == "default" else f"{overload}_out"
    for name in (overload, out):
        found = getattr(packet, name, None)
        if found is not None and found.name() in LACKING["QuantizedCUDA"]:
            return found
    return None


def _refused_by_dtype(kernel: _Kernel, run: Callable) -> Callable:
    dtypes = kernel.dtypes

    def refuse_dtype(call):
        __tracebackhide__ = True
        tensors = call.tensors
        if tensors and tensors[0].dtype not in dtypes:
            _refuse_dtype(call, kernel)
        return run(call)

    return refuse_dtype


def _refuse_dtype(call, kernel: _Kernel) -> None:
    """Refuse a dtype, unless there is no GPU, or nothing to compute for one.

    Raises:
        NotImplementedError: in CUDA's words.
        RuntimeError: of PyTorch, where shapes or dtypes do not go together.
    """
    __tracebackhide__ = True
    first = call.tensors[0]
    empty = any(tensor.numel() == 0 for tensor in call.tensors if not tensor.is_sparse)
    name = kernel.name if isinstance(kernel.name, str) else kernel.name(call)
    strided = first.layout is torch.strided
    if call.common_gpu() is None or empty or not strided or not name:
        return
    if call.operation.makes:  # PyTorch first looks whether they go together
        try:
            call.func(*call.args, **call.kwargs)
        except NotImplementedError:
            pass
    raise NotImplementedError(
        f"\"{name}\" not implemented for '{scalar_type_name(first)}'"
    )


def _no_kernel(call, func, key: str) -> str:
    """What PyTorch says where an operation has no kernel: its own words, for `key`."""
    keys = DispatchKeySet(_NO_BACKEND)
    try:
        func.redispatch(keys, *call.args, **call.kwargs)
    except (NotImplementedError, RuntimeError) as error:
        words = str(error)
        if f"from the '{_NO_BACKEND.name}' backend" in words:
            return words.replace(f"'{_NO_BACKEND.name}' backend", f"'{key}' backend", 1)
    return (
        f"Could not run '{func.name()}' with arguments from the '{key}' backend. This "
        "could be because the operator doesn't exist for this backend, or was omitted "
        "during the selective/custom build process (if using custom build)."
    )


def compute_as_cuda(call, error: NotImplementedError):
    """What the CPU has no code for: computed in a wider dtype if CUDA has.

    Raises:
        NotImplementedError: in CUDA's words, if it has not.
    """
    __tracebackhide__ = True
    name = call.operation.name
    dtype = call.tensors[0].dtype if call.tensors else None
    wide = _WIDER.get(dtype)
    if wide is None or name not in wide.operations or call.operation.writes:
        raise _in_words_of_cuda(call, error) from None
    found = call.func

    def compute(*args, **kwargs):
        args = _widened(args, dtype, wide.dtype)
        out = found(*args, **_widened(kwargs, dtype, wide.dtype))
        out = _widened(out, wide.dtype, dtype)
        if dtype is torch.complex32:  # of angles
            out = _widened(out, torch.float32, torch.float16)
        return out

    compute.computes = found
    call.func = compute
    return call.func(*call.args, **call.kwargs)


class _Wider(NamedTuple):
    dtype: torch.dtype  # in which the CPU computes it
    operations: frozenset  # of which CUDA has code, and the CPU has none


_HALF_ON_CUDA = frozenset([
    "avg_pool3d", "avg_pool3d_backward", "_upsample_bilinear2d_aa",
    "_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa",
    "_upsample_bicubic2d_aa_backward", "multi_margin_loss",
    "multi_margin_loss_backward", "multilabel_margin_loss_forward",
    "multilabel_margin_loss_backward", "polygamma", "round",
])  # fmt: skip
_COMPLEX_HALF_ON_CUDA = frozenset([
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "sin", "sinh",
    "tan", "tanh", "exp", "log", "logaddexp", "div", "pow", "rsqrt", "sqrt", "lerp",
    "angle", "sigmoid", "prod", "sum", "trace",
])  # fmt: skip
_HISTOGRAM = _Wider(torch.float64, frozenset(["histc"]))
_WIDER = {
    **dict.fromkeys(_INTEGER, _HISTOGRAM),
    torch.bool: _Wider(torch.uint8, frozenset(["abs", "trace"])),
    torch.float16: _Wider(torch.float32, _HALF_ON_CUDA),
    torch.bfloat16: _Wider(torch.float32, _HALF_ON_CUDA),
    torch.complex32: _Wider(torch.complex64, _COMPLEX_HALF_ON_CUDA),
}


def _widened(value, dtype: torch.dtype, wide: torch.dtype):
    """Arguments in which tensors of `dtype` are of another one."""
    if isinstance(value, torch.Tensor):
        return value.to(wide) if value.dtype is dtype else value
    if isinstance(value, dict):
        return {key: _widened(item, dtype, wide) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_widened(item, dtype, wide) for item in value)
    return wide if value is dtype else value


def _in_words_of_cuda(call, error: NotImplementedError) -> NotImplementedError:
    """What CUDA says where it has no kernel either."""
    words = str(error)
    kernel = KERNELS.get(call.operation.name)
    if kernel is not None and " not implemented for '" in words:
        name = kernel.name if isinstance(kernel.name, str) else kernel.name(call)
        words = f'"{name}"{words[words.index(" not implemented for ") :]}'
    for key in ("QuantizedCPU", "SparseCsrCPU", "SparseCPU", "CPU"):
        theirs = key.replace("CPU", "CUDA")
        words = words.replace(f"the '{key}' backend", f"the '{theirs}' backend")
    return type(error)(words) if type(error) is NotImplementedError else error
