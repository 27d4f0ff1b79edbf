"""Time a training step: `python time_step.py`, or with torchrun on several GPUs.

The stopwatch warms up, lets the GPU mark the end of each step, and waits once, after
the last one. It prints the median and the spread of a step, and the throughput: the
samples of all ranks, divided by the time of the slowest one. Put your model, your
data, your count and your step between the two lines of dashes. Used in lesson 07.
"""

import os
import statistics
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

# The first steps load kernels, reserve memory and choose algorithms: print the times,
# and warm up until they stop falling. With torch.compile that can take more steps.
WARM_UP = 10
# Enough that a slow step shows. Count more if your loop saves or evaluates at times.
RUNS = 50


def to_gpu(batch):
    """The batch on the GPU: what has a `to`, in dictionaries, lists and tuples, too."""
    if isinstance(batch, Mapping):
        return {name: to_gpu(value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*[to_gpu(value) for value in batch])
    if isinstance(batch, (list, tuple)):
        return [to_gpu(value) for value in batch]
    if hasattr(batch, "to"):  # a tensor, or a class of your own
        return batch.to("cuda", non_blocking=True)
    return batch


def endless(loader):
    """The batches of a loader, again and again."""
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise SystemExit("the loader has no batch")


def stopwatch(step, batches):
    """The milliseconds of each step on this GPU, of all together, and the samples."""
    for _ in range(WARM_UP):
        step(to_gpu(next(batches)))
    if world_size > 1:
        dist.barrier(device_ids=[local_rank])  # all ranks begin together
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(RUNS + 1)]
    samples = 0
    marks[0].record()
    for mark in marks[1:]:
        batch = next(batches)
        samples += samples_in(batch)  # before it goes to the GPU: nothing waits
        step(to_gpu(batch))
        mark.record()
    torch.cuda.synchronize()  # once, so that the stopwatch makes no step wait
    times = []
    for begin, end in zip(marks[:-1], marks[1:], strict=True):
        times.append(begin.elapsed_time(end))
    return times, marks[0].elapsed_time(marks[-1]), samples


def over_ranks(number, operation):
    """The maximum or the sum of a number over all ranks."""
    if world_size == 1:
        return number
    number = torch.tensor(number, dtype=torch.float64, device="cuda")
    dist.all_reduce(number, op=operation)
    return number.item()


if not torch.cuda.is_available():
    raise SystemExit("this script times a GPU, and torch.cuda finds none")
world_size = int(os.environ.get("WORLD_SIZE", 1))  # of torchrun
rank = int(os.environ.get("RANK", 0))
local_rank = int(os.environ.get("LOCAL_RANK", 0))
torch.cuda.set_device(local_rank)
if world_size > 1:
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl", device_id=device)
torch.manual_seed(0)

# -- your model, your data, your step --------------------------------------------------
# your model
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
if world_size > 1:
    model = DDP(model, device_ids=[local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# your data: a list of batches, or a DataLoader with pin_memory=True and, if an epoch is
# shorter than the run, persistent_workers=True. These are on the GPU already: no copies
images = torch.randn(16384, 64, device="cuda")
loader = [{"images": images, "labels": images[:, :10].argmax(1)}]


# your count
unit = "samples"  # or "tokens"


def samples_in(batch):
    return len(batch["images"])
    # or tokens without padding: return int(batch["attention_mask"].sum())


def step(batch):
    loss = nn.functional.cross_entropy(model(batch["images"]), batch["labels"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# --------------------------------------------------------------------------------------


def main():
    times, total, samples = stopwatch(step, endless(loader))
    slowest = over_ranks(total, dist.ReduceOp.MAX)
    samples = over_ranks(samples, dist.ReduceOp.SUM)
    if rank == 0:
        name, version = torch.cuda.get_device_name(), torch.__version__.split("+")[0]
        print(f"{name}, torch {version}, ranks: {world_size}")
        print(f"{RUNS} steps after {WARM_UP} to warm up, of rank 0:")
        middle, least, most = statistics.median(times), min(times), max(times)
        print(f"median {middle:.3f} ms, min {least:.3f} ms, max {most:.3f} ms")
        print(f"all ranks: {1e3 * samples / slowest:,.0f} {unit} a second")
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
