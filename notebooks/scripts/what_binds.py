"""What binds a training step: `python what_binds.py`, or with torchrun on several GPUs.

Prints the longest kernels of a step, how long the GPU is busy, how long it waits for
messages that no kernel hides, and the rate of its matmuls beside the card's peak. Put
your model, your data and your step between the two lines of dashes, and say in which
numbers your matmuls compute: `--numbers bfloat16`. Used in lesson 08.
"""

import argparse
import os
import re
from collections.abc import Mapping

os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler is silent

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.flop_counter import FlopCounterMode

# TFLOP/s of NVIDIA's datasheets, without sparsity. A card is found by whole words of
# its name; H100 and H200 are SXM, so add a row for "H100 PCIe" and others.
NUMBERS = "float32", "tf32", "float16", "bfloat16"
PEAKS = {
    "T4": (8.1, 8.1, 65, 8.1),  # no TF32, no bfloat16: computed in float32
    "V100-SXM2": (15.7, 15.7, 125, 15.7),
    "A100": (19.5, 156, 312, 312),
    "H100 80GB HBM3": (67, 494.7, 989.4, 989.4),
    "H200(?! NVL)": (67, 494.7, 989.4, 989.4),
    "B200": (75, 1100, 2250, 2250),
    "L40S": (91.6, 183, 362.05, 362.05),
}
# Rules of thumb: shares from which on a bound is named
EXPOSED, BUSY, MOSTLY = 0.2, 0.8, 0.5
STEPS = 5
# What the kernel of a matmul, a convolution or fused attention has in its name
FLOPS_IN = re.compile(
    r"gemm|gemv|(\b|_)(add|b|badd)?mm(\b|_)|nvjet|cutlass|conv|fprop|dgrad|wgrad"
    r"|flash|fmha|triton_tem"
)
# Kernels of torch.compile that only move what they fuse, though named after all of it:
# triton_poi_fused_addmm_relu_0 is the ReLU behind an addmm
FUSED = re.compile(r"^triton_(poi|red|per)_")
MESSAGE = re.compile(r"nccl|all_reduce|all_gather|reduce_scatter|all_to_all|^broadcast")
COPY = re.compile(r"^mem(cpy|set)")


