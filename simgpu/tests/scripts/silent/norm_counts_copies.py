"""The norm of all gradients counts a weight once for each rank that has a copy.

NVIDIA/Megatron-LM#7452 finding 8.
"""

import torch
from job import RANK, WRONG, Copy, Sum, sliced, total, train
from torch import nn
from torch.nn.functional import gelu, linear


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.up, self.down = sliced(torch.randn(16, 8)), sliced(torch.randn(8, 16), 1)

    def forward(self, x):
        hidden = gelu(linear(Copy.apply(self.first(x)), self.up))
        return Sum.apply(linear(hidden, self.down))


def finish(model):
    copies = list(model.first.parameters())
    mine = [model.up, model.down, *(copies if WRONG or RANK == 0 else [])]
    norm = total(sum(p.grad.square().sum() for p in mine)).sqrt()
    for parameter in model.parameters():
        parameter.grad *= 0.1 / norm


x = torch.randn(2, 12, 8)
model = Mlp().cuda()
train(model, lambda step: model(x[step].cuda()).square().mean(), finish)
