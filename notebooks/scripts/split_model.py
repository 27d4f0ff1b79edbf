"""Train one model over all GPUs of this machine, from one process.

    python split_model.py --parts 4

Measures the memory that each layer needs, cuts the model where the GPUs need about the
same, trains it with each batch in `--parts` micro-batches, and prints the loss beside
that of one GPU, if one can train the model. Used in lesson 13.
"""

import argparse
import copy
import functools

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--parts", type=int, default=4, help="micro-batches of a batch")
parts = parser.parse_args().parts
gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]

torch.manual_seed(0)
images = torch.randn(5, 256, 64)  # five batches
labels = images[:, :, :10].argmax(2)

# your data above, your model here: an nn.Sequential whose layers pass one tensor on
layers = [nn.Linear(64, 1024), nn.ReLU()]
for _ in range(4):
    layers += [nn.Linear(1024, 1024), nn.ReLU()]
whole = nn.Sequential(*layers, nn.Linear(1024, 10))


def make_optimizer(weights):
    return torch.optim.Adam(weights, lr=3e-4, fused=True)


def memory_of(layer, x):
    """Bytes that training needs for one layer, measured, and what it passes on."""
    x = x.to(gpus[0])
    before = torch.cuda.memory_allocated(gpus[0])
    layer = copy.deepcopy(layer).to(gpus[0])
    output = layer(x)
    weights = list(layer.parameters())
    if weights:
        output.sum().backward()
        optimizer = make_optimizer(weights)
        optimizer.step()
    return torch.cuda.memory_allocated(gpus[0]) - before, output.detach()


@functools.cache
def cut(needs, stages):
    """Where each stage ends, such that the largest stage is as small as possible."""
    if stages == 1:
        return (len(needs),)
    best = None
    for end in range(1, len(needs) - stages + 2):
        later = cut(needs[end:], stages - 1)
        ends = (end, *(end + place for place in later))
        starts = (0, *ends[:-1])
        largest = max(sum(needs[a:b]) for a, b in zip(starts, ends, strict=True))
        if best is None or largest < best[0]:
            best = largest, ends
    return best[1]


class Stages(nn.Module):
    """Some layers on each GPU; what one stage returns is copied to the next GPU."""

    def __init__(self, model, ends, devices):
        super().__init__()
        starts = (0, *ends[:-1])
        cuts = zip(starts, ends, devices, strict=True)
        self.stages = nn.ModuleList(model[a:b].to(device) for a, b, device in cuts)
        self.devices = devices

    def forward(self, x):
        for stage, device in zip(self.stages, self.devices, strict=True):
            x = stage(x.to(device))
        return x


def train(model):
    first, last = model.devices[0], model.devices[-1]
    for device in set(model.devices):
        torch.cuda.reset_peak_memory_stats(device)
    optimizer = make_optimizer(model.parameters())  # after the model has moved
    found = []
    for x, y in zip(images, labels, strict=True):
        chunks = zip(x.to(first).chunk(parts), y.to(last).chunk(parts), strict=True)
        losses = []
        for x_part, y_part in chunks:  # launches only: no .item(), no print
            loss = nn.functional.cross_entropy(model(x_part), y_part)
            losses.append(loss * (len(x_part) / len(x)))
        total = sum(losses)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        found.append(total.item())
    peaks = [torch.cuda.max_memory_allocated(d) / 2**20 for d in model.devices]
    return found, peaks


memory_of(whole[0], images[0])  # cuBLAS takes its workspaces now, once for all layers
needs, x = [], images[0]
for layer in whole:
    need, x = memory_of(layer, x)
    needs.append(need)
ends = cut(tuple(needs), min(len(gpus), len(whole)))
split_losses, peaks = train(Stages(copy.deepcopy(whole), ends, gpus[: len(ends)]))
starts = (0, *ends[:-1])
for start, end, device, peak in zip(starts, ends, gpus, peaks, strict=False):
    print(f"{device}: layers {start} to {end - 1}, peak {peak:.1f} MiB")
try:
    losses, (peak,) = train(Stages(whole, (len(whole),), gpus[:1]))
    print(f"one GPU: peak {peak:.1f} MiB")
except torch.OutOfMemoryError:
    losses = [float("nan")] * len(split_losses)
    print("one GPU: out of memory")
for step, (split, one) in enumerate(zip(split_losses, losses, strict=True)):
    print(f"step {step}: loss {split:.4f}, on one GPU {one:.4f}")
