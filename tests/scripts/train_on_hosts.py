"""Train on the CPU over gloo and note each step: what `test_two_hosts.py` launches.

    torchrun --nnodes=2 … train_on_hosts.py FOLDER STEPS [STEP ...]

Every rank appends a line of JSON to FOLDER/log.jsonl for each thing that it does. Rank
0 writes a checkpoint every five steps, and a job that is started anew goes on from it.
Before each STEP that is named, ranks wait until there is a file FOLDER/go-STEP.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, EVERY = 120, 5  # samples of all ranks together; steps to a checkpoint
NAME = "checkpoint.pt"


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 64, generator=generator)
    return x, x[:, :10].argmax(1)


def loss_of(model: nn.Module, step: int, rank: int, ranks: int) -> torch.Tensor:
    """A rank's part of the mean over the global batch."""
    x, y = (part[rank::ranks] for part in batch(step))
    return cross_entropy(model(x), y, reduction="sum") / BATCH


def main() -> None:
    folder, last, *holds = Path(sys.argv[1]), *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    log = os.open(folder / "log.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(event: str, step: int) -> None:
        line = {"event": event, "step": step, "rank": rank, "ranks": ranks}
        os.write(log, json.dumps({**line, "time": time.time()}).encode() + b"\n")

    model = make_model()
    optimizer = make_optimizer(model)
    box = [None]
    if rank == 0 and (folder / NAME).exists():
        box = [torch.load(folder / NAME, weights_only=True)]
    dist.broadcast_object_list(box)
    step = 0
    if box[0] is not None:
        step = box[0]["step"]
        model.load_state_dict(box[0]["model"])
        optimizer.load_state_dict(box[0]["optimizer"])
    note("loaded", step)
    parallel = DDP(model)
    while step < last:
        while step in holds and not (folder / f"go-{step}").exists():
            time.sleep(0.01)
        optimizer.zero_grad()
        (loss_of(parallel, step, rank, ranks) * ranks).backward()
        optimizer.step()
        note("step", step)
        step += 1
        if rank == 0 and step % EVERY == 0:
            both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**both, "step": step}, folder / "half")
            (folder / "half").replace(folder / NAME)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # a thread of gloo may hold a tensor while Python shuts down, which aborts it
    sys.stdout.flush()
    os._exit(0)
