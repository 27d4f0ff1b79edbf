"""Train with DDP on every GPU of several machines, and time their links first.

    torchrun --nnodes=2 --nproc-per-node=gpu --rdzv-backend=c10d \
        --rdzv-endpoint=HOST:29500 --rdzv-id=my-job train_on_nodes.py --folder DIR

Start it on each machine (node), with the same words; HOST is the name of the first one.
All nodes have as many GPUs. DIR must be a folder that all nodes share; with the
checkpoint there, a job that is started again goes on. Your model, optimizer, data and
loss go in where it says so. With NCCL_DEBUG=INFO before it, NCCL says which network it
uses. Lesson 25 of the course explains each word of the command.
"""

import argparse
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

# -- put your model, optimizer, data and loss here -------------------------------------

BATCH = 512  # samples of all ranks together


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(),
        nn.Linear(512, 10),
    )  # fmt: skip


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch_of(step, rank, ranks):
    """This rank's samples. Of real data, read no others: see train_elastic.py."""
    x = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(step))
    x = x[rank::ranks]
    return {"x": x, "y": x[:, :10].argmax(1)}


def loss_of(model, batch):
    """The mean over this rank's samples, which go to its GPU."""
    return cross_entropy(model(batch["x"].cuda()), batch["y"].cuda())


# --------------------------------------------------------------------------------------


CALLS, REPEATS = 3, 3  # all-reduces in a row, and how often they are timed
SMALLEST, LARGEST = 2**24, 2**30  # bytes of a message
PATIENCE = 1.0  # seconds: no larger message after one that took so long


def seconds_of_all_reduce(x, group):
    """Seconds of one call on the slowest rank of the job, the median of the repeats."""
    repeats = []
    for _ in range(REPEATS):
        dist.barrier()  # all groups begin together, as GPUs of a node share its cards
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(CALLS):
            dist.all_reduce(x, group=group)
        end.record()
        torch.cuda.synchronize()
        milliseconds = torch.tensor(begin.elapsed_time(end) / CALLS, device="cuda")
        dist.all_reduce(milliseconds, dist.ReduceOp.MAX)
        repeats.append(milliseconds.item())
    return statistics.median(repeats) / 1e3


def bandwidth(group):
    """Bus bandwidth of the group in words.

    A message that is too small does not fill the link. So it is doubled until twice
    the bytes gain less than 5 %, or until it has taken too long.
    """
    ranks, nbytes, best = dist.get_world_size(group), SMALLEST, 0.0
    while True:
        x = torch.zeros(nbytes // 4, device="cuda")
        dist.all_reduce(x, group=group)  # the first one connects the ranks
        begin = time.perf_counter()
        seconds = seconds_of_all_reduce(x, group)
        waited = torch.tensor(time.perf_counter() - begin, device="cuda")
        dist.all_reduce(waited, dist.ReduceOp.MAX)  # so all ranks stop together
        speed = 2 * (ranks - 1) / ranks * nbytes / seconds / 1e9
        level = speed < 1.05 * best
        if level or nbytes == LARGEST or waited > PATIENCE:
            why = "" if level else ", not level: larger ones take too long"
            return f"{max(speed, best):.1f} GB/s, all-reduce of {nbytes >> 20} MiB{why}"
        best, nbytes = speed, 2 * nbytes


def say_who_and_how_fast(mesh):
    """One line for each rank, and one for each kind of link."""
    node, gpu = mesh.get_coordinate()
    name = torch.cuda.get_device_name()
    lines = [None] * dist.get_world_size()
    words = f"rank {dist.get_rank()}: node {node}, GPU {gpu} ({name})"
    dist.all_gather_object(lines, f"{words} of {socket.gethostname()}")
    links = {
        "inside a node": mesh["gpu"].get_group(),
        "between nodes": mesh["node"].get_group(),
        "all GPUs": dist.group.WORLD,
    }
    if 1 in mesh.shape:  # then it is one of the other two
        del links["all GPUs"]
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":  # once is enough
        links = {}
    for where, group in links.items():
        if dist.get_world_size(group) > 1:
            lines.append(f"{where}: {bandwidth(group)}")
    if dist.get_rank() == 0:
        print("\n".join(lines))


def save(file, state):
    """The whole file is there or the old one, whenever this is interrupted."""
    new = file.with_suffix(".new")
    with new.open("wb") as opened:
        torch.save(state, opened)
        opened.flush()
        os.fsync(opened.fileno())
    new.replace(file)


def go_on(file, model, optimizer):
    """The step to go on from: rank 0 looks for the file, and tells the others its step.

    Otherwise two nodes could see different files, and go on with different steps.
    """
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    if dist.get_rank() == 0 and file and file.exists():
        step += torch.load(file, map_location="cpu", weights_only=True)["step"]
    dist.broadcast(step, 0)
    if step:
        state = torch.load(file, map_location="cuda", weights_only=True)
        if state["step"] != step:
            raise RuntimeError(
                f"rank 0 read step {step} in {file}, rank {dist.get_rank()} "
                f"{state['step']}: do all nodes share this folder?"
            )
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    return int(step)


@record  # an exception goes to the agent, which prints it last
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="for the checkpoint, on all nodes")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # not RANK
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if BATCH % ranks:  # else the mean of their means is wrong
        raise ValueError(f"{ranks} ranks cannot share BATCH = {BATCH} samples equally")
    if args.folder and rank == 0:  # may it write there? Ask now, and not after hours
        args.folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.folder).close()
    gpus = int(os.environ["LOCAL_WORLD_SIZE"])
    shape = (ranks // gpus, gpus)
    say_who_and_how_fast(
        init_device_mesh("cuda", shape, mesh_dim_names=("node", "gpu"))
    )

    model = make_model().cuda()
    optimizer = make_optimizer(model)
    file = args.folder / "checkpoint.pt" if args.folder else None
    first = go_on(file, model, optimizer)
    model = DistributedDataParallel(model, device_ids=[device])

    for step in range(first, args.steps):
        loss = loss_of(model, batch_of(step, rank, ranks))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        now = rank == 0 and (step % 5 == 4 or step + 1 == args.steps)
        if now:
            print(f"step {step}: loss {loss.item():.4f}")
        if now and file:
            state = {"model": model.module.state_dict(), "step": step + 1}
            state["optimizer"] = optimizer.state_dict()
            save(file, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
