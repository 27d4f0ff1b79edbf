"""The operations of `nn.SyncBatchNorm`, against `nn.BatchNorm` on the whole batch."""

import pytest
import torch
from torch import nn

import simgpu

EPS, MOMENTUM = 1e-5, 0.1


pytestmark = pytest.mark.simulated_gpus(1)


def two_ranks(parts, weight, bias, norm):
    """What two ranks do with their parts, as `SyncBatchNorm.forward` does it."""
    means, invstds = zip(*(torch.batch_norm_stats(x, EPS) for x in parts), strict=True)
    counts = torch.tensor([x.numel() / x.shape[1] for x in parts], device="cuda")
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        parts[0], torch.stack(means), torch.stack(invstds), norm.running_mean,
        norm.running_var, MOMENTUM, EPS, counts,
    )  # fmt: skip
    outs = [torch.batch_norm_elemt(x, weight, bias, mean, invstd, EPS) for x in parts]
    return outs, mean, invstd, counts


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 7), (6, 5, 3, 3)])
def test_two_ranks_normalize_as_one(shape):
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda") * 3 + 1
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    whole, ours = kind(5).cuda(), kind(5).cuda()
    with torch.no_grad():
        weight, bias = whole.weight.uniform_(), whole.bias.uniform_()
    leaf = x.clone().requires_grad_()
    right = whole(leaf)
    dy = torch.randn_like(right)
    right.backward(dy)

    parts, dys = x.split([4, 2]), dy.split([4, 2])
    outs, mean, invstd, counts = two_ranks(parts, weight, bias, ours)
    torch.testing.assert_close(torch.cat(outs), right)
    torch.testing.assert_close(ours.running_mean, whole.running_mean)
    torch.testing.assert_close(ours.running_var, whole.running_var)

    sums = [
        torch.batch_norm_backward_reduce(d, p, mean, invstd, weight, True, True, True)
        for d, p in zip(dys, parts, strict=True)
    ]
    sum_dy, sum_dy_xmu, grad_weight, grad_bias = map(sum, zip(*sums, strict=True))
    torch.testing.assert_close(grad_weight, whole.weight.grad)
    torch.testing.assert_close(grad_bias, whole.bias.grad)
    grads = [
        torch.batch_norm_backward_elemt(
            d, p, mean, invstd, weight, sum_dy, sum_dy_xmu, counts.int()
        )
        for d, p in zip(dys, parts, strict=True)
    ]
    torch.testing.assert_close(torch.cat(grads), leaf.grad)


def test_half_precision_is_summed_in_single():
    x = torch.randn(8, 4, 5, device="cuda").half()
    mean, invstd = torch.batch_norm_stats(x, EPS)
    assert mean.dtype == invstd.dtype == torch.float32
    out = torch.batch_norm_elemt(x, None, None, mean, invstd, EPS)
    assert out.dtype == torch.float16 and str(out.device) == "cuda:0"
    dy = torch.ones_like(x)
    flags = (True, False, False)
    sums = torch.batch_norm_backward_reduce(dy, x, mean, invstd, None, *flags)
    assert sums[2] is None and sums[3] is None
    torch.testing.assert_close(sums[0].cpu(), torch.full((4,), 40.0))


def test_each_operation_is_a_kernel_and_the_host_has_none():
    x = torch.ones(4, 3, device="cuda")
    simgpu.timeline().clear()
    torch.batch_norm_stats(x, EPS)
    assert [event.name for event in simgpu.timeline().events] == ["batch_norm_stats"]
    with pytest.raises(NotImplementedError, match="batch_norm_stats"):
        torch.batch_norm_stats(torch.ones(4, 3), EPS)
