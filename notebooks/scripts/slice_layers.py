"""Train a model whose layers are sliced: a rank keeps a part of every matrix.

    torchrun --standalone --nproc-per-node=4 slice_layers.py
    torchrun --standalone --nproc-per-node=1 slice_layers.py --plain

Tensor and sequence parallelism with `parallelize_module`. Your model, its plan, data
and loss go between the two lines of dashes; the ranks must divide heads and tokens.
`--plain` is the same model on one GPU, without a plan: compare with its losses. Lesson
19 of the course explains each line.
"""

import os
import re
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

# -- your model and its plan, your data and loss ---------------------------------------

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 64, 64, 128, 4, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = (-1, WIDTH // HEADS)  # -1: as many heads as this rank has
        layers = self.query, self.key, self.value
        q, k, v = (layer(x).unflatten(-1, heads).transpose(1, 2) for layer in layers)
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


class Model(nn.Module):
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


# The plan: Shard(1) is a part of the tokens, Replicate() is everything. The names
# are those of your layers. `place` has no batch: its tokens are dimension 0.

# If attention also gets a mask, or cos and sin, `gather` needs a layout for each
# argument: (Shard(1), None, None) and (Replicate(), None, None). An x that is passed
# by name needs input_kwarg_layouts={"x": Shard(1)}, and desired_input_kwarg_layouts.
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
    """The same samples on every rank; from a DataLoader, give all ranks its seed."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (8, 1), generator=generator)
    stride = torch.randint(1, 9, (8, 1), generator=generator)
    tokens = ((start + stride * torch.arange(LENGTH + 1)) % VOCABULARY).cuda()
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def loss_of(model, samples):
    scores = model(samples["tokens"])
    return cross_entropy(scores.flatten(0, 1), samples["targets"].flatten())


# --------------------------------------------------------------------------------------


def sliced(model, mesh, plan):
    """The model in slices; what is tied stays tied, and what is frozen frozen."""
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
    return model


def check_batch(samples, step, rank, ranks):
    """Refuse what would be wrong silently, or hang: other samples, uneven parts."""
    samples = {n: t for n, t in samples.items() if isinstance(t, torch.Tensor)}
    for name, tensor in samples.items():
        if tensor.ndim in (2, 3) and tensor.shape[1] % ranks:  # not of images
            length = f"{name} has {tensor.shape[1]} tokens"
            raise SystemExit(f"{length}: pad to a multiple of {ranks}")
    if step == 0:
        first = [{name: tensor.cpu() for name, tensor in samples.items()}]
        dist.broadcast_object_list(first)  # those of rank 0
        for name, tensor in samples.items():
            if not torch.equal(first[0][name], tensor.cpu()):
                raise SystemExit(f"rank {rank} has other {name} than rank 0")


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # all ranks draw the same weights, and keep their slices
    model = Model().cuda()
    if "--plain" not in sys.argv:
        model = sliced(model, init_device_mesh("cuda", (ranks,)), PLAN)
    elif ranks > 1:
        raise SystemExit("--plain is for one rank: --nproc-per-node=1")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # your optimizer
    torch.manual_seed(rank)  # for dropout: each rank has other tokens, or other heads
    for step in range(9):
        samples = batch(step)
        check_batch(samples, step, rank, ranks)
        try:
            loss = loss_of(model, samples)
        except RuntimeError as error:
            if not re.search("for input of size|Provided sizes", str(error)):
                raise
            cure = f"a rank has 1/{ranks} of the heads, so write -1 for their number"
            raise SystemExit(f"{error}: {cure}; no more ranks than heads") from None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 4 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    kept = sum(p.nbytes for p in local)
    rows = [None] * ranks
    dist.all_gather_object(rows, (kept, torch.cuda.max_memory_allocated()))
    for number, (kept, peak) in enumerate(rows if rank == 0 else []):
        print(f"rank {number} of {ranks}: weights {kept:,}, peak {peak:,} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
