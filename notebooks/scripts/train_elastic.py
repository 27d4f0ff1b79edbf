"""Train with DDP, and survive: whole checkpoints, restarts, any number of ranks.

    torchrun --standalone --nproc-per-node=4 --max-restarts=3 train_elastic.py

A step has `--batch` samples, whatever the number of ranks, so the weights do not depend
on who computed it, but for rounding. SIGTERM saves and ends the job; the same command
goes on. (After SIGTERM to one node, the others go on, by one of their restarts.) On
several nodes, `--folder` is on a file system that all of them share.
Lesson 24 of the course explains each line.
"""

import argparse
import functools
import os
import signal
import zipfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

# -- Put your model, optimizer, loss and data here -------------------------------------


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def make_optimizers(model):
    """All that makes a `step()` after `backward`, in this order: schedulers, too."""
    return {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}


def losses_of(model, batch):
    """A vector: the loss of each sample. A batch is what the DataLoader gives."""
    x, y = (part.cuda(non_blocking=True) for part in batch)
    return cross_entropy(model(x), y, reduction="none")


def make_data():
    """Any dataset that has a length, and gives the sample of a number."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1440, 64, generator=generator)
    return TensorDataset(x, (x @ torch.randn(64, 10, generator=generator)).argmax(1))


# -- the place in the data -------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def order_of_epoch(epoch, size):
    return torch.randperm(size, generator=torch.Generator().manual_seed(epoch))


def rows_of_step(step, batch, size):
    """The same on every rank and at every start; an epoch's rest is left out."""
    epoch, place = divmod(step, size // batch)
    return order_of_epoch(epoch, size)[place * batch : (place + 1) * batch]


class Samples:
    """For each step from `first` on, the numbers of this rank's samples."""

    def __init__(self, first, last, batch, size, rank=0, ranks=1):
        self.first, self.last, self.batch, self.size = first, last, batch, size
        self.rank, self.ranks = rank, ranks

    def __len__(self):
        return self.last - self.first

    def __iter__(self):
        for step in range(self.first, self.last):
            rows = rows_of_step(step, self.batch, self.size)
            yield rows[self.rank :: self.ranks].tolist()


# -- checkpoints -----------------------------------------------------------------------


def save(folder, step, state):
    """Write a checkpoint under another name, then rename it; keep the last two."""
    half, path = folder / "next.half", folder / f"step-{step:06}.pt"
    with half.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk before it has its name
    half.replace(path)
    before = sorted(other for other in folder.glob("step-*.pt") if other < path)
    for old in before[:-1]:
        old.unlink()


def is_whole(path):
    """Whether each part of the file has the checksum that `torch.save` wrote for it."""
    try:
        with zipfile.ZipFile(path) as parts:
            return parts.testzip() is None
    except OSError:  # of the disk
        raise
    except Exception:  # bad bits may raise anything
        return False


def newest(folder):
    """The step of the newest checkpoint that is whole; 0 if there is none.

    Raises:
        OSError: if the disk gave no whole one, but errors: better wait than begin anew.
    """
    failed = None
    for path in sorted(folder.glob("step-*.pt"), reverse=True):
        try:
            if is_whole(path):
                return int(path.stem.removeprefix("step-"))
        except OSError as error:
            failed = error
        print(f"{path.name} is damaged", flush=True)
    if failed:
        raise failed
    return 0


def load(folder, parts, data):
    """The step to go on with. Rank 0 finds it: nodes could see different files."""
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    if dist.get_rank() == 0:
        step += newest(folder)
    dist.broadcast(step, 0)
    if step > 0:
        path = folder / f"step-{int(step):06}.pt"
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["data"] != data:
            words = f"{path} is of {state['data']}, this start of {data}"
            raise ValueError(f"{words}; take the same, or a new --folder")
        for name, part in parts.items():
            part.load_state_dict(state[name])
    return int(step)


# -- SIGTERM ---------------------------------------------------------------------------

asked = False  # whether this process got SIGTERM


def ask(number, frame):
    global asked
    asked = True


def any_rank_was_asked():
    """One answer for all ranks, so that all of them stop after the same step."""
    found = torch.tensor(float(asked), device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item() > 0


def ignore_sigterm(worker):
    """torchrun signals the DataLoader's workers, too; a rank fails if one ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


# --------------------------------------------------------------------------------------


def train(args):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data, model = make_data(), make_model().cuda()
    optimizers = make_optimizers(model)
    parts = {"model": model, **optimizers}
    about = {"batch": args.batch, "size": len(data)}
    if args.batch > len(data):
        raise ValueError(f"--batch={args.batch} is more than the {len(data)} samples")
    done = first = load(args.folder, parts, about)
    samples = Samples(first, args.steps, args.batch, len(data), rank, ranks)
    loader = DataLoader(data, batch_sampler=samples, num_workers=args.workers,
                        pin_memory=True, worker_init_fn=ignore_sigterm)  # fmt: skip
    parallel = DDP(model, device_ids=[torch.cuda.current_device()])
    for step, batch in enumerate(loader, start=first):
        losses = losses_of(parallel, batch)
        if losses.dim() != 1:  # a mean would be divided once more, without an error
            raise ValueError(f"losses_of gave {[*losses.shape]}, not a loss a sample")
        loss = losses.sum() / args.batch  # this rank's part
        (loss * ranks).backward()  # DDP divides by the number of ranks
        for optimizer in optimizers.values():
            optimizer.step()
        parallel.zero_grad()
        done = step + 1
        stop = done % args.look == 0 and any_rank_was_asked()
        if stop or done % args.every == 0 or done == args.steps:
            loss = loss.detach()
            dist.all_reduce(loss)
            if rank == 0:
                state = {name: part.state_dict() for name, part in parts.items()}
                save(args.folder, done, {**state, "step": done, "data": about})
                print(f"step {done}: loss {loss.item():.4f}", flush=True)
        if stop:
            break
    return done


@record  # an exception goes to the agent, which prints it last
def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default="checkpoints")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=120, help="samples of all ranks")
    parser.add_argument("--every", type=int, default=5, help="steps to a checkpoint")
    parser.add_argument("--look", type=int, default=1,
                        help="steps between two looks for SIGTERM; each makes the "
                        "host wait for the GPU")  # fmt: skip
    parser.add_argument("--workers", type=int, default=0, help="of the DataLoader")
    parser.add_argument("--timeout", type=float, default=600,
                        help="seconds that a rank waits for another; more than the "
                        "slowest save or load takes")  # fmt: skip
    args = parser.parse_args(arguments)
    args.folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, ask)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    limit = timedelta(seconds=args.timeout)
    dist.init_process_group("nccl", timeout=limit, device_id=device)
    done = train(args)
    dist.destroy_process_group()
    if done < args.steps:  # with status 0, torchrun would take the job for done
        raise SystemExit(f"SIGTERM: stopped after {done} of {args.steps} steps")


if __name__ == "__main__":
    main()
