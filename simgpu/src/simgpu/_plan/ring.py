"""Attention over a sequence that lies in parts on the ranks of a group.

Rank r of n has parts r and 2n - 1 - r of 2n, so that a causal mask leaves each rank the
same work. Keys and values of all are gathered, and a rank attends to those of one rank
after the other, as PyTorch's `context_parallel` does by default; the results are merged
in float32. Backward gathers again, and sums gradients in float32 by a reduce-scatter.
PyTorch hands them round, in n messages of one part each where n - 1 would do, and
computes beside all of these messages; here nothing is computed meanwhile.
"""

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.nn.functional import logsigmoid

from simgpu._device.cards import Card
from simgpu._dispatch import cudnn_attention

_aten = torch.ops.aten
_flash = _aten._scaled_dot_product_flash_attention.default
_flash_back = _aten._scaled_dot_product_flash_attention_backward.default
_cudnn = _aten._scaled_dot_product_cudnn_attention.default
_cudnn_back = _aten._scaled_dot_product_cudnn_attention_backward.default
WIDEST = 256  # of a head, for flash attention


def takes(width: int, card: Card) -> bool:
    """Whether a card has a kernel for heads of such a width."""
    return width <= WIDEST and card.capability >= (8, 0)


def places(tokens: int, group) -> torch.Tensor:
    """(tokens,) of a rank: where in the sequence they are."""
    n, r, half = group.size(), group.rank(), tokens // 2
    one = torch.arange(half)
    return torch.cat((r * half + one, (2 * n - 1 - r) * half + one))


def attention(q, k, v, group) -> torch.Tensor:
    """(B, heads, tokens of this rank, D), causal.

    Args:
        q: queries of the same shape.
        k: (B, heads of keys, tokens, D).
        v: the same.
        group: whose ranks have the sequence.
    """
    return _Attention.apply(q, k, v, group)


class _Attention(Function):
    @staticmethod
    def forward(ctx, q, k, v, group):
        ctx.group = group
        out = sums = None
        for queries, keys, values, causal, _ in _steps(
            q, _gathered(k, v, group), group
        ):
            new, its = _attend(q[:, :, queries], keys, values, causal)
            if out is None:
                out, sums = new.float(), its.clone()
            else:
                _merge(out[:, :, queries], sums[:, :, queries], new, its)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, sums = ctx.saved_tensors
        group = ctx.group
        whole = _gathered(k, v, group)
        for_q, for_whole = (torch.zeros_like(its, dtype=torch.float32)
                            for its in (q, whole))  # fmt: skip
        for queries, keys, values, causal, (source, seen) in _steps(q, whole, group):
            part = (its[:, :, queries] for its in (grad, q, out, sums))
            found = _gradients(*part, keys, values, causal)
            for_q[:, :, queries] += found[0]
            for_whole[source, 0][:, :, seen] += found[1]
            for_whole[source, 1][:, :, seen] += found[2]
        mine = torch.empty_like(for_whole[0])
        dist.reduce_scatter_tensor(mine, for_whole, group=group)
        return *(its.to(q.dtype) for its in (for_q, *mine)), None


def _gathered(k, v, group) -> torch.Tensor:
    """(ranks, 2, *shape of k)."""
    both = torch.stack((k, v))
    whole = both.new_empty((group.size(), *both.shape))
    dist.all_gather_into_tensor(whole, both, group=group)
    return whole


def _steps(q, whole, group):
    """(which queries, keys, values, whether causal, (rank, which keys)) of a rank."""
    n, r, half = group.size(), group.rank(), q.shape[2] // 2
    for back in range(n):
        source = (r - back) % n
        queries = slice(half if source > r else 0, None)  # before all of its others
        seen = slice(0, half if source < r else None)
        keys, values = (its[:, :, seen] for its in whole[source])
        yield queries, keys, values, source == r, (source, seen)


def _merge(out, sums, new, its) -> None:
    """Of softmax over keys and over others, that over all: both of float32, in place.

    Args:
        out: (B, heads, S, D).
        sums: (B, heads, S), logarithms of the sums of exponentials.
        new: as `out`, of any type.
        its: as `sums`.
    """
    out.lerp_(new.float(), torch.sigmoid(its - sums)[..., None])
    sums.sub_(logsigmoid(sums - its))


def _is_cudnns(q, k, v) -> bool:
    capability = torch.cuda.get_device_capability()
    return cudnn_attention.is_preferred(capability) and cudnn_attention.takes(
        q, k, v, True, capability
    )


def _attend(q, k, v, causal: bool):
    """The result, and (B, heads, S) logarithms of sums."""
    if _is_cudnns(q, k, v):
        out, sums = _cudnn(q, k, v, None, True, 0.0, causal)[:2]
        return out, sums[..., 0]
    return _flash(q, k, v, 0.0, causal)[:2]


def _gradients(grad, q, out, sums, k, v, causal: bool):
    """Of queries, keys and values."""
    state = (q.new_zeros((), dtype=torch.int64) for _ in range(2))  # no dropout
    lengths = None, None, q.shape[2], k.shape[2], 0.0, causal
    sums = sums.contiguous()  # the kernels take it to be
    if _is_cudnns(q, k, v):
        return _cudnn_back(grad, q, k, v, out, sums[..., None], *state, None, *lengths)
    return _flash_back(grad, q, k, v, out, sums, *lengths, *state)
