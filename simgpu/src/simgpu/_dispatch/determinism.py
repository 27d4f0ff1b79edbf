"""`torch.use_deterministic_algorithms(True)`: what CUDA then refuses, or warns of.

Models: the operations that PyTorch lists as having no deterministic code for CUDA, in
its words. The CPU, which computes them, is deterministic. Leaves out: fills of
uninitialised memory. Products are not refused: PyTorch from 2.11 on (and maybe before)
no longer asks for CUBLAS_WORKSPACE_CONFIG.

Source: the list in the docstring of `torch.use_deterministic_algorithms`.
"""

import warnings

from simgpu._compat import are_deterministic, warn_of_nondeterminism
from simgpu._dispatch.operation import handles
from simgpu._dispatch.operation_call import Call

# operation -> what PyTorch calls it in the message
_NAMES = {
    "_adaptive_avg_pool2d_backward": "adaptive_avg_pool2d_backward_cuda",
    "_adaptive_avg_pool3d_backward": "adaptive_avg_pool3d_backward_cuda",
    "adaptive_max_pool2d_backward": "adaptive_max_pool2d_backward_cuda",
    "avg_pool3d_backward": "avg_pool3d_backward_cuda",
    "fractional_max_pool2d_backward": "fractional_max_pool2d_backward_cuda",
    "fractional_max_pool3d_backward": "fractional_max_pool3d_backward_cuda",
    "max_unpool2d": "max_unpooling2d_forward_out",
    "max_unpool3d": "max_unpooling3d_forward_out",
    "upsample_linear1d_backward": "upsample_linear1d_backward_out_cuda",
    "upsample_bilinear2d_backward": "upsample_bilinear2d_backward_out_cuda",
    "upsample_bicubic2d_backward": "upsample_bicubic2d_backward_out_cuda",
    "upsample_trilinear3d_backward": "upsample_trilinear3d_backward_out_cuda",
    "reflection_pad1d_backward": "reflection_pad1d_backward_out_cuda",
    "reflection_pad2d_backward": "reflection_pad2d_backward_cuda",
    "reflection_pad3d_backward": "reflection_pad3d_backward_out_cuda",
    "grid_sampler_2d_backward": "grid_sampler_2d_backward_cuda",
    "grid_sampler_3d_backward": "grid_sampler_3d_backward_cuda",
    "nll_loss2d_forward": "nll_loss2d_forward_out_cuda_template",
    "_ctc_loss_backward": "ctc_loss_backward_gpu",
    "histc": "_histc_cuda",
    "bincount": "_bincount_cuda",
    "median": "median CUDA with indices output",
    "nanmedian": "median CUDA with indices output",
    "cumsum": "cumsum_cuda_kernel",
    "put_": "put_",
}
_WORDS = (
    "{} does not have a deterministic implementation, but you set "
    "'torch.use_deterministic_algorithms(True{})'. "
)
_ADVICE = (
    "You can turn off determinism just for this operation, or you can use the "
    "'warn_only=True' option, if that's acceptable for your application. "
)
_REPORT = (
    "You can {}file an issue at https://github.com/pytorch/pytorch/issues to help us "
    "prioritize adding deterministic support for this operation."
)


@handles(*_NAMES)
def run_undetermined(call: Call):
    """The usual way, unless the program has asked for determinism."""
    __tracebackhide__ = True
    gpu = call.common_gpu()
    if are_deterministic() and gpu is not None:
        if _is_undetermined(call):
            _alert(_NAMES[call.operation.name])
    return call.run_on(gpu)


def _is_undetermined(call: Call) -> bool:
    """Whether it is with these arguments: some have deterministic code for a part."""
    name = call.operation.name
    if name in ("median", "nanmedian"):  # the one that also gives indices
        return len(call.args) > 1
    if name == "bincount":
        return call.argument(1, "weights") is not None
    if name in ("cumsum", "histc"):
        dtype = call.tensors[0].dtype
        return dtype.is_floating_point or dtype.is_complex
    return True


def _alert(name: str) -> None:
    __tracebackhide__ = True
    if warn_of_nondeterminism():
        words = _WORDS.format(name, ", warn_only=True") + _REPORT.format("")
        warnings.warn(words, stacklevel=2)
    else:
        raise RuntimeError(_WORDS.format(name, "") + _ADVICE + _REPORT.format("also "))
