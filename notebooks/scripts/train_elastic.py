"""Train with DDP, and survive: whole checkpoints, restarts, any number of ranks.

    torchrun --standalone --nproc-per-node=4 --max-restarts=3 train_elastic.py

A step takes `--batch` samples, whatever the number of ranks. So the weights do not
depend on who computed a step, but for rounding. A checkpoint gets its name when it is
whole. FOLDER/log.jsonl says who did what. Lesson 24 of the course explains each line.
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
    steps = size // batch  # of an epoch
    generator = torch.Generator().manual_seed(step // steps)
    order = torch.randperm(size, generator=generator)
    first = step % steps * batch
    return order[first : first + batch]


def save(folder: Path, step: int, state: dict) -> None:
    """Write a checkpoint under another name, then rename it; keep the last two."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    path = folder / f"step-{step:06}.pt"
    half = path.with_suffix(".half")
    with half.open("wb") as file:
        file.write(hashlib.sha256(content).digest() + content)
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


def log(folder: Path, event: str, **more) -> None:
    """Append one line to the job's log; a single write is never mixed with others."""
    who = {"rank": dist.get_rank(), "ranks": dist.get_world_size()}
    who |= {"pid": os.getpid(), "agent": os.getppid()}
    line = json.dumps({"time": time.time(), "event": event, **who, **more}) + "\n"
    file = os.open(folder / "log.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, line.encode())
    os.close(file)


def train(args: argparse.Namespace) -> None:
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
    log(args.folder, "loaded", step=step)
    parallel = DDP(model, device_ids=[torch.cuda.current_device()])
    while step < args.steps:
        mine = rows_of_step(step, args.batch, SAMPLES)[rank::ranks]
        losses = cross_entropy(parallel(x[mine]), y[mine], reduction="none")
        loss = losses.sum() / args.batch  # this rank's part of the mean
        (loss * ranks).backward()  # DDP divides by the number of ranks
        optimizer.step()
        optimizer.zero_grad()
        log(args.folder, "step", step=step, rows=mine.tolist())
        step += 1
        if step % args.every == 0 or step == args.steps:
            dist.all_reduce(loss)
            if rank == 0:
                state = {"model": model.state_dict(), "step": step}
                save(args.folder, step, {**state, "optimizer": optimizer.state_dict()})
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
