"""Fused attention under the names that CUDA has for it, computed on the CPU.

Models: flash attention and memory-efficient attention, forward and backward, each as
one kernel that reads queries, keys and values and writes no matrix of weights. Their
results have the shapes and types that CUDA returns; of dropout they keep the state that
it was drawn from, and no mask. Leaves out: the gradient of a mask; and that the
logsumexp of memory-efficient attention is padded to a multiple of 32 queries. Which of
the two a program gets, `_api/attention.py` decides.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from simgpu._dispatch.low_precision import is_half
from simgpu._dispatch.operation import handles
from simgpu._dispatch.operation_call import Call
from simgpu._errors import NotSimulated

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Dropout(NamedTuple):
    """Of weights: the probability, and what numbers it is drawn from."""

    p: float = 0.0
    seed: torch.Tensor | None = None  # its first number


NO_DROPOUT = Dropout()


def random_states(query, p: float, dtype, *shapes) -> list[torch.Tensor]:
    """What a kernel keeps of the numbers that it draws; zeros without dropout.

    Args:
        query: of the attention.
        p: of the dropout.
        dtype: of what is kept, of 8 bytes.
        shapes: of that.
    """
    made = [query.new_zeros(shape, dtype=torch.int64) for shape in shapes]
    if p:
        made[0].random_(2**62)  # by the GPU's generator, at its offset
    return [state.view(dtype) for state in made]


def attend(query, key, value, is_causal, mask, scale, dropout=NO_DROPOUT):
    """(B, H, S, D) output and (B, H, S) logsumexp of attention on the CPU."""
    keys, values = _for_each_head(key, query), _for_each_head(value, query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    mask = _wide(mask)
    if dropout.p and not query.is_meta:
        scores = _scores(query, keys, is_causal, mask, scale)
        kept = scores.softmax(-1).nan_to_num_() * _factors(scores, dropout)
        return (kept @ _wide(values)).to(query.dtype), scores.logsumexp(-1)
    inputs = _as_wide(*map(_wide, (query, keys, values)))
    out, logsumexp = _forward(*inputs, 0.0, is_causal, attn_mask=mask, scale=scale)
    out = out[..., : value.shape[-1]].to(query.dtype)
    return out, logsumexp.contiguous()


def gradients(
    grad, query, key, value, out, logsumexp, is_causal, mask, scale, dropout=NO_DROPOUT
):
    """The gradients of query, key and value."""
    keys, values = _for_each_head(key, query), _for_each_head(value, query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    mask = _wide(mask)
    if dropout.p and not query.is_meta:
        scores = _scores(query, keys, is_causal, mask, scale)
        found = _through_dropout(grad, query, keys, values, scores, scale, dropout)
    else:
        inputs = _as_wide(*map(_wide, (grad, query, keys, values, out)))
        how = {"attn_mask": mask, "scale": scale}
        found = _backward(*inputs, logsumexp, 0.0, is_causal, **how)
    dq, dk, dv = (
        gradient[..., : its.shape[-1]].to(query.dtype)
        for gradient, its in zip(found, (query, key, value), strict=True)
    )
    return dq, _for_each_group(dk, key), _for_each_group(dv, value)


def _scores(query, key, is_causal: bool, mask, scale: float) -> torch.Tensor:
    """(B, H, S, S'), in float32 for half precision."""
    scores = _wide(query) @ _wide(key).mT * scale
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1)
        scores.masked_fill_(later, -math.inf)
    return scores if mask is None else scores + mask


def _factors(scores, dropout: Dropout) -> torch.Tensor:
    """Of each weight: 0, or 1 / (1 - p), the same for the same seed; 0 for p of 1."""
    seed = int(dropout.seed.flatten()[0])
    drawn = torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed))
    return (drawn >= dropout.p).to(scores.dtype) / max(1 - dropout.p, 1e-30)


def _through_dropout(grad, query, key, value, scores, scale: float, dropout: Dropout):
    factors, grad = _factors(scores, dropout), _wide(grad)
    weights = scores.softmax(-1).nan_to_num_()
    of_weights = grad @ _wide(value).mT * factors
    sums = (of_weights * weights).sum(-1, keepdim=True)
    of_scores = weights * (of_weights - sums) * scale
    of_values = (weights * factors).mT @ grad
    return of_scores @ _wide(key), of_scores.mT @ _wide(query), of_values


