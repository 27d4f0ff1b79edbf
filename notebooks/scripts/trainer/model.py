"""The model that the trainers train: a Llama. Put yours in the place of this file.

What a trainer asks of it is in seam.py, and no trainer knows more of a model.
"""

from typing import NamedTuple

import torch
from seam import Model, cut, decayed, first_value  # noqa: F401  (for the trainers)
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F


class Sizes(NamedTuple):
    vocabulary: int
    width: int
    layers: int
    heads: int
    key_heads: int  # of keys and values; each is read by heads / key_heads queries
    hidden: int  # width of the MLP
    tied: bool = False  # whether the head's weight is the embedding's
    base: float = 500_000.0  # of the rotary angles
    experts: int = 0  # in the place of each MLP
    chosen: int = 2  # of them, by each token
    evened: float = 1e-3  # step of the biases that even out the experts' work


SIZES = {
    "tiny": Sizes(256, 64, 4, 4, 2, 192),
    "tiny-tied": Sizes(256, 64, 4, 4, 1, 192, tied=True),
    "tiny-experts": Sizes(256, 64, 2, 4, 2, 96, experts=4),
    "1b": Sizes(128_256, 2048, 16, 32, 8, 8192, tied=True),
    "8b": Sizes(128_256, 4096, 32, 32, 8, 14_336),
    "70b": Sizes(128_256, 8192, 80, 64, 8, 28_672),
    "8x7b": Sizes(32_000, 4096, 32, 32, 8, 14_336, base=1e6, experts=8),
}
FIRST, LAST = ("embedding",), ("norm", "head")


