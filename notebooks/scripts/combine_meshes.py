"""Train on a mesh: shards, copies of the shards, and sliced layers.

    torchrun --standalone --nproc-per-node=4 combine_meshes.py --tp 2

Without options, FSDP over all ranks. `--tp 2` cuts each layer over two neighbours, and
`--replicate 2` keeps two copies of all shards (HSDP). On several nodes, set `--tp` to
at most the GPUs of a node, and `--replicate` to the number of nodes. Put your model,
plan, loss and data between the two lines of dashes; its layers are in `blocks`.
Lessons 18, 19 and 23 of the course explain it; the plan is that of lesson 19's script.
"""

import argparse
import os
import warnings
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

# -- yours: model, plan, loss and data -------------------------------------------------

WORDS, LENGTH, WIDTH, HEADS, BLOCKS = 64, 32, 128, 4, 2  # --tp divides LENGTH and HEADS


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


def loss_of(model, batch):
    """The sum over the targets of this rank, and how many there are: -100 is none."""
    scores, targets = model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten()
    return cross_entropy(scores, targets, reduction="sum"), (targets != -100).sum()


def batch_of(step):
    """The global batch, the same in all ranks: give a DataLoader one seed in all."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(WORDS, (16, 1), generator=generator)
    stride = torch.randint(1, 9, (16, 1), generator=generator)
    tokens = (start + stride * torch.arange(LENGTH + 1)) % WORDS
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


# --------------------------------------------------------------------------------------


def slice_layers(model, mesh, plan):
    """Cut all layers; what is tied stays tied, and what is frozen frozen."""
    names = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    warnings.filterwarnings("error", "Parallelize plan key")  # a name without a layer
    parallelize_module(model, mesh, plan)
    whole = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    if whole:
        raise SystemExit(f"the plan has no style for {', '.join(whole)}")
    for p, (first, *others) in names.items():
        kept = model.get_parameter(first).requires_grad_(p.requires_grad)
        for name in others:
            if model.get_parameter(name).placements != kept.placements:
                raise SystemExit(f"{first} and {name} are tied: cut both in one way")
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, kept)


def share_of(batch, part, parts):
    """Some sequences: of a tensor, or of a dictionary, list or tuple of them."""
    if isinstance(batch, torch.Tensor):
        if len(batch) % parts:
            raise SystemExit(f"cannot divide {len(batch)} sequences by {parts}")
        return batch.chunk(parts)[part].cuda()
    if isinstance(batch, Mapping):  # a tokenizer's BatchEncoding is one, and no dict
        return {key: share_of(value, part, parts) for key, value in batch.items()}
    return [share_of(value, part, parts) for value in batch]


def tensors_of(batch):
    """The tensors in nested dictionaries, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    values = batch.values() if isinstance(batch, Mapping) else batch
    return [tensor for value in values for tensor in tensors_of(value)]


parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=1, help="ranks that share a layer")
parser.add_argument("--replicate", type=int, default=1, help="copies of all shards")
parser.add_argument("--clip", type=float, default=float("inf"), help="largest norm")
args = parser.parse_args()

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
rank, ranks = dist.get_rank(), dist.get_world_size()
shards, rest = divmod(ranks, args.tp * args.replicate)
if rest or not shards:
    parser.error(f"{args.replicate} x {args.tp} does not divide {ranks} ranks")
if HEADS % args.tp or LENGTH % args.tp:
    raise SystemExit(f"--tp {args.tp} must divide {HEADS} heads and {LENGTH} tokens")
sizes, names = (args.replicate, shards, args.tp), ("replicate", "shard", "tp")
mesh = init_device_mesh("cuda", sizes, mesh_dim_names=names)

torch.manual_seed(0)  # all ranks draw the same weights
model = GPT().cuda()
if args.tp > 1:  # slices first, then shards of the slices
    slice_layers(model, mesh["tp"], PLAN)
warnings.filterwarnings("ignore", "FSDP2-wrapped")  # the scores are a view: harmless
data = mesh["replicate", "shard"] if args.replicate > 1 else mesh["shard"]
for block in model.blocks:
    fully_shard(block, mesh=data)
fully_shard(model, mesh=data)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # your optimizer

# ranks that differ in "tp" only share a layer: they must have the same samples
part, parts = rank // args.tp, args.replicate * shards
torch.manual_seed(part)  # for dropout: other samples, other numbers
for step in range(8):
    batch = share_of(batch_of(step), part, parts)
    for tensor in tensors_of(batch) if args.tp > 1 and step == 0 else []:
        first = tensor.clone(memory_format=torch.contiguous_format)
        dist.broadcast(first, group=mesh["tp"].get_group(), group_src=0)
        if not torch.equal(first, tensor):
            raise SystemExit(f"rank {rank} shares a layer, but has other samples")
    total, count = loss_of(model, batch)
    dist.all_reduce(count)  # the targets of all ranks
    loss = total * ranks / count  # FSDP averages over the ranks
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    if rank == 0:
        words = f"loss {loss.item():.4f}, norm {norm.item():.4f}"
        print(f"mesh {sizes}, step {step}: {words}")

stored = sum(p.to_local().nbytes for p in model.parameters())
if rank == 0:
    print(f"rank 0 stores {stored:,} bytes of parameters")
dist.destroy_process_group()
