"""Context parallel by hand: each rank has a part of every sequence, and all keys."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

BATCH, LENGTH, WORDS, WIDTH = 4, 16, 20, 32


class Attention(nn.Module):
    def __init__(self, rank, world_size):
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        part = LENGTH // world_size
        mine = torch.arange(part) + rank * part  # positions of my queries
        self.register_buffer("mask", mine[:, None] >= torch.arange(LENGTH))

    def forward(self, x):
        query, key, value = self.project(x).chunk(3, dim=-1)
        keys = torch.cat(all_gather(key.contiguous()), dim=1)
        values = torch.cat(all_gather(value.contiguous()), dim=1)
        mixed = scaled_dot_product_attention(query, keys, values, attn_mask=self.mask)
        return x + self.out(mixed)


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
tokens = torch.randint(0, WORDS, (24, LENGTH + 1))
model = nn.Sequential(
    nn.Embedding(WORDS, WIDTH), Attention(rank, world_size), nn.Linear(WIDTH, WORDS)
).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

for step in range(6):
    batch = torch.arange(BATCH) + step * BATCH
    inputs, targets = tokens[batch, :-1], tokens[batch, 1:]
    inputs = inputs.chunk(world_size, dim=1)[rank].cuda()
    targets = targets.chunk(world_size, dim=1)[rank].cuda()
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    optimizer.step()

dist.destroy_process_group()
