"""DDP with a DataLoader: three epochs of two steps; left-over samples are cut."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 16

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
inputs, labels = torch.randn(43, 16), torch.randint(0, 10, (43,))
data = TensorDataset(inputs[:32], labels[:32])
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=BATCH // world_size, sampler=sampler)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 10)).cuda()
parallel = DDP(model, device_ids=[local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = cross_entropy(parallel(x.cuda()), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

dist.destroy_process_group()
