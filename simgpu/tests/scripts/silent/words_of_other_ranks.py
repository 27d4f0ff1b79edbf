"""A cut embedding: what other ranks have must be zero here before the sum.

The first bug of the paper on TTrace (arXiv 2506.09280), of Megatron-LM.
"""

import torch
from job import RANK, RANKS, WRONG, Sum, nothing, sliced, train
from torch import nn
from torch.nn.functional import cross_entropy, embedding


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = sliced(torch.randn(20, 8))

    def forward(self, ids):
        ids, size = ids - RANK * 20 // RANKS, 20 // RANKS
        outside = (ids < 0) | (ids > size) if WRONG else (ids < 0) | (ids >= size)
        out = embedding(ids.clamp(0, size - 1), self.weight)
        return Sum.apply(out.masked_fill(outside[..., None], 0))


ids = torch.arange(40).reshape(2, 20) % 20
model = nn.Sequential(Words(), nn.Linear(8, 20)).cuda()
train(
    model,
    lambda step: cross_entropy(model(ids[step].cuda()), ids[step].cuda()),
    nothing,
)
