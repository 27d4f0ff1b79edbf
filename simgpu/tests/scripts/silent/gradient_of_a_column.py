"""A column that was cut: the gradients of its input are parts, to be added up.

NovaSky-AI/SkyRL#1886: `allreduce_dgrad` of Megatron-LM's column-parallel linear.
"""

import torch
from job import WRONG, Copy, Sum, nothing, sliced, train
from torch import nn
from torch.nn.functional import gelu, linear


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = sliced(torch.randn(16, 8)), sliced(torch.randn(8, 16), 1)

    def forward(self, x):
        hidden = gelu(linear(x if WRONG else Copy.apply(x), self.up))
        return Sum.apply(linear(hidden, self.down))


x = torch.randn(2, 12, 8)
model = nn.Sequential(nn.Linear(8, 8), Mlp()).cuda()
train(model, lambda step: model(x[step].cuda()).square().mean(), nothing)
