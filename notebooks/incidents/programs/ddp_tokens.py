"""A language model under DDP: the loss is the mean over all tokens of all ranks."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, LENGTH, WORDS = 8, 12, 20

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
tokens = torch.randint(0, WORDS, (48, LENGTH + 1))
lengths = torch.randint(3, LENGTH + 1, (48,))  # of each sequence; the rest is padding
model = nn.Sequential(nn.Embedding(WORDS, 32), nn.GELU(), nn.Linear(32, WORDS)).cuda()
parallel = DDP(model, device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

for step in range(6):
    batch = torch.arange(BATCH) + step * BATCH
    mine = batch[rank::world_size]
    inputs = tokens[mine, :-1].cuda()
    targets = tokens[mine, 1:].cuda()
    positions = torch.arange(LENGTH, device="cuda")
    targets[positions >= lengths[mine, None].cuda()] = -100
    outputs = parallel(inputs).flatten(0, 1)
    total = cross_entropy(outputs, targets.flatten(), reduction="sum")
    count = (targets != -100).sum()
    dist.all_reduce(count)
    loss = total / count * world_size  # DDP divides by the world size
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
