"""Ulysses: ranks change parts of the sequence for heads, and must change them back.

microsoft/DeepSpeed's `DistributedAttention`; parts that come back in the wrong places.
"""

import torch
import torch.distributed as dist
from job import RANKS, WRONG, pair, part, train
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


def swapped(x):
    """Part i of the first dimension goes to rank i; it is its own gradient."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous())
    return out


Swap = pair("Swap", swapped, swapped)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x):  # sequence, batch, features
        heads = self.project(x).unflatten(-1, (3, RANKS, -1, 2))
        heads = Swap.apply(heads.permute(3, 0, 2, 1, 4, 5)).flatten(0, 1)
        its = heads.permute(1, 2, 3, 0, 4)  # 3, batch, heads of a rank, all places, 2
        mixed = scaled_dot_product_attention(*its, is_causal=True)
        mixed = Swap.apply(mixed.permute(2, 0, 1, 3).unflatten(0, (RANKS, -1)))
        mixed = mixed.permute(1, 2, 3, 0, 4) if WRONG else mixed.permute(1, 2, 0, 3, 4)
        return x + mixed.reshape(x.shape)


ids = torch.randint(20, (2, 17, 3))
model = nn.Sequential(nn.Embedding(20, 8), Attention(), nn.Linear(8, 20)).cuda()


def loss(step):
    out = model(part(ids[step, :-1]).cuda())
    return cross_entropy(out.flatten(0, 1), part(ids[step, 1:]).flatten().cuda())


train(model, loss)
