"""Train a model whose parameters, gradients and optimizer state are in shards.

    torchrun --standalone --nproc-per-node=4 sharded_training.py --save=checkpoint
    torchrun --standalone --nproc-per-node=2 sharded_training.py --load=checkpoint

The model starts on "meta", without memory. A checkpoint may be loaded by another number
of ranks. Put your own model, first values, data and loss between the two lines of
dashes; two lines below are marked "your". Used in lesson 18.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

# -- your model, its first values, your data and loss ----------------------------------


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=256, depth=6):
        super().__init__()
        self.enter, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))

    def forward(self, x):
        return self.head(self.blocks(self.enter(x)))


def first_values(module):
    """Fill one module's own parameters and buffers, in full; those inside it follow.

    What your `__init__` draws or calculates is lost on "meta": do it again, here or in
    a method `reset_parameters()` of the module, which PyTorch's own layers have.
    """
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)


def batch(step, rank, ranks):
    """This rank's samples of a step; a DataLoader needs a DistributedSampler."""
    images = torch.randn(256, 64, generator=torch.Generator().manual_seed(step))
    images = images.chunk(ranks)[rank].cuda()
    return {"images": images, "labels": images[:, :10].argmax(1)}


def loss_of(model, samples):
    scores = model(samples["images"]).float()
    return nn.functional.cross_entropy(scores, samples["labels"])


# --------------------------------------------------------------------------------------


@torch.no_grad()
def fill(model):
    """Fill each module in full, one at a time, and keep this rank's shards."""
    done = set()  # a parameter may have several names
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        for key, p in own.items():
            full = torch.full(p.shape, torch.nan, device="cuda")
            setattr(module, key, nn.Parameter(full))
        for buffer in module.buffers(recurse=False):
            buffer.fill_(torch.nan if buffer.is_floating_point() else 0)
        # whole numbers have no NaN: 0 that nobody has written is no value
        empty = {b: b._version for b in module.buffers(recurse=False) if b.numel()}
        first_values(module)
        buffers = module.named_buffers(recurse=False)
        for key, full in [*module.named_parameters(recurse=False), *buffers]:
            untouched = empty.get(full) == full._version and not full.any()
            if full.isnan().any() or untouched:
                label = f"{name}.{key}".lstrip(".")  # the root has no name
                raise SystemExit(f"rank {rank}: fill {label} in first_values()\n")
        for key, p in own.items():
            full = getattr(module, key).detach()
            if p not in done:
                p.copy_(distribute_tensor(full, p.device_mesh, p.placements))
            setattr(module, key, p)
        done.update(own.values())


def read(model, path):
    """Load a file of full weights; rank 0 reads it, and sends each rank its shards."""
    full = torch.load(path, map_location="cpu", mmap=True) if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)


@torch.no_grad()
def mark(model):
    """Write NaN into everything, so that `check` finds what nobody has filled."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
    return {b: b._version for b in model.buffers() if b.numel()}


def check(model, empty):
    """Refuse to train with a parameter or buffer that has no value."""
    for name, p in model.named_parameters():
        if p.to_local().isnan().any():
            raise SystemExit(f"rank {rank}: parameter {name} has no value\n")
    for name, b in model.named_buffers():
        # whole numbers have no NaN: 0 that nobody has written is no value
        if b.isnan().any() or (empty.get(b) == b._version and not b.any()):
            raise SystemExit(f"rank {rank}: buffer {name} has no value\n")


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
parser.add_argument("--weights", help="file of full weights to start from")
parser.add_argument("--save", help="folder for the checkpoint after the last step")
parser.add_argument("--load", help="folder of the checkpoint to go on from")
args = parser.parse_args()

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
rank, ranks = dist.get_rank(), dist.get_world_size()

with torch.device("meta"):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Model())
dtype = torch.bfloat16 if args.bf16 else None
policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
for block in model.blocks:  # your groups: modules or lists, each gathered as one
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
model.to_empty(device="cuda")
empty = mark(model)
torch.manual_seed(0)
fill(model)  # also with --weights: buffers that no file has
if args.weights:
    read(model, args.weights)
check(model, empty)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # your optimizer
torch.manual_seed(rank)  # from here on, such as for dropout, each rank has its own

first = 0
if args.load:
    weights, state = get_state_dict(model, optimizer)
    found = {"model": weights, "optimizer": state, "step": 0}
    dcp.load(found, checkpoint_id=args.load)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    first = found["step"]

for step in range(first, first + args.steps):
    samples = batch(step, rank, ranks)
    # autocast: buffers are in float32, and a matmul refuses two dtypes
    with torch.autocast("cuda", torch.bfloat16, enabled=args.bf16):
        loss = loss_of(model, samples)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    if rank == 0:
        print(f"{ranks} ranks, step {step}: loss {loss.item():.4f}")

if args.save:
    weights, state = get_state_dict(model, optimizer)
    everything = {"model": weights, "optimizer": state, "step": first + args.steps}
    dcp.save(everything, checkpoint_id=args.save)

peaks = torch.zeros(ranks, device="cuda")
peaks[rank] = torch.cuda.max_memory_allocated() / 2**20
dist.all_reduce(peaks)
if rank == 0:
    each = ", ".join(f"{peak:.1f}" for peak in peaks.tolist())
    print(f"peak memory in MiB of each rank: {each}")
dist.destroy_process_group()
