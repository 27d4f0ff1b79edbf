"""A generator and its judge, each with an optimizer: both need averaged gradients.

Lightning-AI/pytorch-lightning and its kin: manual optimization under DDP.
"""

import torch
import torch.distributed as dist
from job import WRONG, average, part
from torch import nn
from torch.nn.functional import softplus

real, noise = torch.randn(3, 16, 4), torch.randn(3, 16, 2)
judge = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)).cuda()
maker = nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 4)).cuda()
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (judge, maker)]
for x, z in zip(real, noise, strict=True):
    made = maker(part(z).cuda())
    for optimizer, net in zip(optimizers, (judge, maker), strict=True):
        if net is judge:
            value = softplus(-judge(part(x).cuda())) + softplus(judge(made.detach()))
        else:
            value = softplus(-judge(made))
        net.zero_grad()
        value.mean().backward()
        if net is judge or not WRONG:
            average(net)
        optimizer.step()
dist.destroy_process_group()
