"""RMSNorm as CUDA has it: one kernel forward, one step backward.

Models: that autograd keeps the input and one number for each row, and nothing else.
PyTorch's C++ takes the operation apart where the device of its tensors, here the CPU,
has no kernel for it. So while GPUs are simulated, it has: the same parts, within the
kernel. Leaves out: the buffers in which CUDA sums up the gradient of the weight; and
that a tensor of the host, too, then has the node `FusedRmsNormBackward0`.

Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu of torch 2.13.
"""

import torch

from simgpu._compat import DispatchKey, has_kernel
from simgpu._dispatch.operation import handles
from simgpu._dispatch.operation_call import Call

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
