"""Train a classifier in float32, float16 or bfloat16, and print what it costs.

    python mixed_precision.py --dtype float16

Put your own model and data at the place that is marked. float16 needs the scaler;
for the other types the scaler is off and does nothing. Used in 09-mix-precision.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--init-scale", type=float, default=2.0**16)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)

# your model and your data
torch.manual_seed(0)
images = torch.randn(2048, 64).cuda()
labels = images[:, :10].argmax(1)
batches = list(zip(images.split(128), labels.split(128), strict=True))
layers = [nn.Linear(64, options.width), nn.ReLU(), nn.Linear(options.width, 10)]
model = nn.Sequential(*layers).cuda()

optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
mixed = dtype != torch.float32
scaler = torch.amp.GradScaler(
    "cuda", init_scale=options.init_scale, enabled=dtype == torch.float16
)
torch.cuda.reset_peak_memory_stats()
skipped = steps = 0
start = torch.cuda.Event(enable_timing=True)
end = torch.cuda.Event(enable_timing=True)
start.record()
for epoch in range(3):
    for x, y in batches:
        with torch.amp.autocast("cuda", dtype=dtype, enabled=mixed):
            loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # clipping needs the real gradients
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before  # a skipped step halves the scale
        steps += 1
    print(f"epoch {epoch}: loss {loss.item():.4f}")
end.record()
end.synchronize()
milliseconds = start.elapsed_time(end) / steps

peak = torch.cuda.max_memory_allocated() / 2**20
print(f"{options.dtype}: {skipped} of {steps} steps skipped")
print(f"peak memory {peak:.1f} MiB, {milliseconds:.2f} ms a step")
