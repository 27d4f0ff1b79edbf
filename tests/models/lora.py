"""A frozen Llama with LoRA layers: behind the seam of the trainers.

`llama.py` is the course's model file, under another name.
"""

import llama
from llama import FIRST, LAST, counted, decayed  # noqa: F401
from torch import nn

RANK = 4


class LoRA(nn.Module):
    """A linear layer that stays, and a product of two thin ones that learns."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


def make(size, context):
    model = llama.make(size, context).requires_grad_(False)
    for block in model.blocks:
        block.attention.query = LoRA(block.attention.query)
        block.attention.value = LoRA(block.attention.value)
    return model


def first_value(name, p):
    if name.endswith(("query.up.weight", "value.up.weight")):
        nn.init.zeros_(p)
    else:
        llama.first_value(name, p)
