"""Flash attention of sequences that lie one behind the other, computed on the CPU.

Models: `aten::_flash_attention_forward`, the same into a given output, and the backward
pass, which `torch.nn.attention.varlen` calls: what the kernel refuses, one kernel for
all sequences, its results as CUDA returns them. Each sequence is attended to by itself,
so that a program gets the values of plain attention. The last query of a sequence
stands at its last key, for causal attention and for windows. Tensors of (batch, tokens,
heads, width), without offsets, are taken, too. cuDNN's kernels for
packed sequences count as the same. Leaves out: dropout, ALiBi, FP8, and memory that the
kernel takes while it runs.

Sources: aten/src/ATen/native/transformers/cuda/attention.cu and flash_attn/
flash_api.cpp, mask.h and softmax.h of PyTorch 2.13.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from simgpu._dispatch.attention_kernels import attend, gradients
from simgpu._dispatch.kernel_work import COUNTED
from simgpu._dispatch.low_precision import HALF
from simgpu._dispatch.operation import handles
from simgpu._dispatch.operation_call import Call
from simgpu._errors import NotSimulated

_FORWARD = "_flash_attention_forward"
_INTO = "_flash_attention_forward_no_dropout_inplace"
_BACKWARD = "_flash_attention_backward"
_CUDNN = "_cudnn_attention_forward"  # which PyTorch prefers on Hopper, since 2.14
_CUDNN_INTO = "_cudnn_attention_forward_no_dropout_inplace"
_CUDNN_BACKWARD = "_cudnn_attention_backward"
_AMPERE = (8, 0)  # compute capability of the first cards with flash attention
_WIDEST = 256  # of a head
_read = torch.Tensor.tolist  # as the kernel does: no copy to the host
_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
_PAGE = 256  # a page of keys has a multiple of so many


class _Sequence(NamedTuple):
    """Where one sequence lies: slices of the tokens, and the pages of its keys."""

    queries: slice
    keys: slice
    pages: torch.Tensor | None


class _Rule(NamedTuple):
    """Which keys a query sees: a number before and after it, or all (-1)."""

    left: int
    right: int

    def is_triangle(self, queries: int, keys: int) -> bool:
        """Whether it is causal attention of as many queries as keys."""
        return queries == keys and self == (-1, 0)

    def mask(self, queries: int, keys: int) -> torch.Tensor | None:
        """(queries, keys), float32: 0 where a key is seen, else -inf; None is all."""
        if self.left < 0 and self.right < 0:
            return None
        place = torch.arange(queries)[:, None] + keys - queries
        distance = torch.arange(keys) - place
        hidden = torch.zeros(queries, keys, dtype=torch.bool)
        if self.left >= 0:
            hidden |= distance < -self.left
        if self.right >= 0:
            hidden |= distance > self.right
        return torch.zeros(queries, keys).masked_fill(hidden, -math.inf)


def _rule(is_causal: bool, left: int | None, right: int | None, longest: int) -> _Rule:
    left, right = (-1 if side is None else side for side in (left, right))
    if is_causal:
        right = 0
    return _Rule(*(-1 if side >= longest else side for side in (left, right)))


def _forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    return_debug_mask, *, scale=None, window_size_left=None, window_size_right=None,
    seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None, out=None,
):  # fmt: skip
    """The output, its logsumexp, two tensors of a random state, and no weights."""
    __tracebackhide__ = True
    if alibi_slopes is not None:
        raise NotSimulated("ALiBi in flash attention")
    if dropout_p:
        raise NotSimulated("dropout inside of fused attention")
    _check(return_debug_mask, "return_softmax is only supported when p_dropout > 0.0")
    packed = cum_seq_q is not None
    heads = query.shape[-2]
    if out is None:
        out = torch.empty_like(query)
    if packed:
        logsumexp = query.new_empty((heads, len(query)), dtype=torch.float32)
    else:
        shape = (len(query), heads, query.shape[1])
        logsumexp = query.new_empty(shape, dtype=torch.float32)
    state = [query.new_zeros(n, dtype=torch.uint64) for n in ((2,), ())]
    found = out, logsumexp, *state, query.new_empty(0)
    if query.is_meta:
        return found
    if not packed:
        rule = _rule(is_causal, window_size_left, window_size_right, key.shape[1])
        parts = _attend(query, key, value, rule, scale)
        out.copy_(parts[0].transpose(1, 2))
        logsumexp.copy_(parts[1])
        return found
    rule = _rule(is_causal, window_size_left, window_size_right, max_k)
    pages = cum_seq_q, cum_seq_k, query, key, seqused_k, block_table
    for sequence in _sequences(*pages):
        parts = _attend(
            query[None, sequence.queries], _keys(key, sequence),
            _keys(value, sequence), rule, scale,
        )  # fmt: skip
        out[sequence.queries] = parts[0][0].transpose(0, 1)
        logsumexp[:, sequence.queries] = parts[1][0]
    return found


def _into(out, *args, **kwargs):
    """The logsumexp; the output goes into `out`."""
    __tracebackhide__ = True
    return _forward(*args, **kwargs, out=out)[1]


def _backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
    dropout_p, is_causal, rng_state, unused, *, scale=None, window_size_left=None,
    window_size_right=None,
):  # fmt: skip
    """The gradients of query, key and value."""
    __tracebackhide__ = True
    if dropout_p:
        raise NotSimulated("dropout inside of fused attention")
    found = [torch.empty_like(tensor) for tensor in (query, key, value)]
    if query.is_meta:
        return tuple(found)
    window = window_size_left, window_size_right
    results = grad_out, query, key, value, out
    if cum_seq_q is None:
        rule = _rule(is_causal, *window, key.shape[1])
        parts = _gradients(*results, logsumexp, rule, scale)
        for gradient, part in zip(found, parts, strict=True):
            gradient.copy_(part.transpose(1, 2))
        return tuple(found)
    rule = _rule(is_causal, *window, max_k)
    for queries, keys, _ in _sequences(cum_seq_q, cum_seq_k, query, key):
        of_one = [t[None, s] for t, s in zip(
            results, (queries, queries, keys, keys, queries), strict=True
        )]  # fmt: skip
        parts = _gradients(*of_one, logsumexp[None, :, queries], rule, scale)
        for gradient, where, part in zip(
            found, (queries, keys, keys), parts, strict=True
        ):
            gradient[where] = part[0].transpose(0, 1)
    return tuple(found)


def _cudnn(
    query, key, value, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k,
    compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *,
    scale=None, **cache,
):  # fmt: skip
    __tracebackhide__ = True
    if attn_bias is not None or return_debug_mask:
        raise NotSimulated("a bias, or the weights, of cuDNN's attention")
    out, logsumexp, *state, weights = _forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        False, scale=scale, **cache,
    )  # fmt: skip
    return out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, *state, weights


def _cudnn_into(
    out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal=False, *,
    scale=None, **cache,
):  # fmt: skip
    __tracebackhide__ = True
    return _into(
        out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, 0.0, is_causal,
        False, scale=scale, **cache,
    )  # fmt: skip


def _cudnn_backward(
    grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias,
    cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, *, scale=None,
):  # fmt: skip
    __tracebackhide__ = True
    return _backward(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
        dropout_p, is_causal, philox_seed, philox_offset, scale=scale,
    )  # fmt: skip


def _attend(query, key, value, rule: _Rule, scale):
    """(B, H, S, D) output and (B, H, S) logsumexp, of (B, S, H, D)."""
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    queries, keys = query.shape[2], key.shape[2]
    if not queries or not keys:  # softmax of nothing
        return torch.zeros_like(query), query.new_full(
            query.shape[:3], math.inf, dtype=torch.float32
        )
    causal = rule.is_triangle(queries, keys)
    mask = None if causal else rule.mask(queries, keys)
    out, logsumexp = attend(query, key, value, causal, mask, scale)
    if mask is not None and (blind := mask.isinf().all(1)).any():
        out[:, :, blind], logsumexp[:, :, blind] = 0.0, math.inf
    return out, logsumexp


def _gradients(grad_out, query, key, value, out, logsumexp, rule: _Rule, scale):
    """Those of (B, S, H, D) query, key and value, as (B, H, S, D)."""
    tensors = [t.transpose(1, 2) for t in (grad_out, query, key, value, out)]
    queries, keys = query.shape[1], key.shape[1]
    if not queries or not keys:
        return [torch.zeros_like(tensor) for tensor in tensors[1:4]]
    causal = rule.is_triangle(queries, keys)
    mask = None if causal else rule.mask(queries, keys)
    return gradients(*tensors, logsumexp.contiguous(), causal, mask, scale)


def _keys(tensor: torch.Tensor, sequence: _Sequence) -> torch.Tensor:
    """(1, S, H, D) keys or values of a sequence."""
    if sequence.pages is not None:
        tensor = tensor[sequence.pages].flatten(0, 1)
    return tensor[None, sequence.keys]


def _sequences(
    cum_seq_q, cum_seq_k, query, key, seqused_k=None, block_table=None
) -> Iterator[_Sequence]:
    """Where the sequences lie.

    Raises:
        NotSimulated: if one is said to end behind the tokens that there are.
    """
    __tracebackhide__ = True
    starts, ends = _read(cum_seq_q), _read(cum_seq_k)
    used = None if seqused_k is None else _read(seqused_k)
    for i in range(len(starts) - 1):
        begin, stop = ends[i : i + 2]
        length = stop - begin if used is None else used[i]
        pages = None
        if block_table is not None:
            count = -(-length // key.shape[1])
            pages, begin = block_table[i, :count].long(), 0
        last = len(key) if pages is None else len(pages) * key.shape[1]
        queries = slice(*starts[i : i + 2])
        keys = slice(begin, begin + length)
        in_order = 0 <= queries.start <= queries.stop and 0 <= begin <= keys.stop
        if not in_order or queries.stop > len(query) or keys.stop > last:
            raise NotSimulated(
                "attention to tokens that are not there",
                f"Sequence {i} has queries {queries.start} to {queries.stop} of "
                f"{len(query)}, and keys {keys.start} to {keys.stop} of {last}.",
            )
        yield _Sequence(queries, keys, pages)


# -- what it costs ---------------------------------------------------------------------


def _named(call: Call) -> dict:
    """The arguments of a call by their names, which these operations share."""
    return {argument.name: value for argument, value in call.named_arguments()}


def _count(call: Call, out) -> tuple[int, None]:
    """FLOPs of the products of all sequences; five in backward instead of two."""
    given = _named(call)
    query, key, offsets = given["query"], given["key"], given["cum_seq_q"]
    heads, width = query.shape[-2:]
    if offsets is None:
        pairs = query.shape[0] * query.shape[1] * key.shape[1]
    elif call.runtime.without_values:
        pairs = _most_pairs(len(query), given["max_q"], given["max_k"])
    else:
        cache = given.get("seqused_k"), given.get("block_table")
        pairs = sum(
            (queries.stop - queries.start) * (keys.stop - keys.start)
            for queries, keys, _ in _sequences(
                offsets, given["cum_seq_k"], query, key, *cache
            )
        )
    products = 5 if "grad_out" in given else 2
    return products * 2 * heads * width * pairs, None


def _most_pairs(tokens: int, longest: int, longest_keys: int) -> int:
    """Of a query and a key, if as many sequences as can be are the longest."""
    whole, rest = divmod(tokens, max(longest, 1))
    return whole * longest * longest_keys + rest * min(rest, longest_keys)


# -- what the kernel refuses -----------------------------------------------------------


def _check(wrong: bool, message: str) -> None:
    __tracebackhide__ = True
    if wrong:
        raise RuntimeError(message)


def _check_inputs(call: Call, gpu) -> None:
    """Refuse what CUDA refuses, in its words."""
    __tracebackhide__ = True
    given = _named(call)
    query, key, value = (given[name] for name in ("query", "key", "value"))
    backward = "grad_out" in given
    _check(
        gpu.card.capability < _AMPERE,
        "FlashAttention only supports Ampere GPUs or newer.",
    )
    _check(
        query.dtype not in HALF, "FlashAttention only support fp16 and bf16 data type"
    )
    offsets = {name: given[f"cum_seq_{name[-1]}"] for name in _OFFSETS}
    wrong = len({offset is None for offset in offsets.values()}) > 1
    _check(wrong, "cumulative_sequence_length_q and cumulative_sequence_length_k must "
                  "be both set or both not set")  # fmt: skip
    for name, tensor in (("key", key), ("value", value)):
        wrong = tensor.dtype != query.dtype
        _check(wrong, f"query and {name} must have the same dtype")
    for name, offset in offsets.items():
        wrong = offset is not None and offset.dtype != torch.int32
        _check(wrong, f"{name} must have dtype int32")
    for tensor in (query, key, value):
        wrong = tensor.stride(-1) != 1
        _check(wrong, "Input tensor must have contiguous last dimension")
    for name, offset in offsets.items():
        wrong = offset is not None and not offset.is_contiguous()
        _check(wrong, f"{name} must be contiguous")
    first = given["cum_seq_q"]
    _check(first is not None and first.numel() < 2, "batch size must be positive")
    table = given.get("block_table")
    _check(
        table is not None and key.shape[1] % _PAGE != 0,
        f"Paged KV cache block size must be divisible by {_PAGE}",
    )
    heads, width, groups = *query.shape[-2:], key.shape[-2]
    way = "backward" if backward else "forward"
    wide = f"FlashAttention {way} only supports head dimension at most {_WIDEST}"
    _check(width > _WIDEST, wide)
    few = "Number of heads in key/value must divide number of heads in query"
    _check(heads % groups != 0, few)
    odd = "head_size must be a multiple of 8, this is ensured by padding!"
    _check(width % 8 != 0, "head_size should be a multiple of 8" if backward else odd)
    _check_shapes((query, key, value), tuple(offsets.values()), table)


def _check_shapes(tensors, offsets, table) -> None:
    __tracebackhide__ = True
    query, key, value = tensors
    packed = offsets[0] is not None
    _check(
        query.dim() != 4 - packed,
        "q must have shape (total_q, num_heads, head_size_og)" if packed else
        "q must have shape (batch_size, seqlen_q, num_heads, head_size_og)",
    )  # fmt: skip
    shape = (*key.shape[:-1], query.shape[-1])
    words = "total_k" if packed else "batch_size, seqlen_k"
    if table is not None:
        words = "num_blocks, page_block_size"
    for tensor, name in ((key, "k"), (value, "v")):
        wrong = tensor.shape != shape or tensor.dim() != 3 + (
            table is not None or not packed
        )
        _check(wrong, f"{name} must have shape ({words}, num_heads_k, head_size_og)")
    if packed:
        wrong = offsets[1].shape != offsets[0].shape
        _check(wrong, "cu_seqlens_k must have shape (batch_size + 1)")


def _computes(name: str, formula: Callable) -> None:
    """Let `formula` compute an operation that PyTorch has on CUDA only."""

    @handles(name)
    def run(call: Call):
        __tracebackhide__ = True
        of_batches = "cudnn" in name and _named(call)["cum_seq_q"] is None
        if of_batches or call.operation.func._schema.overload_name:
            raise NotSimulated(call.operation.func.name())
        gpu = call.common_gpu()
        if gpu is not None:
            _check_inputs(call, gpu)
            call.func = formula
        return call.run_on(gpu)

    COUNTED[name] = _count


_computes(_FORWARD, _forward)
_computes(_INTO, _into)
_computes(_BACKWARD, _backward)
_computes(_CUDNN, _cudnn)
_computes(_CUDNN_INTO, _cudnn_into)
_computes(_CUDNN_BACKWARD, _cudnn_backward)
