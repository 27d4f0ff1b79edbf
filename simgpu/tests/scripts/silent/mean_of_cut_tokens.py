"""Context parallel with a mask: the loss is the mean over the tokens of all ranks.

NVIDIA/Megatron-LM#7452 finding 9, NVIDIA/Megatron-LM#673.
"""

import torch
from job import RANKS, WRONG, part, total, train
from torch import nn
from torch.nn.functional import cross_entropy

x, targets = torch.randn(2, 2, 16, 8), torch.randint(5, (2, 2, 16))
mask = torch.zeros(2, 16)
mask[0, 3:], mask[1, 12:] = 1, 1
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5)).cuda()


def loss(step):
    out = model(part(x[step], 1).cuda()).flatten(0, 1)
    its = part(targets[step], 1).flatten().cuda()
    valid = part(mask, 1).flatten().cuda()
    count = valid.sum() if WRONG else total(valid.sum()) / RANKS
    return (cross_entropy(out, its, reduction="none") * valid).sum() / count


train(model, loss)
