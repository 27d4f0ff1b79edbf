"""Judge two claims about DDP for your own model, on your own cards.

    torchrun --standalone --nproc-per-node=4 judge_claim.py
    torchrun --standalone --nproc-per-node=4 judge_claim.py --buckets 25 100

Without options: N ranks compute the loss and the gradients of one process with all
samples. With `--buckets`: a step with the second `bucket_cap_mb` is faster than one
with the first. `--plant` averages nothing: see the first test fail before you trust it.
`torchrun` ends with status 0 if the claim is true, and with 1 otherwise.
Lesson 29 of the course explains each line.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

TOLERANCE = 1e-4  # of the largest number: float32's rounding stays below
ROUNDS, STEPS, SURE = 10, 10, 9  # faster in 9 of 10 rounds, each way timed in each

# -- put your model here ---------------------------------------------------------------

SAMPLES = 128  # in all; one GPU must be able to hold them


def make_model():
    return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 10))


def all_samples():
    """The same samples in all ranks: inputs and targets."""
    x = torch.randn(SAMPLES, 64)
    return x, x[:, :10].argmax(1)


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


# --------------------------------------------------------------------------------------


def ready(model):
    """The model on this rank's card, with the weights of rank 0."""
    model = model.cuda()
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    return model


def my_share(x):
    return x.tensor_split(dist.get_world_size())[dist.get_rank()].cuda()


def judge_values(plant):
    """Compare the gradients of all ranks with those of one process."""
    torch.manual_seed(0)
    model = ready(make_model())
    x, y = all_samples()
    loss = loss_of(model, x.cuda(), y.cuda())
    loss.backward()
    used = {name: p for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: p.grad.clone() for name, p in used.items()}
    model.zero_grad()
    ddp = DDP(model, device_ids=[torch.cuda.current_device()])
    mine = loss_of(model if plant else ddp, my_share(x), my_share(y))
    mine.backward()
    off = {}
    for name, parameter in used.items():
        largest = whole[name].abs().max().clamp(min=1e-12)
        off[name] = (parameter.grad - whole[name]).abs().max() / largest
    worst = torch.stack(list(off.values())).nan_to_num(nan=float("inf"))
    dist.all_reduce(worst, dist.ReduceOp.MAX)  # the rank that is worst counts
    losses = torch.stack([mine.detach(), loss.detach()])
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    name = list(off)[int(worst.argmax())]
    found = [f"loss {losses[0]:.4f}, of one process {losses[1]:.4f}"]
    found.append(f"gradients off by {worst.max():.6f}, most in {name}")
    return found, bool(worst.max() < TOLERANCE)


def judge_time(caps):
    """Time steps with each bucket size, in turn: other jobs disturb both alike."""
    device = torch.cuda.current_device()
    models = [DDP(make_model().cuda(), [device], bucket_cap_mb=cap) for cap in caps]
    x, y = (my_share(part) for part in all_samples())
    rounds = torch.zeros(ROUNDS + 1, 2, device="cuda")
    for number in range(ROUNDS + 1):
        for way, model in enumerate(models):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            dist.barrier(device_ids=[device])
            begin.record()
            for _ in range(STEPS):
                loss_of(model, x, y).backward()
            end.record()
            torch.cuda.synchronize()
            rounds[number, way] = begin.elapsed_time(end) / STEPS
    dist.all_reduce(rounds, dist.ReduceOp.MAX)  # the slowest rank counts
    first, second = rounds[1:].T  # the first round warms up
    faster = int((second < 0.98 * first).sum())
    slower = int((first < 0.98 * second).sum())
    found = [f"{first.median():.3f} ms a step, then {second.median():.3f} ms"]
    found.append(f"faster in {faster} of {ROUNDS} rounds, slower in {slower}")
    return found, True if faster >= SURE else False if slower >= SURE else None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--buckets", type=float, nargs=2, metavar="MB")
    parser.add_argument("--plant", action="store_true")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    judged = judge_time(args.buckets) if args.buckets else judge_values(args.plant)
    found, holds = judged
    word = {True: "true", False: "false", None: "cannot be judged"}[holds]
    if dist.get_rank() == 0:
        print(*found, f"the claim: {word}", sep="\n")
    dist.destroy_process_group()
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
