"""Sequence parallel: the norm sees a part of the sequence, so its gradient is one.

NVIDIA/Megatron-LM#7452 finding 11, EleutherAI/gpt-neox#1257.
"""

import torch
import torch.distributed as dist
from job import WRONG, Gather, Scatter, part, sliced, train
from torch import nn
from torch.nn.functional import gelu, linear


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = sliced(torch.randn(16, 8)), sliced(torch.randn(8, 16), 1)

    def forward(self, x):
        hidden = gelu(linear(Gather.apply(self.norm(x)), self.up))
        return x + Scatter.apply(linear(hidden, self.down))


def finish(model):
    for parameter in model.norm.parameters():
        if not WRONG:
            dist.all_reduce(parameter.grad)


x, y = torch.randn(2, 12, 3, 8), torch.randn(2, 12, 3, 8)
model = Block().cuda()
train(
    model,
    lambda step: (model(part(x[step]).cuda()) - part(y[step]).cuda())
    .square().sum() / y[step].numel(),
    finish,
)  # fmt: skip
