"""`flex_attention`: PyTorch's own formula for it, differentiated by autograd.

A compiled `flex_attention` is one fused kernel, which never holds the scores. Models:
its values, by the code that PyTorch runs where nothing is compiled: the scores of all
queries and keys, the program's `score_mod` and `mask_mod` on each of them, a softmax.
Leaves out: that the kernel skips masked blocks and holds no scores. So memory and time
are those of the uncompiled function, which grow with the square of the length.

Source: torch/_higher_order_ops/flex_attention.py of torch 2.13.
"""

from simgpu import _runtime as state
from simgpu._api import autocast
from simgpu._compat import DispatchKey, flex_attention_operator
from simgpu._dispatch.function_mode import FunctionMode
from simgpu._dispatch.placement import gpus_of
from simgpu._errors import NotSimulated

_raw_operator = flex_attention_operator


def operator(query, key, value, score_mod, block_mask, scale, kernel_options,
             score_mod_other_buffers=(), mask_mod_other_buffers=()):  # fmt: skip
    """The operator below `torch.nn.attention.flex_attention.flex_attention`.

    Args:
        query: (B, H, S, D).
        key: (B, H', S', D), with H a multiple of H'.
        value: (B, H', S', D').
        score_mod: score, batch, head, query, key -> score.
        block_mask: `BlockMask.as_tuple()`, whose last item is the `mask_mod`.
        scale: of the scores.
        kernel_options: of the fused kernel.
        score_mod_other_buffers, mask_mod_other_buffers: further arguments of the two.

    Returns:
        output (B, H, S, D'), and of each row of scores (B, H, S) the logarithm to
        base 2 of the sum of exponentials, and the largest score over log(2).

    Raises:
        NotSimulated: if the program asks for the kernel of FlashAttention.
    """
    __tracebackhide__ = True
    arguments = (query, key, value, score_mod, block_mask, scale, kernel_options,
                 score_mod_other_buffers, mask_mod_other_buffers)  # fmt: skip
    if not any(gpus_of([query, key, value])):
        return _raw_operator(*arguments)
    if kernel_options.get("BACKEND") == "FLASH":
        raise NotSimulated("flex_attention with BACKEND='FLASH'")
    query, key, value = autocast.for_lower_precision((query, key, value))
    with FunctionMode(state.current()), autocast.without():
        out, log_sums, largest = _formula()(query, key, value, *arguments[3:])
    return out, log_sums, largest.detach()


def _formula():
    """What computes it on any device, by operations that autograd knows."""
    return _raw_operator.py_kernels[DispatchKey.CompositeExplicitAutograd]
