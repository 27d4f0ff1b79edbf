"""Train a deep classifier in less memory: three options, which combine.

    python less_memory.py --accumulate 2 --checkpoint

`--accumulate N` cuts each batch into N parts, `--checkpoint` computes activations a
second time, `--offload` moves them to the CPU. Each prints the same losses, another
peak of memory and another time. (Later norms of the gradient differ by rounding.)
BatchNorm needs the full batch, once: with it, leave out `--accumulate`, and keep it
outside of the segments. Used in lesson 10.
"""

import argparse
import contextlib

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=1, metavar="N")
parser.add_argument("--checkpoint", action="store_true")
parser.add_argument("--offload", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)
images = torch.randn(5, 8192, 64)  # five batches
labels = images[:, :, :10].argmax(2)

# your data above, your model and its segments (called in turn) here
layers = [nn.Linear(64, 128), nn.ReLU()]
for _ in range(15):
    layers += [nn.Linear(128, 128), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(128, 10))
for weight in model.parameters():
    if weight.dim() == 2:
        nn.init.kaiming_normal_(weight)  # or a model this deep does not learn
model = model.cuda()
segments = [model[0:8], model[8:16], model[16:24], model[24:]]
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)


def scores(x):
    for segment in segments:
        if options.checkpoint:  # or only for some of the segments
            x = checkpoint(segment, x, use_reentrant=False)
        else:
            x = segment(x)
    return x


start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
for step in range(5):
    x, y = images[step].cuda(), labels[step].cuda()
    start.record()
    total = 0.0
    parts = options.accumulate
    for part_x, part_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
        share = len(part_x) / len(x)  # right for unequal parts, too
        keep = save_on_cpu(pin_memory=True) if options.offload else None
        with keep or contextlib.nullcontext():
            loss = share * nn.functional.cross_entropy(scores(part_x), part_y)
        loss.backward()
        total += loss.detach()
    optimizer.step()
    end.record()
    end.synchronize()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    ms = start.elapsed_time(end)
    print(f"step {step}: loss {total.item():.4f}, gradient {norm:.4f}, {ms:.1f} ms")
    optimizer.zero_grad()

print(f"peak {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
