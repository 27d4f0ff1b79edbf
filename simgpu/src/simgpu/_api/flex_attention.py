"""`flex_attention`: fused where the program compiles it, else PyTorch's own formula.

Models: compiled, one kernel forward and two backward, which hold no scores and skip the
blocks that a `BlockMask` leaves out (`_dispatch/flex_attention.py`); query, key, value,
output and its logsumexp are kept for backward. Uncompiled, as in PyTorch, all that
its formula holds: the scores of all queries and keys, the program's `score_mod` and
`mask_mod` on each of them, a softmax. The values of both are the formula's.
Leaves out: double backward of the fused kernels.

Sources: torch/_higher_order_ops/flex_attention.py and
torch/nn/attention/flex_attention.py of torch 2.15.
"""

import contextlib
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterator

import torch
from torch.autograd.function import once_differentiable

from simgpu import _runtime as state
from simgpu._api import autocast
from simgpu._api.compiling import is_compiled
from simgpu._compat import (
    DisableTorchDispatch,
    DispatchKey,
    flex_attention_operator,
    raw_run_backward,
)
from simgpu._dispatch import flex_attention as fused
from simgpu._dispatch.function_mode import FunctionMode
from simgpu._dispatch.placement import gpus_of, storage_of
from simgpu._errors import NotSimulated

_raw_operator = flex_attention_operator
_MOST_BLOCKS = 256  # of queries that are looked at where only the rule is known


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
    others = score_mod_other_buffers, mask_mod_other_buffers
    rule = score_mod, block_mask, scale, kernel_options, *others
    if not any(gpus_of([query, key, value])):
        return _raw_operator(query, key, value, *rule)
    if kernel_options.get("BACKEND") == "FLASH":
        raise NotSimulated("flex_attention with BACKEND='FLASH'")
    query, key, value = autocast.for_lower_precision((query, key, value))
    dry, compiled = state.current().dry, is_compiled()
    if dry is not None:
        dry.flex_attention.add(compiled)
    with FunctionMode(state.current()), autocast.without():
        if not compiled:
            out, log_sums, largest = _formula()(query, key, value, *rule)
            return out, log_sums, largest.detach()
        captured = _captured(score_mod, block_mask[-1], *others)
        seen = _seen(query, key, block_mask, captured)
        return _Fused.apply(rule, seen, query, key, value, *captured)


def _formula() -> Callable:
    """What computes it on any device, by operations that autograd knows."""
    return _raw_operator.py_kernels[DispatchKey.CompositeExplicitAutograd]


class _Fused(torch.autograd.Function):
    """The compiled operator; values are computed beside it, and cost nothing."""

    @staticmethod
    def forward(ctx, rule, seen, query, key, value, *captured):
        inputs = query, key, value
        made = fused.forward(*inputs, captured, seen)
        if _has_values():
            with _beside():
                _fill(made, _formula()(*inputs, *rule))
        ctx.rule, ctx.seen = rule, seen
        ctx.mark_non_differentiable(made[2])
        ctx.save_for_backward(*inputs, *made[:2], *captured)
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, gradient_of_sums, _):
        query, key, value, out, logsumexp, *captured = ctx.saved_tensors
        inputs, wanted = (query, key, value), ctx.needs_input_grad[5:]
        if gradient is None:
            gradient = torch.zeros_like(out)
        delta = fused.delta(out, gradient)
        if gradient_of_sums is not None:
            delta = delta - gradient_of_sums / math.log(2)
        made = fused.backward(
            *inputs, captured, ctx.seen, gradient, logsumexp, delta, wanted
        )
        learn = [t for t, its in zip(captured, wanted, strict=True) if its]
        if _has_values():
            given = gradient, gradient_of_sums
            with _beside():
                _fill(made, _gradients(ctx.rule, inputs, learn, given))
        of_captured = iter(made[3:])
        more = [next(of_captured) if its else None for its in wanted]
        return None, None, *made[:3], *more


def _has_values() -> bool:
    runtime = state.current()
    return runtime.dry is None and not runtime.without_values


