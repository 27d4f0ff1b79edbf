"""ZeRO by hand: each rank updates a part of all weights, and then sends it to the rest.

The wrong one sends early, to overlap: microsoft/DeepSpeed's `overlap_comm`, and stale
parameters after an overlapped all-gather in the paper on TTrace (arXiv 2506.09280).
"""

import torch
import torch.distributed as dist
from job import RANK, RANKS, WRONG, average, part
from torch import nn

x, y = torch.randn(2, 8, 8), torch.randn(2, 8, 8)
model = nn.Sequential(nn.Linear(8, 15), nn.GELU(), nn.Linear(15, 8)).cuda()
flat = nn.utils.parameters_to_vector(model.parameters()).detach()
flat = torch.cat([flat, flat.new_zeros(-len(flat) % RANKS)])
at = 0
for parameter in model.parameters():
    parameter.data = flat[at : at + parameter.numel()].view_as(parameter)
    at += parameter.numel()
shard = nn.Parameter(flat.chunk(RANKS)[RANK])  # shares its memory
optimizer = torch.optim.SGD([shard], lr=0.1)
for step in range(2):
    (model(part(x[step]).cuda()) - part(y[step]).cuda()).square().mean().backward()
    average(model)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    gradient = torch.cat([gradient, gradient.new_zeros(len(flat) - len(gradient))])
    shard.grad = gradient.chunk(RANKS)[RANK]
    if WRONG:
        dist.all_gather_into_tensor(flat, shard.detach().clone())
    optimizer.step()
    if not WRONG:
        dist.all_gather_into_tensor(flat, shard.detach().clone())
    model.zero_grad()
dist.destroy_process_group()
