"""Data parallel without DDP: gradients are averaged after backward, then clipped."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

BATCH = 16

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
inputs, targets = torch.randn(96, 16), torch.randn(96, 4)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).cuda()
for parameter in model.parameters():
    dist.broadcast(parameter.data, src=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for step in range(6):
    batch = torch.arange(BATCH) + step * BATCH
    mine = batch[rank::world_size]
    loss = mse_loss(model(inputs[mine].cuda()), targets[mine].cuda())
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    optimizer.step()

dist.destroy_process_group()
