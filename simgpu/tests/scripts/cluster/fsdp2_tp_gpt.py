"""A GPT of four blocks under FSDP2 and tensor parallelism: losses and seconds.

torchrun --nproc-per-node=8 fsdp2_tp_gpt.py --steps=10 --width=64 --tp=2
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from common import GPT, adamw, agree, batches, full, loss_of, split_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--tp", type=int, default=2)
args = parser.parse_args()

rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
parts = dist.get_world_size() // args.tp
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
losses, seconds = [], []
for step, batch in enumerate(data):
    begin = time.perf_counter()
    with loss_parallel():
        loss = loss_of(model, batch.chunk(parts)[mesh["dp"].get_local_rank()])
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss = full(loss.detach())
    dist.all_reduce(loss, dist.ReduceOp.AVG, group=mesh["dp"].get_group())
    losses.append(loss.item())
    seconds.append(time.perf_counter() - begin)
    if rank == 0:
        print(f"step {step}: loss {losses[-1]:.4f}, {seconds[-1]:.3f} s", flush=True)

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
dist.destroy_process_group()
if rank == 0:
    rest = sorted(seconds[1:])
    print(
        f"ok fsdp2_tp_gpt: mesh {tuple(mesh.shape)}, first step {seconds[0]:.2f} s,"
        f" median of the others {rest[len(rest) // 2]:.3f} s"
    )