@contextlib.contextmanager
def _beside() -> Iterator[None]:
    """What is computed now is no work of a GPU: all tensors are the host's."""
    gpus = [gpu for gpu in state.current().gpus if gpu.alive]
    for gpu in gpus:
        gpu.alive = False
    try:
        with DisableTorchDispatch():
            yield
    finally:
        for gpu in gpus:
            gpu.alive = True


def _gradients(rule, inputs, learn, given) -> tuple:
    """Those of the inputs, and of what the rule has captured and learns."""
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        out, log_sums, _ = _formula()(*inputs, *rule)
    results = [(t, g) for t, g in zip((out, log_sums), given, strict=True)
               if g is not None]  # fmt: skip
    return raw_run_backward(
        *zip(*results, strict=True), False, False, (*inputs, *learn),
        allow_unreachable=True, accumulate_grad=False,
    )  # fmt: skip


def _fill(made, values) -> None:
    for tensor, value in zip(made, values, strict=True):
        if value is not None:
            tensor.detach().copy_(value.detach())


# -- what a rule is made of ------------------------------------------------------------


def _captured(*rule) -> list[torch.Tensor]:
    """The tensors that functions have around them, each once."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    left = list(rule)
    while left:
        item = left.pop()
        if isinstance(item, torch.Tensor):
            found.setdefault(id(item), item)
        elif id(item) not in seen:
            seen.add(id(item))
            left += _parts(item)
    return list(found.values())


def _parts(item) -> Iterator:
    """What a function, or a group of arguments, is made of."""
    if isinstance(item, (list, tuple)):
        yield from item
    elif isinstance(item, dict):
        yield from item.values()
    elif isinstance(item, functools.partial):
        yield from (item.func, *item.args, *item.keywords.values())
    elif isinstance(item, types.MethodType):
        yield from (item.__func__, item.__self__)
    elif isinstance(item, types.FunctionType):
        around = inspect.getclosurevars(item)
        yield from (*around.nonlocals.values(), *around.globals.values())
        yield from item.__defaults__ or ()
    elif callable(item) and not isinstance(item, type) and hasattr(item, "__dict__"):
        yield from (*vars(item).values(), type(item).__call__)


# -- which blocks are computed ---------------------------------------------------------


def _seen(query, key, block_mask, captured) -> float:
    """The share of all blocks of queries and keys in which a query sees a key."""
    counts = [t for t in (block_mask[2], block_mask[4]) if t is not None]
    queries, keys = query.shape[2], key.shape[2]
    high, wide = block_mask[-3], block_mask[-2]
    with _beside():
        if all(map(_is_known, counts)):
            blocks = max(counts[0].numel() * -(-keys // wide), 1)
            return min(1.0, sum(float(t.sum()) for t in counts) / blocks)
        if not all(map(_is_known, captured)):
            return 1.0
        shape = counts[0].shape[:2]
        return _seen_by_rule(block_mask[-1], shape, (queries, high), (keys, wide))


def _is_known(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values: in a dry run, only small ones have."""
    return not tensor.is_meta and not hasattr(storage_of(tensor), "_simgpu_unknown")


def _seen_by_rule(rule, shape, queries, keys) -> float:
    """The same from the rule alone, at the corners and the middle of some blocks."""
    from torch.nn.attention.flex_attention import create_mask

    rows, places = (_places(*side, most) for side, most in
                    ((queries, _MOST_BLOCKS), (keys, math.inf)))  # fmt: skip

    def at_places(b, h, q, k):
        return rule(b, h, rows[q], places[k])

    mask = create_mask(at_places, *shape, len(rows), len(places), device="cpu")
    blocks = mask.view(*shape, len(rows) // 3, 3, len(places) // 3, 3)
    return blocks.any(-1).any(-2).float().mean().item()


def _places(length: int, size: int, most: float) -> torch.Tensor:
    """First, middle and last place of each block, or of so many evenly spread ones."""
    blocks = -(-length // size)
    few = int(min(blocks, most))
    starts = torch.arange(few) * blocks // few * size
    ends = (starts + size).clamp(max=length) - 1
    return torch.stack((starts, (starts + ends) // 2, ends), 1).flatten()
