"""Train a model with DDP on all GPUs of a machine, several small batches for a step.

    torchrun --standalone --nproc-per-node=4 train_ddp.py --accumulate 4 --compress

A step takes `--batch` samples of all ranks together, in `--accumulate` parts, of which
only the last one sends its gradients. `--compress` sends them in bfloat16. Put your
model and your data between the two lines of dashes. Used in lesson 16.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=512, help="samples of all ranks")
parser.add_argument("--accumulate", type=int, default=1, help="parts of a step")
parser.add_argument("--compress", action="store_true", help="send bfloat16")
options = parser.parse_args()

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
rank, world_size = dist.get_rank(), dist.get_world_size()
if options.batch % (world_size * options.accumulate):
    parser.error(f"{options.batch} samples do not divide into equal parts")
torch.manual_seed(0)

# -- yours: a model, and a function that returns the samples of a step ----------------
model = nn.Sequential(
    nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
).cuda()


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(options.batch, 64, generator=generator)
    return images, images[:, :10].argmax(1)


# --------------------------------------------------------------------------------------

sent = {"messages": 0, "bytes": 0}


def average(group, bucket):
    """DDP's own all-reduce, or one in bfloat16; each message is counted."""
    send = default_hooks.allreduce_hook
    if options.compress:
        send = default_hooks.bf16_compress_hook
    sent["messages"] += 1
    sent["bytes"] += bucket.buffer().nbytes // (2 if options.compress else 1)
    return send(group, bucket)


model = DDP(model, device_ids=[local_rank], gradient_as_bucket_view=True)
model.register_comm_hook(None, average)
torch.manual_seed(rank)  # from here on, such as for dropout, each rank has its own
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

for step in range(12):
    images, labels = batch_of(step)
    images, labels = images[rank::world_size], labels[rank::world_size]
    images, labels = (t.chunk(options.accumulate) for t in (images, labels))
    optimizer.zero_grad()
    sent.update(messages=0, bytes=0)
    total = torch.zeros((), device="cuda")
    for number, (x, y) in enumerate(zip(images, labels, strict=True), 1):
        last = number == len(images)  # a small batch may have fewer parts
        with contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            (loss / len(images)).backward()
        total += loss.detach() / len(images)
    optimizer.step()
    if step % 4 == 3:
        dist.all_reduce(total, op=dist.ReduceOp.AVG)  # every rank calls it
        if rank == 0:
            print(f"step {step}: loss {total.item():.4f}", flush=True)

peaks = [None] * world_size
dist.all_gather_object(peaks, torch.cuda.max_memory_allocated())
if rank == 0:
    print(f"{world_size} ranks, each sends in a step: {sent['messages']} messages,")
    print(f"{sent['bytes']:,} bytes of gradients")
    for number, peak in enumerate(peaks):
        print(f"rank {number}: peak memory {peak / 2**20:.1f} MiB", flush=True)
dist.destroy_process_group()
