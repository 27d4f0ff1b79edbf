"""Two stages of a pipeline have a copy of the tied embedding: their gradients add up.

NVIDIA/Megatron-LM#7452 and huggingface/accelerate#1204 are of its kind.
"""

import torch
import torch.distributed as dist
from job import RANK, RANKS, WRONG
from torch import nn
from torch.nn.functional import cross_entropy, linear

FIRST, LAST = RANK == 0, RANK == RANKS - 1  # on one rank it is both


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        if not FIRST:
            del self.first
        if not LAST:
            del self.last

    def forward(self, ids=None, hidden=None):
        if FIRST:
            hidden = self.first(self.words(ids)).tanh()
        return linear(self.last(hidden), self.words.weight) if LAST else hidden


ids = torch.randint(20, (2, 4, 5))
model = Stage().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    hidden, its = torch.empty(4, 5, 8, device="cuda"), ids[step].cuda()
    if not FIRST:
        dist.recv(hidden, 0)
    out = model(its) if FIRST else model(hidden=hidden.requires_grad_())
    if LAST:
        cross_entropy(out.flatten(0, 1), its.flatten()).backward()
    else:
        dist.send(out.detach(), 1)
        gradient = torch.empty_like(out)
        dist.recv(gradient, 1)
        out.backward(gradient)
    if not FIRST:
        dist.send(hidden.grad, 0)
    if not WRONG:
        dist.all_reduce(model.words.weight.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
