"""DDP with accumulated gradients: micro-batches of 4 samples, 16 in a step."""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, MICRO_BATCH = 16, 4

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
inputs = torch.randn(96, 16)
labels = torch.randint(0, 10, (96,))
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)).cuda()
parallel = DDP(model, device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)

for step in range(6):
    batch = torch.arange(BATCH) + step * BATCH
    parts = batch[rank::world_size].split(MICRO_BATCH)
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        with contextlib.nullcontext() if last else parallel.no_sync():
            outputs = parallel(inputs[part].cuda())
            loss = cross_entropy(outputs, labels[part].cuda())
            (loss / len(parts)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()

dist.destroy_process_group()
