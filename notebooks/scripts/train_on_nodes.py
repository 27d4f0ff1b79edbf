"""Train with DDP on every GPU of several machines, and time their links first.

    torchrun --nnodes=2 --nproc-per-node=gpu --rdzv-backend=c10d \
        --rdzv-endpoint=HOST:29500 --rdzv-id=my-job train_on_nodes.py --folder DIR

Start it on each machine (node), with the same words; HOST is the name of the first one.
All nodes have as many GPUs. DIR must be a folder that all nodes share; with the
checkpoint there, a job that is started again goes on. Your model and your data go in
where it says so. Lesson 25 of the course explains each word of the command.
"""

import argparse
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

# -- put your model here ---------------------------------------------------------------

BATCH = 512  # samples of all ranks together


def make_model():
    return nn.Sequential(
        nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(),
        nn.Linear(512, 10),
    )  # fmt: skip


def global_batch(step):
    """The samples of a step; a sample's class is where its first ten are largest."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 64, generator=generator)
    return x, x[:, :10].argmax(1)


# --------------------------------------------------------------------------------------


def bandwidth(group, nbytes=2**24):
    """GB/s that each GPU sends in an all-reduce, as a ring of the group sends it."""
    x = torch.ones(nbytes // 4, device="cuda")
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    dist.all_reduce(x, group=group)  # the first one connects the ranks
    begin.record()
    dist.all_reduce(x, group=group)
    end.record()
    torch.cuda.synchronize()
    size = dist.get_world_size(group)
    return 2 * (size - 1) / size * nbytes / begin.elapsed_time(end) / 1e6


def say_who_and_how_fast(mesh):
    """One line for each rank, and one for each kind of link."""
    node, gpu = mesh.get_coordinate()
    name = torch.cuda.get_device_name()
    lines = [None] * dist.get_world_size()
    words = f"rank {dist.get_rank()}: node {node}, GPU {gpu} ({name})"
    dist.all_gather_object(lines, f"{words} of {socket.gethostname()}")
    for axis, where in (("gpu", "inside a node"), ("node", "between nodes")):
        if mesh[axis].size() > 1:
            speed = bandwidth(mesh[axis].get_group())
            lines.append(f"{where}: {speed:.1f} GB/s for each GPU")
    if dist.get_rank() == 0:
        print("\n".join(lines))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="for the checkpoint, on all nodes")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # not RANK
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gpus = int(os.environ["LOCAL_WORLD_SIZE"])
    shape = (ranks // gpus, gpus)
    say_who_and_how_fast(
        init_device_mesh("cuda", shape, mesh_dim_names=("node", "gpu"))
    )

    torch.manual_seed(0)
    model = make_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    file = args.folder / "checkpoint.pt" if args.folder else None
    if file and file.exists():
        state = torch.load(file, map_location="cuda", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    model = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])

    for step in range(first, args.steps):
        x, y = (part.chunk(ranks)[rank].cuda() for part in global_batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        if rank == 0 and step % 5 == 4:
            print(f"step {step}: loss {loss.item():.4f}")
        if rank == 0 and file and step % 5 == 4:
            state = {"model": model.module.state_dict(), "step": step + 1}
            state["optimizer"] = optimizer.state_dict()
            torch.save(state, file.with_suffix(".new"))  # a crash spares the old one
            file.with_suffix(".new").replace(file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
