"""FSDP2 over tensor parallelism on a mesh of two or three dimensions.

torchrun --nproc-per-node=4 two_d.py
torchrun --nproc-per-node=8 two_d.py --replicas=2
"""

import argparse
import copy

import common
import torch
import torch.distributed as dist
from common import GPT, adamw, agree, agree_on, batches, full, loss_of, split_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=2)
parser.add_argument("--replicas", type=int, default=1, help="of the shards: HSDP")
args = parser.parse_args()

rank, ranks, device = common.join()

torch.manual_seed(0)
reference = GPT().to(device)
model = copy.deepcopy(reference)
shards = ranks // args.tp // args.replicas
if args.replicas > 1:
    shape, names = (args.replicas, shards, args.tp), ("replicate", "shard", "tp")
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
    data_mesh = mesh["replicate", "shard"]
    part = mesh["replicate"].get_local_rank() * shards + mesh["shard"].get_local_rank()
else:
    mesh = init_device_mesh("cuda", (shards, args.tp), mesh_dim_names=("dp", "tp"))
    data_mesh = mesh["dp"]
    part = data_mesh.get_local_rank()
parts = shards * args.replicas
assert mesh["tp"].size() == args.tp and mesh["tp"].get_group().size() == args.tp

parallelize_module(model, mesh["tp"], split_plan(model, loss_parallel=True))
for block in model.blocks:
    fully_shard(block, mesh=data_mesh)
fully_shard(model, mesh=data_mesh)
weight = model.blocks[0].feed.down.weight
assert weight.device_mesh.ndim == mesh.ndim, weight.device_mesh
assert weight.placements[-1] == Shard(1) and weight.placements[-2] == Shard(0)
assert args.replicas == 1 or weight.placements[0] == Replicate()
assert weight.to_local().numel() == weight.numel() // shards // args.tp

optimizer, expected = adamw(model), adamw(reference)
for step, batch in enumerate(batches(3, 2 * parts, device=device)):
    with loss_parallel():
        loss = loss_of(model, batch.chunk(parts)[part])
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    whole = loss_of(reference, batch)
    whole.backward()
    whole_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    expected.step()

    loss = full(loss.detach())
    dist.all_reduce(loss, dist.ReduceOp.AVG)  # equal within "tp"
    agree(f"loss of step {step}", loss, whole)
    agree(f"norm of step {step}", full(norm), whole_norm)
    agree_on(f"step {step}", model, reference)
    optimizer.zero_grad()
    expected.zero_grad()

common.leave(f"two_d: mesh {tuple(mesh.shape)}, loss {whole.item():.4f}")
