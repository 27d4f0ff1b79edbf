"""Train a model whose layers are sliced: a rank keeps a part of every matrix.

    torchrun --standalone --nproc-per-node=4 slice_layers.py

Tensor and sequence parallelism with `parallelize_module`. Your model and its plan go
in where it says so; the number of ranks must divide the heads and the tokens.
Lesson 19 of the course explains each line.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 64, 64, 128, 4, 2


# -- your model ------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        layers = self.query, self.key, self.value
        q, k, v = (  # -1: as many heads as this rank has
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in layers
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.feed = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.token(tokens)
        x = x + self.place(torch.arange(LENGTH, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# -- its plan: Shard(1) is a part of the tokens, Replicate() is everything -------------
# The names are those of your layers. `place` has no batch: its tokens are dimension 0.

gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
PLAN = {
    "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "place": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    "blocks.*.norm1": SequenceParallel(),
    "blocks.*.attention": gather,
    "blocks.*.attention.query": ColwiseParallel(),
    "blocks.*.attention.key": ColwiseParallel(),
    "blocks.*.attention.value": ColwiseParallel(),
    "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "blocks.*.norm2": SequenceParallel(),
    "blocks.*.feed": gather,
    "blocks.*.feed.0": ColwiseParallel(),
    "blocks.*.feed.2": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def batch(step):
    """Sequences that count in steps of 1 to 8: the same ones on every rank."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (8, 1), generator=generator)
    stride = torch.randint(1, 9, (8, 1), generator=generator)
    tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1].cuda(), tokens[:, 1:].cuda()


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda", (ranks,))

    torch.manual_seed(0)  # all ranks draw the same weights, and keep their slices
    model = parallelize_module(GPT().cuda(), mesh, PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(9):
        tokens, targets = batch(step)
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 4 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    kept = sum(p.to_local().nbytes for p in model.parameters())  # all are DTensors
    rows = [None] * ranks
    dist.all_gather_object(rows, (kept, torch.cuda.max_memory_allocated()))
    for number, (kept, peak) in enumerate(rows if rank == 0 else []):
        print(f"rank {number} of {ranks}: weights {kept:,}, peak {peak:,} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
