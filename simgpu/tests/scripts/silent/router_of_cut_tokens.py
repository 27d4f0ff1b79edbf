"""Experts on ranks: the router sees this rank's tokens, so its gradient is a part.

A bug of Megatron-LM in the paper on TTrace (arXiv 2506.09280).
"""

import torch
import torch.distributed as dist
from job import RANKS, WRONG, Gather, Scatter, part, sliced, train
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = sliced(torch.randn(4, 8, 8))

    def forward(self, x):
        shares = Gather.apply(self.router(x).softmax(-1))  # tokens, experts
        mine = Scatter2.apply(shares) if RANKS > 1 else shares
        outs = torch.einsum("td,edf->tef", Gather.apply(x), self.experts)
        return Scatter.apply((outs * mine[..., None]).sum(1))


class Scatter2(torch.autograd.Function):
    """Takes this rank's experts; the gradients of all others are zero here."""

    @staticmethod
    def forward(context, shares):
        context.shape = shares.shape
        return part(shares, 1)

    @staticmethod
    def backward(context, gradient):
        whole = gradient.new_zeros(context.shape)
        part_of = whole.chunk(RANKS, 1)[dist.get_rank()]
        part_of.copy_(gradient)
        return whole


def finish(model):
    if not WRONG:
        dist.all_reduce(model.router.weight.grad)


x = torch.randn(2, 16, 8)
model = Experts().cuda()
train(model, lambda step: model(part(x[step]).cuda()).square().sum() / 128, finish)
