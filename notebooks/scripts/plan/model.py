"""Language models: their sizes, and a Llama itself as a PyTorch module.

`MODELS` has the sizes of five published models, `parameters` counts exactly, and
`build` makes the `nn.Module` that `tracker.py` trains with tensors without memory.
Blocks without a gate are those of GPT, here without biases and learned positions.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Model:
    """The sizes of a Llama, or of a GPT."""

    name: str
    layers: int
    dim: int  # elements of a token between two blocks
    heads: int
    kv_heads: int  # heads of keys and values; several heads of queries share each
    hidden: int  # elements of a token inside the feed-forward network
    vocab: int
    tied: bool = False  # the embedding is also the last matrix
    gated: bool = True  # SwiGLU with three matrices, as in Llama; else two, as in GPT

    @property
    def kv_dim(self) -> int:
        """Elements of a token in keys, and in values."""
        return self.dim // self.heads * self.kv_heads

    @property
    def block(self) -> int:
        """Parameters of one block."""
        attention = 2 * self.dim * (self.dim + self.kv_dim)
        matrices = 3 if self.gated else 2
        return attention + matrices * self.dim * self.hidden + 2 * self.dim

    @property
    def root(self) -> int:
        """Parameters outside the blocks: embedding, last norm, last matrix."""
        return (1 if self.tied else 2) * self.vocab * self.dim + self.dim


# Source: config.json of meta-llama/Llama-3.2-1B, Llama-2-7b-hf, Meta-Llama-3-8B,
# Meta-Llama-3-70B and Llama-3.1-405B on huggingface.co
MODELS = {
    "1B": Model("Llama 3.2 1B", 16, 2048, 32, 8, 8192, 128256, tied=True),
    "7B": Model("Llama 2 7B", 32, 4096, 32, 32, 11008, 32000),
    "8B": Model("Llama 3 8B", 32, 4096, 32, 8, 14336, 128256),
    "70B": Model("Llama 3 70B", 80, 8192, 64, 8, 28672, 128256),
    "405B": Model("Llama 3.1 405B", 126, 16384, 128, 8, 53248, 128256),
}


def find_model(model: "str | Model") -> Model:
    """The model of that name, or the one given.

    Raises:
        ValueError: for a name that is not in `MODELS`; the message lists them.
    """
    if isinstance(model, Model):
        return model
    if str(model).upper() not in MODELS:
        raise ValueError(f"unknown model {model!r}; choose one of {', '.join(MODELS)}")
    return MODELS[str(model).upper()]


def parameters(model: "str | Model") -> int:
    """How many parameters the model has: exact."""
    model = find_model(model)
    return model.layers * model.block + model.root


def check_gated(model: Model) -> None:
    """Refuse the blocks of GPT where only those of Llama are known."""
    if not model.gated:
        raise ValueError(f"{model.name}: only blocks with a gate are planned here")


class Norm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):  # (batch, tokens, dim) to the same shape
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return y.to(x.dtype) * self.weight


def rotate(x, cos, sin):
    """Rotary embedding: turn pairs of elements by the position of their token.

    Args:
        x: (batch, tokens, heads, size).
        cos: (tokens, 1, size / 2) float32.
        sin: the same.
    """
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention in which several heads share keys and values."""

    def __init__(self, model: Model):
        super().__init__()
        self.size = model.dim // model.heads
        self.q = nn.Linear(model.dim, model.dim, bias=False)
        self.k = nn.Linear(model.dim, model.kv_dim, bias=False)
        self.v = nn.Linear(model.dim, model.kv_dim, bias=False)
        self.out = nn.Linear(model.dim, model.dim, bias=False)

    def forward(self, x, cos, sin):  # (batch, tokens, dim) to the same shape
        batch, tokens, _ = x.shape
        q, k, v = (
            matrix(x).view(batch, tokens, -1, self.size)
            for matrix in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # (batch, heads, tokens, size)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, -1))


class FeedForward(nn.Module):
    """SwiGLU: one product gates the other."""

    def __init__(self, model: Model):
        super().__init__()
        self.gate = nn.Linear(model.dim, model.hidden, bias=False)
        self.up = nn.Linear(model.dim, model.hidden, bias=False)
        self.down = nn.Linear(model.hidden, model.dim, bias=False)

    def forward(self, x):  # (batch, tokens, dim) to the same shape
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer. With checkpointing it keeps its input only, and computes twice."""

    def __init__(self, model: Model, checkpointing: bool):
        super().__init__()
        self.checkpointing = checkpointing
        self.norm1, self.norm2 = Norm(model.dim), Norm(model.dim)
        self.attention, self.feed_forward = Attention(model), FeedForward(model)

    def inside(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.feed_forward(self.norm2(x))

    def forward(self, x, cos, sin):  # (batch, tokens, dim) to the same shape
        if self.checkpointing:
            return checkpoint(self.inside, x, cos, sin, use_reentrant=False)
        return self.inside(x, cos, sin)


class Llama(nn.Module):
    """Token numbers (batch, tokens) to logits (batch, tokens, vocab)."""

    def __init__(self, model: Model, layers: int, checkpointing: bool):
        super().__init__()
        self.size = model.dim // model.heads
        self.embedding = nn.Embedding(model.vocab, model.dim)
        self.blocks = nn.ModuleList(Block(model, checkpointing) for _ in range(layers))
        self.norm = Norm(model.dim)
        self.out = nn.Linear(model.dim, model.vocab, bias=False)
        if model.tied:
            self.out.weight = self.embedding.weight

    def forward(self, tokens):
        position = torch.arange(tokens.shape[1], device=tokens.device)
        pair = torch.arange(0, self.size, 2, device=tokens.device) / self.size
        angle = position[:, None, None] * 10_000.0**-pair  # (tokens, 1, size / 2)
        cos, sin = angle.cos(), angle.sin()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.out(self.norm(x))


def build(
    model: "str | Model", layers: int | None = None, checkpointing: bool = False
) -> Llama:
    """The model as an `nn.Module`, on the default device.

    Under `torch.device("meta")` it needs no memory, however large it is.

    Args:
        model: a name in `MODELS`, or a `Model`.
        layers: blocks, if not all.
        checkpointing: whether blocks keep only their input for backward.

    Raises:
        ValueError: for an unknown name, and for blocks without a gate.
    """
    model = find_model(model)
    check_gated(model)
    return Llama(model, layers or model.layers, checkpointing)
