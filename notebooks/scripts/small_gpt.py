"""The small GPT of lessons 18 to 21 and 23, and the sequences that it learns.

A sequence counts in steps: 5, 8, 11, 14, … in steps of 3, for example, modulo 64. To
say the next number, the model has to look at the numbers before it.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

VOCABULARY = 64


class Block(nn.Module):
    """Attention, then two matmuls with a GELU between them; each adds to its input."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head_width = width // heads

    def attend(self, x: Tensor) -> Tensor:
        q = self.split(self.query(x))
        k = self.split(self.key(x))
        v = self.split(self.value(x))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) -> (batch, heads, tokens, width of a head)"""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Scores for the next number at each place.

    Args:
        depth: how many blocks.
        width: numbers for each token.
        heads: of attention; they divide the width.
        length: most tokens of a sequence.
    """

    def __init__(self, depth=4, width=128, heads=4, length=64):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, tokens) -> (batch, tokens, 64)"""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.place(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sequences(number: int, length: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (number, length) each: a target is the next number."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCABULARY, (number, 1), generator=generator)
    step = torch.randint(1, 9, (number, 1), generator=generator)
    tokens = (start + step * torch.arange(length + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]