def rotated(x, cos, sin):
    """Turn pairs of numbers of (rows, tokens, heads, size) by their token's place."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


def attend(q, k, v, mask):
    """Of (rows, heads, tokens, size); the mask, if any, is of all tokens."""
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, enable_gqa=True
    )


class Attention(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.size, self.attend = sizes.width // sizes.heads, attend
        key_width = self.size * sizes.key_heads
        self.query = nn.Linear(sizes.width, sizes.width, bias=False)
        self.key = nn.Linear(sizes.width, key_width, bias=False)
        self.value = nn.Linear(sizes.width, key_width, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x, cos, sin, mask):
        layers = self.query, self.key, self.value
        # With slices, a rank has some of the heads: count them, do not set them
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)) for layer in layers)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # (rows, heads, tokens, size)
        y = self.attend(q, k, v, mask)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """MLPs side by side; each computes its own tokens."""

    def __init__(self, sizes):
        super().__init__()
        wide, narrow = (sizes.hidden, sizes.width), (sizes.width, sizes.hidden)
        self.gate = nn.Parameter(torch.empty(sizes.experts, *wide))
        self.up = nn.Parameter(torch.empty(sizes.experts, *wide))
        self.down = nn.Parameter(torch.empty(sizes.experts, *narrow))

    def forward(self, x, counts):
        """Of (tokens, width), sorted by expert, and how many of them each has."""
        # with experts.py, a rank has some of the experts: do not count on all
        gate, up, down = (
            p.to_local() if isinstance(p, DTensor) else p
            for p in (self.gate, self.up, self.down)
        )
        # without values, as if they were chosen equally often
        even = [len(x) // len(gate)] * len(gate)
        parts = x.split(even if x.is_meta else counts.tolist())
        found = []
        for i, part in enumerate(parts):
            gated = F.silu(F.linear(part, gate[i])) * F.linear(part, up[i])
            found.append(F.linear(gated, down[i]))
        return torch.cat(found)


def exchange(experts, x, counts):
    return experts(x, counts)


class MoE(nn.Module):
    """Each token is computed by the experts that its router chooses."""

    def __init__(self, sizes):
        super().__init__()
        self.chosen, self.exchange = sizes.chosen, exchange
        self.router = nn.Linear(sizes.width, sizes.experts, bias=False)
        self.experts = Experts(sizes)
        # chooses, but weighs nothing, so no gradient of a balance disturbs the loss
        self.register_buffer("bias", torch.empty(sizes.experts))
        self.counts, self.evened = None, sizes.evened

    def forward(self, x):
        tokens = x.flatten(0, -2)
        scores = self.router(tokens).float().softmax(-1)
        chosen = (scores + self.bias).topk(self.chosen)[1]  # (tokens, chosen)
        weights = scores.gather(-1, chosen)
        counts = F.one_hot(chosen, scores.shape[-1]).sum((0, 1))
        if self.training:
            self.counts = counts if self.counts is None else self.counts + counts
        order = chosen.flatten().argsort(stable=True)  # by expert
        found = self.exchange(self.experts, tokens[order // self.chosen], counts)
        found = torch.empty_like(found).index_copy(0, order, found)
        found = found.unflatten(0, (-1, self.chosen)) * weights[..., None].to(x.dtype)
        return found.sum(1).view_as(x)

    @torch.no_grad()
    def adjust(self, add_up):
        """Raise the bias of experts with too little work, lower that of others."""
        counts = self.counts.float()
        add_up(counts)
        self.bias += self.evened * (counts.mean() - counts).sign()
        self.counts = None


class Block(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.norm1 = nn.RMSNorm(sizes.width, eps=1e-5)
        self.attention = Attention(sizes)
        self.norm2 = nn.RMSNorm(sizes.width, eps=1e-5)
        self.mlp = MoE(sizes) if sizes.experts else MLP(sizes)

    def forward(self, x, cos, sin, mask):
        x = x + self.attention(self.norm1(x), cos, sin, mask)
        return x + self.mlp(self.norm2(x))


class Llama(Model):
    def __init__(self, sizes, context):
        super().__init__()
        self.sizes, self.context = sizes, context
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.head.weight = self.embedding.weight
        angles = context, 1, sizes.width // sizes.heads // 2
        for name in ("cos", "sin"):  # not in checkpoints: they can be computed
            self.register_buffer(name, torch.empty(angles), persistent=False)

    def fill_buffers(self):
        count = 2 * self.cos.shape[-1]
        pair = torch.arange(0, count, 2, device=self.cos.device) / count
        place = torch.arange(self.context, device=self.cos.device)
        angle = place[:, None, None] * self.sizes.base**-pair
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())
        for moe in self.mixtures():
            moe.bias.zero_()

    def mixtures(self):
        return [module for module in self.modules() if isinstance(module, MoE)]

    def adjust(self, add_up):
        for moe in self.mixtures():
            moe.adjust(add_up)

    def embed(self, batch):
        return self.embedding(batch["tokens"])

    def seen(self, batch, part=slice(None)):
        length = batch["tokens"].shape[1]
        mask = None
        if "document" in batch:  # a token sees those before it in its own document
            document = batch["document"]
            mask = document[:, None, :, None] == document[:, None, None, :]
            mask = mask.tril()
        return self.cos[:length][part], self.sin[:length][part], mask

    def losses(self, x, batch):
        scores = self.head(self.norm(x)).flatten(0, 1).float()
        return F.cross_entropy(scores, batch["targets"].flatten(), reduction="sum")


def make(size, context):
    if size not in SIZES:
        raise ValueError(f"--size is one of {', '.join(SIZES)}, not {size}")
    return Llama(SIZES[size], context)


def counted(batch):
    return (batch["targets"] >= 0).sum()  # a target of -100 is ignored


def slices(model):
    if model.sizes.experts:
        raise ValueError("experts are not sliced; experts.py divides them")
    heads = "heads", model.sizes.heads, model.sizes.key_heads
    return {
        "embedding": "lookup",
        "blocks.*.norm?": "tokens",
        "blocks.*.attention": "whole",
        "blocks.*.attention.query": "columns",
        "blocks.*.attention.key": heads,
        "blocks.*.attention.value": heads,
        "blocks.*.attention.out": "rows",
        "blocks.*.mlp": "whole",
        "blocks.*.mlp.gate": "columns",
        "blocks.*.mlp.up": "columns",
        "blocks.*.mlp.down": "rows",
        "norm": "tokens",
        "head": "scores",
    }
