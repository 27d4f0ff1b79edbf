"""Tensor parallel: what every rank has whole must be dropped alike on every rank.

NVIDIA/Megatron-LM has a random state for each kind (`get_cuda_rng_tracker`).
"""

import torch
from job import RANK, WRONG, Copy, Sum, nothing, sliced, train
from torch import nn
from torch.nn.functional import gelu, linear


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = sliced(torch.randn(16, 8)), sliced(torch.randn(8, 16), 1)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        hidden = gelu(linear(Copy.apply(x), self.up))
        return x + self.dropout(Sum.apply(linear(hidden, self.down)))


x = torch.randn(2, 32, 8)
model = nn.Sequential(nn.Linear(8, 8), Mlp()).cuda()
torch.manual_seed(1 + RANK * WRONG)
train(model, lambda step: model(x[step].cuda()).square().mean(), nothing)
