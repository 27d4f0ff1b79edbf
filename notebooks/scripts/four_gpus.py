"""Train a small classifier on all GPUs of a machine, one process for each.

    torchrun --standalone --nproc-per-node=4 four_gpus.py

`batch_size` is divided by the number of ranks, so 1, 2 or 4 ranks take the same steps.
Used in lesson 03.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")

torch.manual_seed(0)
images = torch.randn(2048, 64)
labels = images[:, :10].argmax(1)
data = TensorDataset(images, labels)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=128 // dist.get_world_size(), sampler=sampler)

model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
model = DDP(model, device_ids=[local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = x.cuda(), y.cuda()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {dist.get_rank()}, epoch {epoch}: loss {loss.item():.4f}")

if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
