"""Train a model whose layers are divided among the ranks, as a pipeline.

    torchrun --standalone --nproc-per-node=4 pipeline_layers.py --schedule 1f1b

Schedules: gpipe and 1f1b give each rank one stage, interleaved and zero-bubble two.
A batch is cut into `--micro-batches`. Put your layers, loss and data between the two
lines of dashes. A layer takes the one tensor that the layer before returns.
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


def call(layer, x, **others):  # if Block takes others: layer(x, others["mask"])
    return layer(x)


def loss_of(scores, labels):
    return cross_entropy(scores, labels, reduction="sum")  # main divides by `count`


def count(labels):  # of a full batch: targets of -100 have no loss
    return (labels != -100).sum()


def batch_of(step):
    """The same on every rank. The label is the largest of the first ten numbers."""
    images = torch.randn(256, 64, generator=torch.Generator().manual_seed(step))
    return images, images[:, :10].argmax(1), {}  # others, by name: {"mask": mask}


# --------------------------------------------------------------------------------------


class Stage(nn.Sequential):
    def forward(self, x, **others):
        for layer in self:
            x = call(layer, x, **others)
            if not isinstance(x, torch.Tensor):
                raise SystemExit(f"a layer returns one tensor, not {type(x).__name__}")
        return x.contiguous()  # a message is as it lies in memory


def work_of(layer):
    """Its parameters outside embeddings, which only look rows up: as many FLOPs."""
    multiplied = (m for m in layer.modules() if not isinstance(m, nn.Embedding))
    return sum(p.numel() for m in multiplied for p in m.parameters(recurse=False))


def cut(layers, stages):
    """Divide the layers so that all stages have about as much work."""
    sizes = [work_of(layer) for layer in layers]
    total, before, homes, parts = sum(sizes), 0, {}, {}
    for layer, size in zip(layers, sizes, strict=True):
        middle = before + size / 2  # of this layer, among all work
        stage = min(int(stages * middle / total), stages - 1)
        parts.setdefault(stage, []).append(layer)
        before += size
        for p in layer.parameters():
            if homes.setdefault(p, stage) != stage:
                raise SystemExit(
                    f"stages {homes[p]} and {stage} share a weight: copy it, and after "
                    "each step add up both gradients (lesson 20, exercise 3)"
                )
    if empty := set(range(stages)) - set(parts):
        why = f"divided by their work, {len(layers)} layers leave stage {min(empty)} "
        raise SystemExit(why + f"of {stages} empty: use fewer ranks or smaller layers")
    return [Stage(*parts[stage]) for stage in range(stages)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--micro-batches", type=int, default=8)
    options = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # a link for each two ranks: messages to both neighbours do not share a stream
    lazy = "nccl-lazy" in dist.Backend.backend_list  # PyTorch 2.15
    dist.init_process_group("nccl-lazy" if lazy else "nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    Schedule, each = SCHEDULES[options.schedule]
    total = each * ranks

    # All ranks draw the same layers on the CPU, and move only their own to the GPU.
    torch.manual_seed(0)
    parts = cut(make_layers(), total)
    mine = nn.ModuleDict({str(i): parts[i] for i in range(rank, total, ranks)})
    mine.to(device)
    torch.cuda.manual_seed(rank)  # or stages would drop the same elements
    stages = [
        pipelining.PipelineStage(part, int(i), total, device)
        for i, part in mine.items()
    ]
    schedule = Schedule(
        stages if each > 1 else stages[0],
        options.micro_batches,
        loss_fn=lambda scores, labels: loss_of(scores, labels) / of_all,
        scale_grads=False,  # by the number of micro-batches: losses add up to the mean
    )
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3)  # your optimizer

    for step in range(12):
        inputs, targets, others = batch_of(step)
        others = {name: tensor.to(device) for name, tensor in others.items()}
        inputs, targets, losses = inputs.to(device), targets.to(device), []
        if len(targets) % options.micro_batches:
            parser.error(f"--micro-batches does not divide a batch of {len(targets)}")
        of_all = count(targets)
        first = [inputs] if rank == 0 else []
        others |= {"target": targets, "losses": losses, "return_outputs": False}
        if step == 0:  # PyTorch learns shapes from uninitialized tensors: rehearse
            before = [buffer.clone() for buffer in mine.buffers()]
            schedule.step(*first, **others)
            for buffer, saved in zip(mine.buffers(), before, strict=True):
                buffer.copy_(saved)  # running means of BatchNorm, for example
            optimizer.zero_grad()
            losses.clear()
        schedule.step(*first, **others)  # if True, the last rank keeps all scores
        optimizer.step()
        optimizer.zero_grad()
        if losses and step % 4 == 3:  # only the last rank has them
            print(f"step {step}: loss {torch.stack(losses).sum():.4f}", flush=True)

    parameters = sum(p.numel() for p in mine.parameters())
    peak = torch.cuda.max_memory_allocated() / 2**20
    rows = [None] * ranks
    dist.all_gather_object(rows, (parameters, peak))
    for number, (parameters, peak) in enumerate(rows if rank == 0 else []):
        print(f"rank {number}: {parameters:,} parameters, peak {peak:.1f} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
