"""Time a training step: `python time_step.py`.

The stopwatch warms up, lets the GPU mark the times itself, waits once at the end, and
says the median and the spread, not one run. Put your own model and your own step
between the two lines of dashes. Used in lesson 07.
"""

import statistics

import torch
from torch import nn

WARM_UP, RUNS = 3, 10


def stopwatch(step, warm_up=WARM_UP, runs=RUNS):
    """The milliseconds of each run of a step on the current GPU, after a warm-up."""
    for _ in range(warm_up):
        step()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    marks[0].record()  # while the GPU still warms up: no step finds it idle
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()  # once, so that the stopwatch makes no step wait
    times = []
    for begin, end in zip(marks[:-1], marks[1:], strict=True):
        times.append(begin.elapsed_time(end))
    return times


# -- your model and your step ----------------------------------------------------------
torch.manual_seed(0)
samples = 16384  # of a step
images = torch.randn(samples, 64, device="cuda")
labels = images[:, :10].argmax(1)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step():
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# --------------------------------------------------------------------------------------

times = stopwatch(step)
median = statistics.median(times)
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__.split('+')[0]}")
print(f"{RUNS} steps after {WARM_UP} to warm up")
print(f"median {median:.3f} ms, min {min(times):.3f} ms, max {max(times):.3f} ms")
print(f"{samples / median:,.0f} samples a millisecond")
