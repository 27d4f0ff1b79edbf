"""cuDNN's fused attention, which PyTorch prefers on Hopper and Blackwell.

Models: what it takes and refuses, one kernel forward and one backward; query, key,
value, output, its logsumexp and a random state are kept for backward. Leaves out: the
workspace that backward takes while it runs.

Sources: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and
torch/_meta_registrations.py of torch 2.15, with the cuDNN of `_api/backends.py`. Speed
at 16,384 tokens: on H100 figures 5 and 6 of "FlashAttention-3"
(Shah and others, 2024), not causal; on B200 the abstract of "FlashAttention-4" (2026):
1613 TFLOP/s are 1.3 times cuDNN's.
"""

import os

import torch

from simgpu._dispatch.attention_kernels import (
    Dropout,
    attend,
    gradients,
    random_states,
)
from simgpu._dispatch.kernel_work import COUNTED, by_formula
from simgpu._dispatch.low_precision import HALF
from simgpu._dispatch.operation import handles
from simgpu._dispatch.operation_call import Call

_FORWARD = "_scaled_dot_product_cudnn_attention"
_BACKWARD = f"{_FORWARD}_backward"
attention = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_AMPERE, _HOPPER, _BLACKWELL, _AFTER = (8, 0), (9, 0), (10, 0), (11, 0)
_WIDEST = 128  # of a head; of 192 with values of 128 on Hopper and Blackwell
_MOST = 65535  # samples, and heads
# TFLOP/s forward and backward on H100, for heads up to so wide; on B200, where backward
# is as forward: assumed. And of FlashAttention 2 on these, as `_device/cards.py` has it
_ON_HOPPER = {64: (413, 433), _WIDEST: (595, 516)}
_ON_BLACKWELL = 1613 / 1.3
_FLASH_ON_HOPPER, _FLASH_ON_BLACKWELL = 366, 405


def is_preferred(capability: tuple[int, int]) -> bool:
    """Whether PyTorch asks it first on a card, which it does since cuDNN 9.15.1.

    The environment's TORCH_CUDNN_SDPA_DEPRIORITIZED=1 puts it behind the others.
    """
    if not _HOPPER <= capability < _AFTER:
        return False
    return os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"


def takes(query, key, value, gqa: bool, capability: tuple[int, int]) -> bool:
    """Whether it computes such attention: (B, H, S, D), D next to each other."""
    if query.dtype not in HALF or capability < _AMPERE:
        return False
    batch, heads, _, width = query.shape
    groups, keys, its = key.shape[1], key.shape[2], value.shape[-1]
    several = not torch.are_deterministic_algorithms_enabled() or (
        torch.is_deterministic_algorithms_warn_only_enabled()
    )
    wide = _HOPPER <= capability < _AFTER and (width, its) == (192, 128)
    shared = gqa and heads % groups == 0
    return (
        several and max(batch, heads) <= _MOST and keys != 1
        and (wide or max(width, its) <= _WIDEST) and not width % 8 and not its % 8
        and key.shape[-1] == width and groups == value.shape[1]
        and (heads == groups or shared)
    )  # fmt: skip


def _forward(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
    return_debug_mask=False, *, scale=None,
):  # fmt: skip
    random_state = random_states(query, dropout_p, torch.int64, (), ())
    how = is_causal, attn_bias, scale, Dropout(dropout_p, random_state[0])
    out, sums = attend(query, key, value, *how)
    sums = sums[..., None] if compute_log_sumexp else sums.new_empty(0)
    lengths = query.shape[2], key.shape[2]
    return out, sums, None, None, *lengths, *random_state, None


def _backward(
    grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias,
    cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, *, scale=None,
):  # fmt: skip
    results = out, logsumexp.squeeze(-1), is_causal, attn_bias, scale
    dropout = Dropout(dropout_p, philox_seed)
    return gradients(grad_out, query, key, value, *results, dropout)


def _count(call: Call, out):
    """PyTorch's FLOPs, at cuDNN's speed."""
    flops, shape = by_formula(call, out)
    capability = call.gpus[0].card.capability
    speed = 1.0  # as FlashAttention 2 before Hopper: assumed
    if _BLACKWELL <= capability < _AFTER:
        speed = _ON_BLACKWELL / _FLASH_ON_BLACKWELL
    elif _HOPPER <= capability < _BLACKWELL:
        width = min(w for w in _ON_HOPPER if w >= min(shape.width, _WIDEST))
        rates = _ON_HOPPER[width]
        speed = rates[call.operation.name == _BACKWARD] / _FLASH_ON_HOPPER
    return flops, shape._replace(speed=speed)


for _name, _formula in ((_FORWARD, _forward), (_BACKWARD, _backward)):

    @handles(_name)
    def _run(call: Call, formula=_formula):
        __tracebackhide__ = True
        gpu = call.common_gpu()
        if gpu is not None:
            call.func = formula
        return call.run_on(gpu)

    COUNTED[_name] = _count
