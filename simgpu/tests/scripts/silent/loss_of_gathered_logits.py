"""A loss for parts of the vocabulary is given all of it on each rank: log(n) too much.

NVIDIA/Megatron-LM#7452: `parallel_output=False`.
"""

import torch
from job import RANK, RANKS, WRONG, Copy, Gather, Sum, nothing, sliced, train
from torch import nn
from torch.nn.functional import linear


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.head = sliced(torch.randn(20, 8))

    def forward(self, ids):
        logits = linear(Copy.apply(self.words(ids)), self.head)
        return Gather.apply(logits.T).T if WRONG else logits


def loss_of_parts(logits, targets):
    """Each rank has the logits of its part of the vocabulary."""
    first = RANK * 20 // RANKS
    size = Sum.apply(logits.exp().sum(-1))
    mine = (targets >= first) & (targets < first + 20 // RANKS)
    picked = logits.gather(1, (targets - first).clamp(0, 20 // RANKS - 1)[:, None])
    return (size.log() - Sum.apply(picked[:, 0] * mine)).mean()


ids = torch.randint(20, (2, 12))
model = Model().cuda()
train(
    model,
    lambda step: loss_of_parts(model(ids[step].cuda()), ids[step].cuda()),
    nothing,
)
