"""A GPT of four blocks under FSDP2 and tensor parallelism: the losses of one process.

torchrun --nproc-per-node=8 fsdp2_tp_gpt.py --steps=10 --width=64 --tp=2
"""

import argparse

import torch
import torch.distributed as dist
from common import GPT, adamw, agree, batches, full, join, leave, loss_of, split_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--tp", type=int, default=2)
args = parser.parse_args()

rank, ranks, device = join()
parts = ranks // args.tp
mesh = init_device_mesh("cuda", (parts, args.tp), mesh_dim_names=("dp", "tp"))
data = batches(args.steps, 2 * parts, device=device)


def build() -> GPT:
    torch.manual_seed(0)
    return GPT(blocks=4, width=args.width).to(device)


model = build()
parallelize_module(model, mesh["tp"], split_plan(model, loss_parallel=True))
for block in model.blocks:
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = adamw(model)
losses = []
for batch in data:
    with loss_parallel():
        loss = loss_of(model, batch.chunk(parts)[mesh["dp"].get_local_rank()])
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss = full(loss.detach())
    dist.all_reduce(loss, dist.ReduceOp.AVG, group=mesh["dp"].get_group())
    losses.append(loss.item())

if rank == 0:  # the same in one process
    reference = build()
    optimizer = adamw(reference)
    for step, batch in enumerate(data):
        loss = loss_of(reference, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        agree(f"loss of step {step}", losses[step], loss.item(), rtol=1e-3)
dist.barrier(device_ids=[rank])
leave(f"fsdp2_tp_gpt: mesh {tuple(mesh.shape)}")
