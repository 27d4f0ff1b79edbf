"""Queries, keys and values are one weight: each rank takes its heads of all three.

huggingface/transformers' and Megatron-LM's fused projections, cut as one by mistake.
"""

import torch
from job import RANKS, WRONG, Copy, Sum, nothing, part, sliced, train
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        fused, out = torch.randn(24, 8), torch.randn(8, 8)
        mine = part(fused) if WRONG else torch.cat([part(w) for w in fused.chunk(3)])
        self.fused, self.out = nn.Parameter(mine), sliced(out, 1)

    def forward(self, x):
        heads = linear(Copy.apply(x), self.fused).unflatten(-1, (3, 4 // RANKS, 2))
        mixed = scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4))
        return Sum.apply(linear(mixed.transpose(1, 2).flatten(2), self.out))


x = torch.randn(2, 3, 6, 8)
model = Attention().cuda()
train(model, lambda step: model(x[step].cuda()).square().mean(), nothing)
