"""FSDP2 with tied weights, clipped by the norm of all gradients; loads a checkpoint."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

BATCH, LENGTH, WORDS, WIDTH = 8, 12, 20, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
tokens = torch.randint(0, WORDS, (48, LENGTH + 1))
model = Model().cuda()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
# on one rank a full tensor is the parameter itself: a copy on the CPU is none
save_whole = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
load_whole = state_dict.StateDictOptions(
    full_state_dict=True, broadcast_from_rank0=True
)

for step in range(6):
    batch = torch.arange(BATCH) + step * BATCH
    mine = batch[rank::world_size]
    inputs, targets = tokens[mine, :-1].cuda(), tokens[mine, 1:].cuda()
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if step == 2:
        saved = state_dict.get_model_state_dict(model, options=save_whole)
    if step == 3:  # the loss was bad: go back
        state_dict.set_model_state_dict(model, saved, options=load_whole)

dist.destroy_process_group()
