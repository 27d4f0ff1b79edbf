"""Train a model whose layers are divided among the ranks, as a pipeline.

    torchrun --standalone --nproc-per-node=4 pipeline_layers.py --schedule 1f1b

Schedules: gpipe and 1f1b give each rank one stage, interleaved and zero-bubble two.
A batch is cut into `--micro-batches`. Put your model and your data between the two
lines of dashes: a list of layers, of which each takes what the one before returns.
Lesson 20 of the course explains the rest.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.nn.functional import cross_entropy

SCHEDULES = {  # name -> class, stages on each rank
    "gpipe": (pipelining.ScheduleGPipe, 1),
    "1f1b": (pipelining.Schedule1F1B, 1),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 2),
    "zero-bubble": (pipelining.ScheduleInterleavedZeroBubble, 2),
}

# -- yours: layers, a loss, and a function that returns the batch of a step ------------


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.layers = nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)

    def forward(self, x):
        return x + self.layers(x)


def make_layers():
    return [nn.Linear(64, 128), *(Residual(128) for _ in range(8)), nn.Linear(128, 10)]


def loss_of(scores, labels):
    return cross_entropy(scores, labels)  # a mean over the micro-batch


def batch_of(step):
    """The same on every rank. The label is the largest of the first ten numbers."""
    images = torch.randn(256, 64, generator=torch.Generator().manual_seed(step))
    return images, images[:, :10].argmax(1)


# --------------------------------------------------------------------------------------


def cut(layers, stages):
    """Divide the layers so that all stages have about as many parameters."""
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    total, before, parts = sum(sizes), 0, [[] for _ in range(stages)]
    for layer, size in zip(layers, sizes, strict=True):
        middle = before + size / 2  # of this layer, among all parameters
        parts[min(int(stages * middle / total), stages - 1)].append(layer)
        before += size
    if not all(parts):
        raise SystemExit(f"{len(layers)} layers are too few for {stages} stages")
    return [nn.Sequential(*part) for part in parts]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--micro-batches", type=int, default=8)
    options = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # with device_id, messages to both neighbours would share one stream
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    Schedule, each = SCHEDULES[options.schedule]
    count = each * ranks

    # All ranks draw the same layers on the CPU, and move only their own to the GPU.
    torch.manual_seed(0)
    parts = cut(make_layers(), count)
    mine = nn.ModuleDict({str(i): parts[i] for i in range(rank, count, ranks)})
    mine.to(device)
    stages = [
        pipelining.PipelineStage(part, int(i), count, device)
        for i, part in mine.items()
    ]
    schedule = Schedule(
        stages if each > 1 else stages[0], options.micro_batches, loss_fn=loss_of
    )
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3)

    for step in range(12):
        inputs, targets = (tensor.to(device) for tensor in batch_of(step))
        losses = []
        first = [inputs] if rank == 0 else []
        schedule.step(*first, target=targets, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if losses and step % 4 == 3:  # only the last rank has them
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}", flush=True)

    parameters = sum(p.numel() for p in mine.parameters())
    peak = torch.cuda.max_memory_allocated() / 2**20
    rows = [None] * ranks
    dist.all_gather_object(rows, (parameters, peak))
    for number, (parameters, peak) in enumerate(rows if rank == 0 else []):
        print(f"rank {number}: {parameters:,} parameters, peak {peak:.1f} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
