"""What binds a training step: `python what_binds.py`.

Prints the kernels of a step by their time, the share of the time in which the GPU is
busy, and the FLOPs a second of its matmuls and convolutions beside the card's peak. Put
your own model and step between the two lines of dashes, and the peak of your card and
dtype into PEAK. The step uses a single stream. Used in lesson 08.
"""

import re

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.utils.flop_counter import FlopCounterMode

# FLOP/s, from the datasheet: an A100 in float32. bfloat16 has another peak, and so has
# TF32 (156e12), which convolutions use by default.
PEAK = 19.5e12
STEPS = 5
# What a kernel of a matmul, a convolution or fused attention has in its name
FLOPS_IN = re.compile(
    r"gemm|gemv|\b(add|b|badd)?mm\b|nvjet|cutlass|conv|fprop|dgrad|wgrad|flash|fmha"
)

# -- your model and your step ----------------------------------------------------------
torch.manual_seed(0)
images = torch.randn(1024, 64, device="cuda")
labels = images[:, :10].argmax(1)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step():
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# --------------------------------------------------------------------------------------

for _ in range(3):  # warm up
    step()
with FlopCounterMode(display=False) as counter:
    step()

begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
torch.cuda.synchronize()
begin.record()
for _ in range(STEPS):
    step()
end.record()
torch.cuda.synchronize()
took = 1e3 * begin.elapsed_time(end) / STEPS  # µs, without the profiler

with torch.profiler.profile() as profiler:
    step()
    torch.cuda.synchronize()
rows = profiler.key_averages()
rows = [row for row in rows if row.device_type == DeviceType.CUDA]
kernels = [row for row in rows if not row.is_user_annotation]
kernels.sort(key=lambda row: row.self_device_time_total, reverse=True)
busy = sum(row.self_device_time_total for row in kernels)

multiplying = 0.0  # µs in matmuls and convolutions
for number, row in enumerate(kernels):
    multiplies = FLOPS_IN.search(row.key.lower()) is not None
    multiplying += row.self_device_time_total * multiplies
    if number < 8:
        share = row.self_device_time_total / busy
        kind = "FLOPs" if multiplies else "memory"
        print(f"{row.key[:40]:40} {row.count:3} x {share:5.0%}  {kind}")
count = sum(row.count for row in kernels)
print(f"a step takes {took:.0f} µs; its {count} kernels run for {busy:.0f} µs")
rate = 1e6 * counter.get_total_flops() / max(multiplying, 1e-3)
print(f"matmuls and convolutions are {multiplying / busy:.0%} of the kernels' time,")
print(f"with {rate / 1e12:.2f} TFLOP/s, {rate / PEAK:.1%} of PEAK")
if busy < 0.8 * took:
    print(
        "launch-bound, or the host waits for data or for .item(): try twice the batch"
    )
elif multiplying < 0.5 * busy:
    print("memory-bound: most of the time is in kernels that only move bytes")
elif rate > PEAK:
    print("faster than PEAK: is it the peak of another dtype? (convolutions use TF32)")
elif rate > 0.5 * PEAK:
    print("compute-bound: half of the peak, or more")
else:
    print("memory-bound, or many small matmuls: look at the longest ones")
