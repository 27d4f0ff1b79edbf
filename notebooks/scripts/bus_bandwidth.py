"""Time all-reduces of several sizes, as nccl-tests does, and print their bandwidth.

    torchrun --standalone --nproc-per-node=4 bus_bandwidth.py

Every rank runs this file, with one GPU each. For each size: calls to warm up, and then
calls back to back between two CUDA events, on the slowest rank, several times over. The
time of a call is the median of these. The values are checked. The last line says what
all gradients of your model take. Taught in lesson 15.
"""

import os
import statistics
import sys

import torch
import torch.distributed as dist
from torch import nn

# Your sizes, in bytes. The last one is that of the messages in which your gradients
# travel: DDP sends buckets of 25 MiB. On real GPUs put 2**28 and 2**30 before it, where
# the bandwidth is level: smaller messages do not fill the links.
SIZES = (2**12, 2**16, 2**20, 2**24, 25 * 2**20)
DTYPE = torch.float32  # yours: in which gradients are sent, such as torch.bfloat16
WARM_UP, CALLS, REPEATS = 5, 10, 3  # the median of the repeats counts

with torch.device("meta"):  # shapes only, without memory: load no weights here
    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096))  # yours

if not DTYPE.is_floating_point:
    sys.exit(f"gradients have fractions, and {DTYPE} has none: change DTYPE")
if min(SIZES) < DTYPE.itemsize:
    sys.exit(f"{min(SIZES)} bytes are less than one number of {DTYPE}")
if "LOCAL_RANK" not in os.environ:
    sys.exit("start it with torchrun, as its first lines say")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
rank, world_size = dist.get_rank(), dist.get_world_size()
if world_size == 1:
    sys.exit("one rank has nobody to send to: start two or more")


def seconds_of_all_reduce(x):
    """Seconds of one call, on the slowest rank."""
    for _ in range(WARM_UP):
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
    repeats = []
    for _ in range(REPEATS):
        dist.barrier()
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(CALLS):
            dist.all_reduce(x, op=dist.ReduceOp.AVG)
        end.record()
        torch.cuda.synchronize()
        milliseconds = torch.tensor(start.elapsed_time(end) / CALLS, device="cuda")
        dist.all_reduce(milliseconds, op=dist.ReduceOp.MAX)
        repeats.append(milliseconds.item())
    return statistics.median(repeats) / 1e3


if rank == 0:
    print(f"all-reduce of {DTYPE} on {world_size} x {torch.cuda.get_device_name()}")
    print("        bytes   time (µs)  algorithm (GB/s)  bus (GB/s)  values")
place = torch.arange(2**20, device="cuda") % 7  # another number at each place
times = {}  # by the bytes of a message, seconds
for size in SIZES:
    x = torch.empty(size // DTYPE.itemsize, dtype=DTYPE, device="cuda")
    for part in x.split(len(place)):  # in parts, to save memory
        part.copy_(place[: len(part)] + rank)
    seconds = times[size] = seconds_of_all_reduce(x)
    largest = 6 + world_size
    rounding = torch.finfo(DTYPE).eps * largest * world_size  # at most, of the averages
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for part in x.split(len(place)):
        expected = place[: len(part)] + (world_size - 1) / 2  # of place + 0, + 1, ...
        wrong += ((part.double() - expected).abs() > rounding).sum()
    dist.all_reduce(wrong)
    algorithm = size / seconds / 1e9  # bytes of the tensor in a second
    bus = algorithm * 2 * (world_size - 1) / world_size  # as if in a ring
    if rank == 0:
        values = "right" if wrong.item() == 0 else f"{wrong.item()} wrong"
        figures = f"{seconds * 1e6:11.1f} {algorithm:17.2f} {bus:11.2f}"
        print(f"{size:13,} {figures}  {values}")
gradients = sum(p.numel() for p in model.parameters() if p.requires_grad)
nbytes = gradients * DTYPE.itemsize
# gradients that are smaller than a bucket are one message, of the next size above
size = min((size for size in SIZES if size >= nbytes), default=SIZES[-1])
milliseconds = 1e3 * times[size] * max(1, nbytes / size)
if rank == 0:
    how = f"as messages of {min(size, nbytes):,} bytes"
    print(f"gradients: {nbytes:,} bytes, {milliseconds:.2f} ms {how}")
dist.destroy_process_group()
