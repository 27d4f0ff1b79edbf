"""Train a model whose parameters, gradients and optimizer state are in shards.

    torchrun --standalone --nproc-per-node=4 sharded_training.py --save=checkpoint
    torchrun --standalone --nproc-per-node=2 sharded_training.py --load=checkpoint

The model starts on "meta", without memory. A checkpoint may be loaded by another number
of ranks. Put your own model, first values and data between the two lines of dashes.
Used in lesson 18.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

# -- your model, its first values and your data ----------------------------------------


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
        self.enter = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float()


def batch(step):
    """The full batch of a step, the same on every rank."""
    images = torch.randn(256, 64, generator=torch.Generator().manual_seed(step))
    return images, images[:, :10].argmax(1)


def first_values(model):
    """Draw each full parameter, one at a time, and keep this rank's shard.

    Buffers have no values yet, either: fill yours here, if your model has any.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = torch.zeros(parameter.shape, device="cuda")
            if parameter.ndim > 1:
                nn.init.normal_(full, std=0.02)
            elif name == "weight":  # of a norm
                nn.init.ones_(full)
            shard = distribute_tensor(full, parameter.device_mesh, parameter.placements)
            parameter.data.copy_(shard)


# --------------------------------------------------------------------------------------

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
parser.add_argument("--save", help="folder for the checkpoint after the last step")
parser.add_argument("--load", help="folder of the checkpoint to go on from")
args = parser.parse_args()

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()

with torch.device("meta"):
    model = Model()
dtype = torch.bfloat16 if args.bf16 else None
policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
for block in model.blocks:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
model.to_empty(device="cuda")
torch.manual_seed(0)
first_values(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank)  # from here on, such as for dropout, each rank has its own

first = 0
if args.load:
    weights, state = get_state_dict(model, optimizer)
    found = {"model": weights, "optimizer": state, "step": 0}
    dcp.load(found, checkpoint_id=args.load)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    first = found["step"]

for step in range(first, first + args.steps):
    x, y = (part.chunk(ranks)[rank].cuda() for part in batch(step))
    loss = nn.functional.cross_entropy(model(x), y)
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
