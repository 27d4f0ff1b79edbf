"""Train on a mesh: shards, copies of the shards, and sliced layers.

    torchrun --standalone --nproc-per-node=4 combine_meshes.py --tp 2

Without options, FSDP over all ranks. `--tp 2` cuts each layer over two neighbours, and
`--replicate 2` keeps two copies of all shards (HSDP). On several nodes, set `--tp` to
at most the GPUs of a node, and `--replicate` to the number of nodes.
Lessons 18, 19 and 23 of the course explain it; the plan is that of lesson 19's script.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

# -- your model, its plan and its data -------------------------------------------------

WORDS, LENGTH, WIDTH, HEADS, BLOCKS = 64, 32, 128, 4, 2
SEQUENCES = 16  # of all ranks together


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def heads(self, x):
        return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)  # this rank's

    def forward(self, x):
        q, k, v = (self.heads(f(x)) for f in (self.query, self.key, self.value))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm2, self.feed = nn.LayerNorm(WIDTH), nn.Sequential(up, nn.GELU(), down)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.token(tokens)
        x = x + self.place(torch.arange(LENGTH, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
PLAN = {
    "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "place": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    "blocks.*.norm?": SequenceParallel(),
    "blocks.*.attention": gather,
    "blocks.*.attention.[qkv]*": ColwiseParallel(),
    "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "blocks.*.feed": gather,
    "blocks.*.feed.0": ColwiseParallel(),
    "blocks.*.feed.2": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def batch(step):
    """The global batch of a step: sequences that count in steps of 1 to 8."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(WORDS, (SEQUENCES, 1), generator=generator)
    stride = torch.randint(1, 9, (SEQUENCES, 1), generator=generator)
    tokens = (start + stride * torch.arange(LENGTH + 1)) % WORDS
    return tokens[:, :-1], tokens[:, 1:]


# --------------------------------------------------------------------------------------

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=1, help="ranks that share a layer")
parser.add_argument("--replicate", type=int, default=1, help="copies of all shards")
args = parser.parse_args()

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
shards, rest = divmod(ranks, args.tp * args.replicate)
if rest or not shards:
    parser.error(f"{args.replicate} x {args.tp} does not divide {ranks} ranks")
if HEADS % args.tp or SEQUENCES % (ranks // args.tp):
    words = f"{HEADS} heads by {args.tp}, or {SEQUENCES} sequences by the others"
    parser.error(f"cannot divide {words}")
sizes, names = (args.replicate, shards, args.tp), ("replicate", "shard", "tp")
mesh = init_device_mesh("cuda", sizes, mesh_dim_names=names)

torch.manual_seed(0)  # all ranks draw the same weights
model = GPT().cuda()
if args.tp > 1:  # slices first, then shards of the slices
    parallelize_module(model, mesh["tp"], PLAN)
data = mesh["replicate", "shard"] if args.replicate > 1 else mesh["shard"]
for block in model.blocks:
    fully_shard(block, mesh=data)
fully_shard(model, mesh=data)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

# ranks that differ in "tp" only share a layer: they must have the same samples
part, parts = rank // args.tp, args.replicate * shards
for step in range(8):
    tokens, targets = (t.chunk(parts)[part].cuda() for t in batch(step))
    loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    if rank == 0:
        print(f"mesh {sizes}, step {step}: loss {loss.item():.4f}")

stored = sum(p.to_local().nbytes for p in model.parameters())
if rank == 0:
    print(f"rank 0 stores {stored:,} bytes of parameters")
dist.destroy_process_group()