def _wide(tensor):
    """In float32 if it is of half precision: see `low_precision.py`."""
    return tensor.float() if is_half(tensor) else tensor


def _as_wide(*tensors):
    """All with as wide heads, by zeros, which the CPU's kernel asks for."""
    most = max(tensor.shape[-1] for tensor in tensors)
    return [
        tensor
        if tensor.shape[-1] == most
        else pad(tensor, (0, most - tensor.shape[-1]))
        for tensor in tensors
    ]


def _for_each_head(tensor, query):
    """(B, groups, S, D) keys or values, repeated for the heads that share them."""
    heads, groups = query.shape[1], tensor.shape[1]
    return tensor if heads == groups else tensor.repeat_interleave(heads // groups, 1)


def _for_each_group(gradient, tensor):
    """The gradients of the heads that share keys or values, summed."""
    if gradient.shape[1] == tensor.shape[1]:
        return gradient
    return gradient.unflatten(1, (tensor.shape[1], -1)).sum(2)


def _flash(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *,
    scale=None,
):  # fmt: skip
    if return_debug_mask:
        raise NotSimulated("the weights of flash attention")
    how = _as_flash_sees(query, key, is_causal)
    random_state = random_states(query, dropout_p, torch.uint64, (2,), ())
    dropout = Dropout(dropout_p, random_state[0])
    out = attend(query, key, value, *how, scale, dropout)
    if is_causal and (blind := max(0, query.shape[2] - key.shape[2])):
        out[0][:, :, :blind], out[1][:, :, :blind] = 0.0, math.inf
    lengths = query.shape[2], key.shape[2]
    return *out, None, None, *lengths, *random_state, query.new_empty(0)


def _flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
    dropout_p, is_causal, philox_seed, philox_offset, *, scale=None,
):  # fmt: skip
    results = out, logsumexp, *_as_flash_sees(query, key, is_causal), scale
    dropout = Dropout(dropout_p, philox_seed)
    return gradients(grad_out, query, key, value, *results, dropout)


def _as_flash_sees(query, key, is_causal: bool):
    """(whether causal, mask) of the CPU's kernel, whose first query sees the first key.

    The last query of flash attention sees the last key.
    """
    more = key.shape[2] - query.shape[2]
    if not is_causal or not more:
        return is_causal, None
    mask = query.new_full((query.shape[2], key.shape[2]), -math.inf)
    return False, mask.triu_(1 + more)


def _efficient(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
    *, scale=None,
):  # fmt: skip
    random_state = random_states(query, dropout_p, torch.int64, (), ())
    how = is_causal, attn_bias, scale, Dropout(dropout_p, random_state[0])
    out, logsumexp = attend(query, key, value, *how)
    if not compute_log_sumexp:
        logsumexp = logsumexp.new_empty((*logsumexp.shape[:2], 0))
    return out, logsumexp, *random_state


def _efficient_backward(
    grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset,
    dropout_p, grad_input_mask, is_causal=False, *, scale=None,
):  # fmt: skip
    if grad_input_mask[3]:
        raise NotSimulated("the gradient of a mask in fused attention")
    results = out, logsumexp, is_causal, attn_bias, scale
    dropout = Dropout(dropout_p, philox_seed)
    return *gradients(grad_out, query, key, value, *results, dropout), None


def _computes(name: str, formula: Callable) -> None:
    """Let `formula` compute an operation that PyTorch has on CUDA only."""

    @handles(name)
    def run(call: Call):
        __tracebackhide__ = True
        gpu = call.common_gpu()
        if gpu is not None:
            call.func = formula
        return call.run_on(gpu)


_computes("_scaled_dot_product_flash_attention", _flash)
_computes("_scaled_dot_product_flash_attention_backward", _flash_backward)
_computes("_scaled_dot_product_efficient_attention", _efficient)
_computes("_scaled_dot_product_efficient_attention_backward", _efficient_backward)
