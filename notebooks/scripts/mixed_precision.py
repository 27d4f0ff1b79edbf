"""Train a classifier in float32, float16 or bfloat16, and print what it costs.

    python mixed_precision.py --dtype float16

Put your own work at the place that is marked. float16 needs the scaler; for the other
types it is off and does nothing. The first epoch warms up and is not timed. At the
default size launches bind: expect 16 bits to be slower, and try --width 8192 --depth 4
on a real GPU. Used in lesson 09.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
types = ("float32", "float16", "bfloat16")
parser.add_argument("--dtype", choices=types, default="float16")
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--depth", type=int, default=1)
parser.add_argument("--init-scale", type=float, default=2.0**16)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)

# --- your model, data, loss and optimizer ---
torch.manual_seed(0)
images = torch.randn(2048, 64).cuda()
labels = images[:, :10].argmax(1)
batches = list(zip(images.split(128), labels.split(128), strict=True))
layers = [nn.Linear(64, options.width), nn.ReLU()]
for _ in range(options.depth - 1):
    layers += [nn.Linear(options.width, options.width), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(options.width, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)


def loss_of(x, y):
    return cross_entropy(model(x).float(), y)


# --- end of your part ---

taken = []  # the scaler calls optimizer.step only where it does not skip
optimizer.register_step_post_hook(lambda *_: taken.append(1))
mixed = dtype != torch.float32
scaler = torch.amp.GradScaler(
    "cuda", init_scale=options.init_scale, enabled=dtype == torch.float16
)
torch.cuda.reset_peak_memory_stats()
steps = 0
start = torch.cuda.Event(enable_timing=True)
end = torch.cuda.Event(enable_timing=True)
for epoch in range(3):
    if epoch == 1:  # the first epoch loads kernels
        start.record()
    for x, y in batches:
        with torch.amp.autocast("cuda", dtype=dtype, enabled=mixed):
            loss = loss_of(x, y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # clipping needs the real gradients
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        steps += 1
    print(f"epoch {epoch}: loss {loss.item():.4f}")
end.record()
end.synchronize()
milliseconds = start.elapsed_time(end) / (2 * len(batches))

peak = torch.cuda.max_memory_allocated() / 2**20
print(f"{options.dtype}: {steps - len(taken)} of {steps} steps skipped")
print(f"peak memory {peak:.1f} MiB, {milliseconds:.2f} ms a step")
