"""Train with DDP, and survive: whole checkpoints, restarts, any number of ranks.

    torchrun --standalone --nproc-per-node=4 --max-restarts=3 train_elastic.py

A step has `--batch` samples, whatever the number of ranks, so the weights do not depend
on who computed it, but for rounding. Lesson 24 of the course explains each line.
"""

import argparse
import hashlib
import io
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

# -- Put your model and your data here -------------------------------------------------
SAMPLES = 1440


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 64, generator=generator)
    return x, (x @ torch.randn(64, 10, generator=generator)).argmax(1)


# --------------------------------------------------------------------------------------


def rows_of_step(step: int, batch: int, size: int) -> torch.Tensor:
    """The samples of a step, the same on every rank and after every restart."""
    epoch, place = divmod(step, size // batch)
    generator = torch.Generator().manual_seed(epoch)
    return torch.randperm(size, generator=generator).split(batch)[place]


def save(folder: Path, step: int, state: dict) -> None:
    """Write a checkpoint under another name, then rename it; keep the last two."""
    content, path = io.BytesIO(), folder / f"step-{step:06}.pt"
    torch.save(state, content)
    half = path.with_suffix(".half")
    with half.open("wb") as file:
        file.write(hashlib.sha256(content.getvalue()).digest() + content.getvalue())
        file.flush()
        os.fsync(file.fileno())  # on the disk before it has its name
    half.replace(path)
    for old in sorted(folder.glob("step-*.pt"))[:-2]:
        old.unlink()


def newest(folder: Path) -> tuple[dict | None, list[str]]:
    """The newest checkpoint that is whole, and the names of those that are not."""
    broken = []
    for path in sorted(folder.glob("step-*.pt"), reverse=True):
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() == content[:32]:
            return torch.load(io.BytesIO(content[32:]), map_location="cpu"), broken
        broken.append(path.name)
    return None, broken


class Log:
    """Lines of JSON, from all ranks in one file: who did what, and when."""

    def __init__(self, folder: Path):
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self.file = os.open(folder / "log.jsonl", how)
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.who = {"rank": rank, "ranks": ranks, "agent": os.getppid()}
        self.who |= {"pid": os.getpid()}

    def __call__(self, event: str, **more) -> None:
        line = {"time": time.time(), "event": event, **self.who, **more}
        os.write(self.file, json.dumps(line).encode() + b"\n")  # one write: not mixed


def train(args: argparse.Namespace) -> None:
    log = Log(args.folder)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, y = (part.cuda() for part in make_data())
    model = make_model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = [newest(args.folder)[0] if rank == 0 else None]
    dist.broadcast_object_list(found)  # all ranks start from what rank 0 found
    step = 0
    if found[0] is not None:
        step = found[0]["step"]
        model.load_state_dict(found[0]["model"])
        optimizer.load_state_dict(found[0]["optimizer"])
    log("loaded", step=step)
    parallel = DDP(model, device_ids=[torch.cuda.current_device()])
    while step < args.steps:
        mine = rows_of_step(step, args.batch, SAMPLES)[rank::ranks]
        losses = cross_entropy(parallel(x[mine]), y[mine], reduction="none")
        loss = losses.sum() / args.batch  # this rank's part of the mean
        (loss * ranks).backward()  # DDP divides by the number of ranks
        optimizer.step()
        optimizer.zero_grad()
        log("step", step=step, rows=mine.tolist())
        step += 1
        if step % args.every == 0 or step == args.steps:
            dist.all_reduce(loss)
            if rank == 0:
                state = {"model": model.state_dict(), "step": step}
                state["optimizer"] = optimizer.state_dict()
                save(args.folder, step, state)
                print(f"step {step}: loss {loss.item():.4f}", flush=True)


@record  # an exception goes to the agent, which prints it last
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default="checkpoints")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=120, help="samples of all ranks")
    parser.add_argument("--every", type=int, default=5, help="steps to a checkpoint")
    parser.add_argument("--timeout", type=float, default=60, help="seconds to wait")
    args = parser.parse_args(arguments)
    args.folder.mkdir(exist_ok=True)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=args.timeout))
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