def to_gpu(batch):
    """The batch with its tensors on the GPU; they may be in dicts, lists and tuples."""
    if isinstance(batch, Mapping):
        return {name: to_gpu(value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*[to_gpu(value) for value in batch])
    if isinstance(batch, (list, tuple)):
        return [to_gpu(value) for value in batch]
    if isinstance(batch, torch.Tensor):
        return batch.cuda()
    return batch


parser = argparse.ArgumentParser()
parser.add_argument("--numbers", choices=NUMBERS, default="float32")
numbers = parser.parse_args().numbers
if not torch.cuda.is_available():
    raise SystemExit("this script profiles a GPU, and torch.cuda finds none")
world_size = int(os.environ.get("WORLD_SIZE", 1))  # of torchrun
rank = int(os.environ.get("RANK", 0))
local_rank = int(os.environ.get("LOCAL_RANK", 0))
torch.cuda.set_device(local_rank)
card = torch.cuda.get_device_name()
peaks = [row for name, row in PEAKS.items() if re.search(rf"\b{name}\b", card)]
if not peaks:
    raise SystemExit(f"no peak is known of {card}: add a row of its datasheet to PEAKS")
PEAK = 1e12 * peaks[0][NUMBERS.index(numbers)]
if world_size > 1:
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl", device_id=device)
torch.manual_seed(0)

# -- your model, your data, your step --------------------------------------------------
# your model
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
if world_size > 1:
    model = DDP(model, device_ids=[local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# your data: one batch of your loader, which has num_workers=0
images = torch.randn(1024, 64)
batch = to_gpu({"images": images, "labels": images[:, :10].argmax(1)})


def step():
    loss = nn.functional.cross_entropy(model(batch["images"]), batch["labels"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# --------------------------------------------------------------------------------------


def kind_of(name):
    if MESSAGE.search(name.lower()):
        return "message"
    if COPY.search(name.lower()):
        return "copy"
    if FLOPS_IN.search(name.lower()) and not FUSED.search(name):
        return "FLOPs"
    return "rest"


def alone(intervals, others):
    """How long some of the intervals last, and none of the others."""
    edges = [(t, 0, d) for a, b in intervals for t, d in ((a, 1), (b, -1))]
    edges += [(t, 1, d) for a, b in others for t, d in ((a, 1), (b, -1))]
    total, last, running = 0.0, 0.0, [0, 0]
    for time, which, change in sorted(edges):
        if running[0] and not running[1]:
            total += time - last
        last = time
        running[which] += change
    return total


def microseconds_of_a_step():
    """Without the profiler, which slows the host."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(STEPS):
        step()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / STEPS


def profiled():
    """The rows and the single events of a step's kernels and messages."""
    with torch.profiler.profile() as profiler:
        step()
        torch.cuda.synchronize()
    found = []
    for events in (profiler.key_averages(), profiler.events()):
        on_gpu = [event for event in events if event.device_type == DeviceType.CUDA]
        found.append([event for event in on_gpu if not event.is_user_annotation])
    return found


def verdict(took, times, exposed, rate):
    busy = times["FLOPs"] + times["rest"] + times["copy"]
    if rate > PEAK:
        return (
            f"faster than the peak: are these {numbers}? Say --numbers: autocast's, or "
            "tf32, as convolutions compute (attention with a causal mask counts double)"
        )
    if exposed > EXPOSED * took:
        return (
            "communication-bound: the GPU waits for messages that nothing hides, or "
            "for a slower rank: compare the ranks"
        )
    if busy + exposed < BUSY * took:
        return (
            "launch-bound, or the host waits: for .item(), or for data, if twice the "
            "batch takes twice as long"
        )
    if times["copy"] > MOSTLY * busy:
        return "copy-bound: most of the time goes to copies; pin and overlap them"
    if times["FLOPs"] < MOSTLY * busy:
        return "memory-bound, as a rule: most of the time goes to the rest, not matmuls"
    if rate > MOSTLY * PEAK:
        return "compute-bound: half of the peak, or more"
    return "memory-bound, or many small matmuls: look at the longest ones"


def main():
    for _ in range(3):  # warm up
        step()
    took = microseconds_of_a_step()
    rows, events = profiled()
    # Last: torch.compile skips a model for good once it has run in this counter
    with FlopCounterMode(display=False) as counter:
        step()
    if rank == 0:
        report(took, rows, events, counter.get_total_flops())
    if world_size > 1:
        dist.destroy_process_group()


def report(took, rows, events, flops):
    times = dict.fromkeys(("FLOPs", "rest", "copy", "message"), 0.0)  # µs
    for row in rows:
        times[kind_of(row.key)] += row.self_device_time_total
    total = sum(times.values())
    if not total:
        raise SystemExit("the step ran no kernel: are the model and its batch on cuda?")
    rows.sort(key=lambda row: row.self_device_time_total, reverse=True)
    for row in rows[:8]:
        share = row.self_device_time_total / total
        print(f"{row.key[:40]:40} {row.count:3} x {share:4.0%}  {kind_of(row.key)}")
    computing, messages = [], []  # when each of them ran
    for event in events:
        when = event.time_range.start, event.time_range.end
        (messages if kind_of(event.name) == "message" else computing).append(when)
    exposed = alone(messages, computing)
    busy = total - times["message"]
    count = len(computing)
    print(f"a step takes {took:.0f} µs; its {count} kernels run for {busy:.0f} µs")
    if messages:
        print(f"messages take {times['message']:.0f} µs, {exposed:.0f} µs of it alone")
    rate = 1e6 * flops / max(times["FLOPs"], 1e-3)
    share = times["FLOPs"] / max(busy, 1e-3)
    print(f"matmuls and convolutions are {share:.0%} of the kernels' time,")
    print(f"with {rate / 1e12:.2f} TFLOP/s, {rate / PEAK:.1%} of the peak in {numbers}")
    print(verdict(took, times, exposed, rate))


if __name__ == "__main__":
    main()
