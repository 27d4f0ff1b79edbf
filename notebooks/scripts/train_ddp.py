"""Train a model with DDP on all GPUs of a machine, several small batches for a step.

    torchrun --standalone --nproc-per-node=4 train_ddp.py --accumulate 4 --compress

A step takes `--batch` samples of all ranks together, in `--accumulate` parts, of which
only the last one sends its gradients. `--compress` sends them in bfloat16. Put your
model, data, loss and optimizer between the two lines of dashes. At the end, the script
says how long a step waits for messages. Used in lesson 16.
"""

import argparse
import contextlib
import os
from statistics import fmean

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=512, help="samples of all ranks")
parser.add_argument("--accumulate", type=int, default=1, help="parts of a step")
parser.add_argument("--compress", action="store_true", help="send bfloat16")
parser.add_argument("--steps", type=int, default=12, help="of training")
options = parser.parse_args()

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
rank, world_size = dist.get_rank(), dist.get_world_size()
if options.batch % (world_size * options.accumulate):
    parser.error(f"{options.batch} samples do not divide into equal parts")
torch.manual_seed(0)

# -- yours: a model, the samples of this rank, a loss, an optimizer -------------------
model = nn.Sequential(
    nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)


def batch_of(step, part):
    """This rank's samples of a part: a DataLoader needs a DistributedSampler."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(options.batch, 64, generator=generator)[rank::world_size]
    images = images.chunk(options.accumulate)[part].cuda()
    return {"images": images, "labels": images[:, :10].argmax(1)}


def loss_of(model, part):
    """The sum over the samples or tokens, not the mean."""
    scores = model(part["images"])
    return nn.functional.cross_entropy(scores, part["labels"], reduction="sum")


def count_of(part):
    """How many samples or tokens that sum has: -100 marks padding."""
    return (part["labels"] != -100).sum()


# --------------------------------------------------------------------------------------

sent = {"messages": 0, "bytes": 0}


def average(group, bucket):
    """DDP's own all-reduce, or one in bfloat16; each message is counted."""
    send, flat = default_hooks.allreduce_hook, bucket.buffer()
    if options.compress:
        send = default_hooks.bf16_compress_hook
    sent["messages"] += 1
    sent["bytes"] += flat.numel() * (2 if options.compress else flat.element_size())
    return send(group, bucket)


model = DDP(model, device_ids=[device], gradient_as_bucket_view=True)
model.register_comm_hook(None, average)
torch.manual_seed(rank)  # from here on, such as for dropout, each rank has its own
clock = []

for step in range(options.steps + 4):
    train = step < options.steps  # four more send nothing, to see what messages cost
    parts = [batch_of(step, part) for part in range(options.accumulate)]
    count = sum(map(count_of, parts), torch.zeros((), device="cuda"))
    dist.all_reduce(count)  # ranks and parts may have unequal numbers of tokens
    total = torch.zeros((), device="cuda")
    clock.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
    clock[step][0].record()
    for part in parts:
        send = train and part is parts[-1]
        if send:
            sent.update(messages=0, bytes=0)
        with contextlib.nullcontext() if send else model.no_sync():
            loss = loss_of(model, part) / count
            (loss * world_size).backward()  # DDP divides by the ranks
        total += loss.detach()
    clock[step][1].record()
    if train:
        optimizer.step()
    optimizer.zero_grad()
    if train and step % 4 == 3:
        dist.all_reduce(total)  # every rank calls it
        if rank == 0:
            print(f"step {step}: loss {total.item():.4f}", flush=True)

peaks = [None] * world_size
dist.all_gather_object(peaks, torch.cuda.max_memory_allocated())
if rank == 0:
    print(f"{world_size} ranks, each sends in a step: {sent['messages']} messages,")
    print(f"{sent['bytes']:,} bytes of gradients")
    ms = [a.elapsed_time(b) for a, b in clock]
    sending, silent = fmean(ms[:-4][-4:]), fmean(ms[-4:])
    print(f"forward and backward: {sending:.3f} ms, without messages {silent:.3f} ms")
    for number, peak in enumerate(peaks):
        print(f"rank {number}: peak memory {peak / 2**20:.1f} MiB", flush=True)
dist.destroy_process_group()
