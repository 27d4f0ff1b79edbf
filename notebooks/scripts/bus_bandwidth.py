"""Time all-reduces of several sizes, as nccl-tests does, and print their bandwidth.

    torchrun --standalone --nproc-per-node=4 bus_bandwidth.py

Every rank runs this file, with one GPU each. For each size: two calls to warm up, five
between two CUDA events, the slowest rank's time, and a check of the values. Taught in
lesson 15.
"""

import os

import torch
import torch.distributed as dist

# Your sizes, in bytes. On real GPUs go up to 2**30, where the bandwidth is level.
SIZES = (2**12, 2**16, 2**20, 2**24)
DTYPE = torch.float32  # yours, such as torch.bfloat16
CALLS = 5

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
rank, world_size = dist.get_rank(), dist.get_world_size()


def seconds_of_all_reduce(x):
    """Seconds of one call, on the slowest rank."""
    for _ in range(2):
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
    torch.cuda.synchronize()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(CALLS):
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
    end.record()
    torch.cuda.synchronize()
    milliseconds = torch.tensor(start.elapsed_time(end) / CALLS, device="cuda")
    dist.all_reduce(milliseconds, op=dist.ReduceOp.MAX)
    return milliseconds.item() / 1e3


if rank == 0:
    print(f"all-reduce of {DTYPE} on {world_size} x {torch.cuda.get_device_name()}")
    print("     bytes   time (µs)  algorithm (GB/s)  bus (GB/s)  values")
for size in SIZES:
    x = torch.full((size // DTYPE.itemsize,), rank, dtype=DTYPE, device="cuda")
    seconds = seconds_of_all_reduce(x)
    expected = (world_size - 1) / 2  # the average of 0, 1, ... world_size - 1
    rounding = torch.finfo(DTYPE).eps * world_size**2  # at most, of the averages
    wrong = ((x.double() - expected).abs() > rounding).sum()
    dist.all_reduce(wrong)
    algorithm = size / seconds / 1e9  # bytes of the tensor in a second
    bus = algorithm * 2 * (world_size - 1) / world_size  # as if in a ring
    if rank == 0:
        values = "right" if wrong.item() == 0 else f"{wrong.item()} wrong"
        figures = f"{seconds * 1e6:11.1f} {algorithm:17.2f} {bus:11.2f}"
        print(f"{size:10,} {figures}  {values}")
dist.destroy_process_group()
