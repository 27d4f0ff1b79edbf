"""The program that is planned: a decoder in bfloat16, in slices and shards.

Between the sliced layers, each rank of a group has some of the tokens (sequence
parallelism): they are gathered before a layer's first products and summed and scattered
behind its last. Shapes: (tokens, sequences, width), so that what is gathered lies in
one piece. `group` is None where nothing is sliced.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.utils import checkpoint as recomputing

from simgpu._plan import ring
from simgpu._plan.shapes import Shape

RECOMPUTE = ("none", "selective", "full")
_SAVED = (  # by selective recomputing, beside every second product
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
)  # fmt: skip


def _gathered(x: torch.Tensor, group) -> torch.Tensor:
    whole = x.new_empty((len(x) * group.size(), *x.shape[1:]))
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def _scattered(x: torch.Tensor, group) -> torch.Tensor:
    part = x.new_empty((len(x) // group.size(), *x.shape[1:]))
    dist.reduce_scatter_tensor(part, x.contiguous(), group=group)
    return part


class _Gather(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _scattered(grad, ctx.group), None


class _Scatter(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _gathered(grad, ctx.group), None


def gather(x: torch.Tensor, group) -> torch.Tensor:
    return x if group is None else _Gather.apply(x, group)


def scatter(x: torch.Tensor, group) -> torch.Tensor:
    return x if group is None else _Scatter.apply(x, group)


class _Exchange(Function):
    """An equal part of the rows goes to each rank, and comes back in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x, group=group)
        return y

    @staticmethod
    def backward(ctx, grad):
        y = torch.empty_like(grad)
        dist.all_to_all_single(y, grad.contiguous(), group=ctx.group)
        return y, None


def _exchange(x: torch.Tensor, group) -> torch.Tensor:
    return x if group is None else _Exchange.apply(x, group)


def _linear(rows: int, columns: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(rows, columns, bias=bias)


def _turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary positions, in float32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles).flatten(-2).to(x.dtype)


class MLP(nn.Module):
    """A gated MLP, sliced among the ranks of a group."""

    def __init__(self, width: int, inner: int, group):
        super().__init__()
        inner //= group.size() if group else 1
        self.group = group
        self.gate, self.up = _linear(width, inner), _linear(width, inner)
        self.down = _linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = gather(x, self.group)
        return scatter(self.down(F.silu(self.gate(x)) * self.up(x)), self.group)


