"""What `nn.SyncBatchNorm` asks of CUDA alone, computed on the CPU.

Models: the six operations that only CUDA has, from their definitions (Ioffe and
Szegedy, 2015, with the statistics of all ranks), as one kernel each. Leaves out: the
order in which a GPU adds, so last digits differ.
"""

from collections.abc import Callable

import torch

from simgpu._dispatch.operation import handles
from simgpu._dispatch.operation_call import Call


def _dims(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]  # all but the channels


def _wide(x: torch.Tensor) -> torch.Tensor:
    """float16 and bfloat16 are summed in float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _per_channel(v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return v.view(1, -1, *[1] * (x.dim() - 2))


def _stats(x, eps):
    """(channels,) mean and 1 / standard deviation of this rank's rows."""
    var, mean = torch.var_mean(_wide(x), _dims(x), correction=0)
    return mean, (var + eps).rsqrt()


def _gather_stats(x, means, invstds, running_mean, running_var, momentum, eps, counts):
    """The same of all ranks, from (ranks, channels); updates the running ones."""
    n = counts.to(means.dtype).view(-1, 1)
    total = n.sum()
    mean = (means * n).sum(0) / total
    variances = invstds**-2 - eps
    var = ((variances + (means - mean) ** 2) * n).sum(0) / total
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        unbiased = var * total / (total - 1)
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return mean, (var + eps).rsqrt()


def _gather_alike(x, means, invstds, running_mean, running_var, momentum, eps, count):
    """The same where every rank has as many rows."""
    counts = means.new_full((means.shape[0],), count)
    running = running_mean, running_var
    return _gather_stats(x, means, invstds, *running, momentum, eps, counts)


def _normalize(x, weight, bias, mean, invstd, eps):
    out = (_wide(x) - _per_channel(mean, x)) * _per_channel(invstd, x)
    if weight is not None:
        out = out * _per_channel(weight, x)
    if bias is not None:
        out = out + _per_channel(bias, x)
    return out.to(x.dtype)


def _backward_reduce(grad, x, mean, invstd, weight, input_g, weight_g, bias_g):
    """(channels,) sums of dy and of dy (x - mean), and the gradients they give."""
    dy, xmu = _wide(grad), _wide(x) - _per_channel(mean, x)
    sum_dy, sum_dy_xmu = dy.sum(_dims(x)), (dy * xmu).sum(_dims(x))
    kind = mean.dtype if weight is None else weight.dtype
    grad_weight = (sum_dy_xmu * invstd).to(kind) if weight_g else None
    grad_bias = sum_dy.to(kind) if bias_g else None
    if not input_g:
        sum_dy = sum_dy_xmu = None
    return sum_dy, sum_dy_xmu, grad_weight, grad_bias


def _backward(grad, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    n = count.sum()
    xmu = _wide(x) - _per_channel(mean, x)
    slope = _per_channel(sum_dy_xmu / n * invstd**2, x)
    scale = invstd if weight is None else invstd * weight
    grad_x = _wide(grad) - _per_channel(sum_dy / n, x) - xmu * slope
    return (grad_x * _per_channel(scale, x)).to(grad.dtype)


def _computes(name: str, formula: Callable) -> None:
    """Let `formula` compute an operation that PyTorch has on CUDA only."""

    @handles(name)
    def run(call: Call):
        __tracebackhide__ = True
        gpu = call.common_gpu()
        if gpu is not None:  # the CPU has no kernel for it
            call.func = formula
        return call.run_on(gpu)


_computes("batch_norm_stats", _stats)
_computes("batch_norm_gather_stats", _gather_alike)
_computes("batch_norm_gather_stats_with_counts", _gather_stats)
_computes("batch_norm_elemt", _normalize)
_computes("batch_norm_backward_reduce", _backward_reduce)
_computes("batch_norm_backward_elemt", _backward)
