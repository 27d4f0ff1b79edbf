"""Modules that `torch.compile` is given, each with what it takes; in bfloat16.

`CASES` maps a name to a function of nothing; it makes a module and its arguments on the
default device.
"""

import torch
from torch import nn
from torch.nn import functional as F

HALF = torch.bfloat16
BATCH, TOKENS, WIDTH, HEADS, VOCABULARY = 2, 2048, 1024, 16, 32000


def turned(x, cos, sin):
    """Rotary positions, as most programs write them: (batch, tokens, heads, width)."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Attention(nn.Module):
    def __init__(self, bias: bool):
        super().__init__()
        self.q, self.k, self.v, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=bias, dtype=HALF) for _ in range(4)
        )

    def forward(self, x, positions=None):
        q, k, v = (
            layer(x).view(*x.shape[:2], HEADS, -1) for layer in (self.q, self.k, self.v)
        )
        if positions is not None:
            q, k = turned(q, *positions), turned(k, *positions)
        q, k, v = (its.transpose(1, 2) for its in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(x.shape))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention(bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, dtype=HALF) for _ in range(2))
        self.gate, self.up = (
            nn.Linear(WIDTH, 4 * WIDTH, bias=False, dtype=HALF) for _ in range(2)
        )
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False, dtype=HALF)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norms[0](x), (cos, sin))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention(bias=True)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, dtype=HALF) for _ in range(2))
        self.mlp = Mlp()

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, dtype=HALF)
        self.down = nn.Linear(4 * WIDTH, WIDTH, dtype=HALF)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Loss(nn.Module):
    def forward(self, logits, target):
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def _x(*shape, of=HALF, wants_grad=True):
    return torch.empty(*shape, dtype=of, requires_grad=wants_grad)


def _llama():
    turns = [_x(TOKENS, 1, WIDTH // HEADS, wants_grad=False) for _ in range(2)]
    return Llama(), (_x(BATCH, TOKENS, WIDTH), *turns)


CASES = {
    "llama": _llama,
    "gpt": lambda: (Gpt(), (_x(BATCH, TOKENS, WIDTH),)),
    "mlp": lambda: (Mlp(), (_x(BATCH, TOKENS, WIDTH),)),
    "loss": lambda: (
        Loss(),
        (
            _x(BATCH, TOKENS, VOCABULARY),
            torch.empty(BATCH, TOKENS, dtype=torch.int64),
        ),
    ),
}
