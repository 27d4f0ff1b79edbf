"""What binds a training step: `python what_binds.py`.

Prints the kernels of a step by their time, the share of the time in which the GPU is
busy, and the FLOPs of the step beside the card's peak. Put your own model and step
between the two lines of dashes, and the peak of your card and dtype into PEAK. Used in
08-find-what-binds.
"""

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.utils.flop_counter import FlopCounterMode

PEAK = 19.5e12  # FLOP/s: an A100 in float32; look yours up in its datasheet
STEPS = 5

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
kernels = [row for row in rows if row.device_type == DeviceType.CUDA]
kernels.sort(key=lambda row: row.self_device_time_total, reverse=True)
busy = sum(row.self_device_time_total for row in kernels)

for row in kernels[:8]:
    share = row.self_device_time_total / busy
    print(f"{row.key[:40]:40} {row.count:3} x {share:5.0%}")
count = sum(row.count for row in kernels)
print(f"a step takes {took:.0f} µs; its {count} kernels run for {busy:.0f} µs")
rate = counter.get_total_flops() / took * 1e6
print(f"{rate / 1e12:.2f} TFLOP/s in matmuls, {rate / PEAK:.1%} of the peak")
if busy < 0.8 * took:
    print("launch-bound: the GPU waits for the host")
elif rate > 0.5 * PEAK:
    print("compute-bound: half of the peak, or more")
else:
    print("memory-bound, or many small kernels: look at the longest ones")
