"""The model of vTrain's runs: GPT of Megatron-LM of 2022, block by block.

No sequence parallelism: activations between layers are whole, and their sums are
all-reduced. Attention is in parts, as its kernels were then. Each layer is computed
again in backward. float16; shapes: (tokens, batch, width).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from layouts.shapes import Layout
from layouts.tensor_parallel import CrossEntropy


class _Copy(Function):
    """Whole forward; the sum of its gradients backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        if ctx.group is not None:
            grad = grad.contiguous()
            dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(Function):
    """The sum forward; whole backward."""

    @staticmethod
    def forward(ctx, x, group):
        if group is not None:
            dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Softmax(Function):
    """Scaled, masked and softened by one kernel."""

    @staticmethod
    def forward(ctx, scores):
        out = torch.softmax(scores, dim=-1)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(grad, out, -1, out.dtype)


class Block(nn.Module):
    """A layer, computed again in backward."""

    def __init__(self, of: Layout, group):
        super().__init__()
        self.group, width, tp = group, of.hidden, of.tp
        self.heads, self.size = of.heads // tp, of.hidden // of.heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width // tp)
        self.out = nn.Linear(width // tp, width, bias=False)
        self.up = nn.Linear(width, 4 * width // tp)
        self.down = nn.Linear(4 * width // tp, width, bias=False)
        self.biases = nn.ParameterList(torch.empty(width) for _ in range(2))

    def forward(self, x, _=None):
        return checkpoint(self._layer, x, use_reentrant=True)

    def _layer(self, x):
        y = _Copy.apply(self.norms[0](x), self.group)
        y = _Sum.apply(self.out(self._attend(y)), self.group)
        x = functional.dropout(y + self.biases[0], 0.1) + x
        y = _Copy.apply(self.norms[1](x), self.group)
        y = self.down(functional.gelu(self.up(y)))
        y = _Sum.apply(y, self.group)
        return functional.dropout(y + self.biases[1], 0.1) + x

    def _attend(self, y):
        tokens, batch, _ = y.shape
        y = self.qkv(y).view(tokens, batch, self.heads, 3 * self.size)
        q, k, v = (its.reshape(tokens, batch * self.heads, self.size).transpose(0, 1)
                   for its in y.split(self.size, dim=-1))  # fmt: skip
        scores = q.new_empty(batch * self.heads, tokens, tokens)
        scores = torch.baddbmm(scores, q, k.transpose(1, 2), beta=0.0)
        weights = functional.dropout(_Softmax.apply(scores), 0.1)
        y = torch.bmm(weights, v).transpose(0, 1).contiguous()
        return y.view(tokens, batch, self.heads * self.size)


class First(nn.Module):
    """Embeddings of words and places."""

    def __init__(self, of: Layout, group):
        super().__init__()
        self.group, self.words = group, of.vocab // of.tp
        self.weight = nn.Parameter(torch.empty(self.words, of.hidden))
        self.places = nn.Parameter(torch.empty(of.tokens, of.hidden))

    def forward(self, ids):
        if self.group is None:
            y = functional.embedding(ids, self.weight)
        else:
            mask = (ids < 0) | (ids >= self.words)
            mine = ids.clone() - 0
            mine[mask] = 0
            y = functional.embedding(mine, self.weight) * (~mask[..., None])
            y = _Sum.apply(y, self.group)
        y = y + self.places
        return functional.dropout(y.transpose(0, 1).contiguous(), 0.1)


class Last(nn.Module):
    """Norm, head and loss."""

    def __init__(self, of: Layout, group):
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(of.hidden)
        self.head = nn.Parameter(torch.empty(of.vocab // of.tp, of.hidden))

    def forward(self, x, labels, mask):
        x = _Copy.apply(self.norm(x), self.group)
        logits = functional.linear(x, self.head).transpose(0, 1).contiguous()
        loss = CrossEntropy.apply(logits.float(), labels, self.group)
        return (loss * mask).sum() / mask.sum()


def stages(of: Layout) -> list[tuple[int, bool]]:
    """(layers, whether the head is there) of each stage: as many in each."""
    each = of.layers // of.pp
    return [(each, stage == of.pp - 1) for stage in range(of.pp)]
