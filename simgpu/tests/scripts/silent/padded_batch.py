"""The last batch is filled up until it can be cut: what was added must not count.

pytorch/pytorch#25162: `DistributedSampler` repeats samples.
"""

import torch
from job import RANKS, WRONG, part, train
from torch import nn

x = torch.randn(2, 7, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)).cuda()


def loss(step):
    more = -7 % RANKS
    its, counts = torch.cat([x[step], x[step, :more]]), torch.ones(7 + more)
    counts[7:] = float(WRONG)
    losses = model(part(its).cuda()).square().mean(1)
    return (losses * part(counts).cuda()).sum() * RANKS / counts.sum().item()


train(model, loss)