class Experts(nn.Module):
    """Those of a rank, which all get as many tokens: (experts, tokens, width)."""

    def __init__(self, of: Shape, count: int):
        super().__init__()
        self.count, width, inner = count, of.hidden, of.intermediate
        self.gate = nn.Parameter(torch.empty(count * width, inner))
        self.up = nn.Parameter(torch.empty(count * width, inner))
        self.down = nn.Parameter(torch.empty(count * inner, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (its.unflatten(0, (self.count, -1))
                          for its in (self.gate, self.up, self.down))  # fmt: skip
        return (F.silu(x.bmm(gate)) * x.bmm(up)).bmm(down)


class Routed(nn.Module):
    """A router, and experts that are spread over a group of ranks.

    Each expert is chosen as often as any other, and has room for so many rows, rounded
    up; the router's loss for that is left out.
    """

    def __init__(self, of: Shape, group):
        super().__init__()
        self.group, self.ranks = group, group.size() if group else 1
        self.chosen, self.count = of.chosen, of.experts // self.ranks
        self.router = _linear(of.hidden, of.experts)
        self.experts = Experts(of, self.count)
        self.shared = MLP(of.hidden, of.shared, None) if of.shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).float().softmax(-1).topk(self.chosen)
        order = chosen.flatten().argsort(stable=True)  # by expert
        rows, experts = order // self.chosen, self.ranks * self.count
        if more := -len(rows) % experts:
            rows = F.pad(rows, (0, more))
        mine = _exchange(tokens[rows], self.group)
        mine = mine.unflatten(0, (self.ranks, self.count, -1)).transpose(0, 1)
        out = self.experts(mine.flatten(1, 2)).unflatten(1, (self.ranks, -1))
        out = _exchange(out.transpose(0, 1).flatten(0, 2), self.group)
        out = out[order.argsort()].unflatten(0, (-1, self.chosen))
        weights = weights / weights.sum(-1, keepdim=True)
        out = (out * weights.to(x.dtype)[..., None]).sum(1).view_as(x)
        return out if self.shared is None else out + self.shared(x)


class Projections(nn.Module):
    """Queries, keys and values, sliced among the ranks of a group by heads."""

    def __init__(self, of: Shape, group):
        super().__init__()
        n, width, self.size = group.size() if group else 1, of.hidden, of.head_size
        queries, keys = of.heads * of.head_size // n, of.kv_heads * of.head_size // n
        self.query = _linear(width, queries, of.biases)
        self.key = _linear(width, keys, of.biases)
        self.value = _linear(width, keys, of.biases)
        norms = nn.RMSNorm if of.head_norms else nn.Identity
        self.norm_q, self.norm_k = norms(of.head_size), norms(of.head_size)

    def forward(self, y: torch.Tensor, angles: torch.Tensor) -> tuple:
        q, k, v = (layer(y).unflatten(-1, (-1, self.size))
                   for layer in (self.query, self.key, self.value))  # fmt: skip
        return _turned(self.norm_q(q), angles), _turned(self.norm_k(k), angles), v


class LatentProjections(nn.Module):
    """The same, made from vectors of fewer elements; nothing is sliced."""

    def __init__(self, of: Shape):
        super().__init__()
        self.of = its = of.latent
        width, made = of.hidden, of.heads * sum(its[2:4])
        self.query = _linear(its.queries or width, made)
        self.down_q = _linear(width, its.queries) if its.queries else nn.Identity()
        self.norm_q = nn.RMSNorm(its.queries) if its.queries else nn.Identity()
        self.down = _linear(width, its.keys + its.turned)
        self.norm = nn.RMSNorm(its.keys)
        self.up = _linear(its.keys, of.heads * (its.plain + its.values))

    def forward(self, y: torch.Tensor, angles: torch.Tensor) -> tuple:
        its = self.of
        q = self.query(self.norm_q(self.down_q(y))).unflatten(-1, (-1, sum(its[2:4])))
        plain, turned = q.split((its.plain, its.turned), -1)
        q = torch.cat((plain, _turned(turned, angles)), -1)
        small, turned = self.down(y).split((its.keys, its.turned), -1)
        both = self.up(self.norm(small)).unflatten(-1, (-1, its.plain + its.values))
        plain, v = both.split((its.plain, its.values), -1)
        turned = _turned(turned[:, :, None], angles).expand(*plain.shape[:3], -1)
        return q, torch.cat((plain, turned), -1), v


class Block(nn.Module):
    """A layer of the decoder: attention, and a gated MLP or experts.

    Args:
        of: the model.
        group: among whose ranks layers are sliced, or None.
        recompute: "none", "selective" or "full".
        spread: the group over whose ranks experts are spread, or None.
        context: the group whose ranks have parts of each sequence, or None.
        is_dense: whether it has an MLP where others have experts.
    """

    def __init__(self, of: Shape, group, recompute: str = "none", spread=None,
                 context=None, is_dense: bool = False):  # fmt: skip
        super().__init__()
        self.group, self.recompute, self.context = group, recompute, context
        n, width = group.size() if group else 1, of.hidden
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.projections = (
            LatentProjections(of) if of.latent else Projections(of, group)
        )
        self.out = _linear(of.heads * of.widths[1] // n, width)
        if of.experts and not is_dense:
            self.mlp = Routed(of, spread)
        else:
            self.mlp = MLP(width, of.dense_size if is_dense else of.intermediate, group)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        if self.recompute == "none":
            return self._compute(x, angles)
        if self.recompute == "full":
            return _again(self._compute, x, angles)
        if self.context is None:
            return _again(self._compute, x, angles, context_fn=_saving)
        # what attention keeps is kept by itself: it is several operations
        inner = _again(self._project, x, angles, context_fn=_saving)
        return _again(self._finish, x, self._attend(*inner), context_fn=_saving)

    def _compute(self, x, angles):
        return self._finish(x, self._attend(*self._project(x, angles)))

    def _project(self, x, angles):
        made = self.projections(gather(self.norm1(x), self.group), angles)
        return tuple(its.permute(1, 2, 0, 3) for its in made)

    def _attend(self, q, k, v):
        if self.context is not None:
            return ring.attention(q, k, v, self.context)
        shared = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True,
                                              enable_gqa=shared)  # fmt: skip

    def _finish(self, x, y):
        x = x + scatter(self.out(y.permute(2, 0, 1, 3).flatten(2)), self.group)
        return x + self.mlp(self.norm2(x))


def _again(run, *inputs, **more: Any):
    """What a part of a block makes, of which little is kept for backward."""
    return recomputing.checkpoint(run, *inputs, use_reentrant=False,
                                  preserve_rng_state=False, **more)  # fmt: skip


def _saving():
    """Keep attention and every second product; all else is done again."""
    products = 0

    def policy(ctx, operation, *args, **kwargs):
        nonlocal products
        kept = recomputing.CheckpointPolicy.MUST_SAVE
        again = recomputing.CheckpointPolicy.PREFER_RECOMPUTE
        name = operation.__name__.partition(".")[0]
        if name in ("mm", "bmm"):
            products += 1
            return again if products % 2 == 0 else kept
        return kept if name in _SAVED else again

    return recomputing.create_selective_checkpoint_contexts(policy)


class First(nn.Module):
    """The embedding: words are spread over the ranks of a group."""

    def __init__(self, of: Shape, group):
        super().__init__()
        self.group, self.words = group, of.vocab // (group.size() if group else 1)
        self.weight = nn.Parameter(torch.empty(self.words, of.hidden))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return F.embedding(ids, self.weight)
        others = (ids < 0) | (ids >= self.words)
        y = F.embedding(ids.masked_fill(others, 0), self.weight)
        return scatter(y.masked_fill(others[..., None], 0.0), self.group)


class _CrossEntropy(Function):
    """Of scores (rows, words) in float32 whose words are spread over a group."""

    @staticmethod
    def forward(ctx, scores, labels, group):
        most = scores.amax(-1, keepdim=True)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        shifted = scores - most
        weights = shifted.exp()
        sums = weights.sum(-1)
        dist.all_reduce(sums, group=group)
        others = (labels < 0) | (labels >= scores.shape[-1])
        mine = labels.masked_fill(others, 0)[:, None]
        chosen = shifted.gather(-1, mine)[:, 0].masked_fill(others, 0.0)
        dist.all_reduce(chosen, group=group)
        weights.div_(sums[:, None])
        ctx.save_for_backward(weights, mine, others)
        return (sums.log() - chosen).mean()

    @staticmethod
    def backward(ctx, grad):
        weights, mine, others = ctx.saved_tensors
        grads = weights.mul(grad / len(weights))
        return grads.scatter_add_(-1, mine, (~others)[:, None] * (-grad)), None, None


class Last(nn.Module):
    """Norm, head and loss; the head's words are spread over the ranks of a group."""

    def __init__(self, of: Shape, group):
        super().__init__()
        self.group = group
        self.norm = nn.RMSNorm(of.hidden)
        self.head = _linear(of.hidden, of.vocab // (group.size() if group else 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.scores(x), labels)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(gather(self.norm(x), self.group))

    def loss(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores, labels = scores.flatten(0, 1).float(), labels.flatten()
        if self.group is None:
            return F.cross_entropy(scores, labels)
        return _CrossEntropy.apply(scores, labels, self.group)


def angles_of(of: Shape, tokens: int, context=None) -> torch.Tensor:
    """Of rotary positions: (tokens, 1, 1, half of what is turned), complex.

    Args:
        of: the model.
        tokens: of a sequence that this rank has.
        context: the group whose ranks have the others, or None.
    """
    speeds = 1e4 ** -(torch.arange(0, of.turned, 2).float() / of.turned)
    places = ring.places(tokens, context) if context else torch.arange(tokens)
    turns = places.float()[:, None] * speeds
    return torch.polar(torch.ones_like(turns), turns)[:, None, None]
