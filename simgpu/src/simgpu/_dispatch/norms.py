"""LayerNorm and RMSNorm as CUDA has them: a kernel forward, one step backward.

Models: that LayerNorm keeps its statistics in float32, and takes weights of the input's
type alone; that RMSNorm is not taken apart, so that autograd keeps the input and one
number for each row, and nothing else. PyTorch's C++ takes RMSNorm apart where the
device of its tensors, here the CPU, has no kernel for it. So while GPUs are simulated,
it has: the same parts, within the kernel. Leaves out: the buffers in which CUDA sums up
the gradient of a weight; and that a tensor of the host, too, then has the node
`FusedRmsNormBackward0`.

Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu of torch 2.13.
"""

import torch
from torch import Tensor

from simgpu._compat import DispatchKey, has_kernel, is_torch
from simgpu._dispatch.errors import scalar_type_name
from simgpu._dispatch.low_precision import is_half, widened
from simgpu._dispatch.operation import handles
from simgpu._dispatch.operation_call import Call

_layer_norm = torch.ops.aten.native_layer_norm.default
_PARTS = DispatchKey.CompositeImplicitAutograd
_KEYS = ("CPU", "Meta")  # of tensors with values, and without: `simgpu.estimate`
_op = torch.ops.aten._fused_rms_norm.default


def _forward(x, normalized_shape, weight, eps):
    """(*, *normalized_shape) result, and (*, 1, ...) what each row is multiplied by."""
    out, scale = _op._op_dk(_PARTS, x, normalized_shape, weight, eps)
    return out.contiguous(), scale


def _backward(grad_out, x, normalized_shape, scale, weight, output_mask):
    """The gradients of `x` and of `weight`, each None if it is not wanted."""
    grad, normal = grad_out.to(scale.dtype), x.to(scale.dtype) * scale
    for_x = for_weight = None
    rows = len(normalized_shape)
    if output_mask[0]:
        inner = grad if weight is None else grad * weight
        mean = (inner * normal).mean(list(range(-rows, 0)), keepdim=True)
        for_x = (scale * (inner - normal * mean)).to(x.dtype).contiguous()
    if output_mask[1] and weight is not None:
        leading = list(range(x.dim() - rows))
        product = grad * normal
        for_weight = (product.sum(leading) if leading else product).to(weight.dtype)
    return for_x, for_weight


def _with_wide_statistics(x, normalized_shape, weight, bias, eps):
    """LayerNorm of half precision: its mean and 1 / deviation are in float32."""
    wide = (t.float() if is_half(t) else t for t in (weight, bias))
    out, mean, scale = _layer_norm(x.float(), normalized_shape, *wide, eps)
    return out.to(x.dtype), mean, scale


@handles("native_layer_norm", "native_layer_norm_backward")
def layer_norm(call: Call):
    """LayerNorm.

    Raises:
        RuntimeError: for a weight or bias of another type, in the words of CUDA's code.
    """
    __tracebackhide__ = True
    gpu = call.common_gpu()
    forward = call.operation.name == "native_layer_norm"
    if gpu is None:
        return call.run_on(None)
    x = call.tensors[0]
    if forward:
        for other in call.tensors[1:]:
            if other.dtype is not x.dtype:
                its, wanted = scalar_type_name(other), scalar_type_name(x)
                raise RuntimeError(f"expected scalar type {wanted} but found {its}")
    if is_half(x):
        call.func = _with_wide_statistics if forward else widened(call.func)
    return call.run_on(gpu)


def _of_contiguous(func):
    """GroupNorm of tensors whose channels do not lie last."""

    def run(*args):
        return func(*(t.contiguous() if isinstance(t, Tensor) else t for t in args))

    return run


@handles("native_group_norm", "native_group_norm_backward")
def group_norm(call: Call):
    """GroupNorm, which has channels last on a GPU since PyTorch 2.15.

    Until then CUDA's code copies what it is given (`take_to_copy` has the memory; the
    time is left out).
    """
    __tracebackhide__ = True
    gpu = call.common_gpu()
    if gpu is not None and not is_torch((2, 15)):
        call.func = _of_contiguous(call.func)
    return call.run_on(gpu)


_KERNELS = {"_fused_rms_norm": _forward, "_fused_rms_norm_backward": _backward}


@handles(*_KERNELS)
def run_fused(call: Call):
    __tracebackhide__ = True
    call.func = _KERNELS[call.operation.name]
    return call.run_on(call.common_gpu())


def register() -> torch.library.Library:
    """Let autograd find the kernels; `_destroy()` takes them away."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in _KERNELS.items():
        for key in _KEYS:
            if not has_kernel(f"aten::{name}", key):
                library.m.impl(name, key, kernel)
    return library
