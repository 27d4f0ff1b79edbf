"""Compare the first steps of a training on N ranks with those on one rank.

    torchrun --standalone --nproc-per-node=1 compare_ranks.py --save=one.pt
    torchrun --standalone --nproc-per-node=4 compare_ranks.py --compare=one.pt

One rank trains twice, the second time with the samples of each batch in reverse order.
Both are right, so their distance is what rounding does in float32. N ranks may be ten
times as far away. The script names the first value that is further away. Switch dropout
and autocast off.
Used in lesson 28.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, FACTOR = 3, 10

# -- Put your model here, one global batch, and your loss -----------------------------
BATCH, LENGTH, WORDS = 16, 12, 20


def make_model():
    torch.manual_seed(0)
    layers = nn.Embedding(WORDS, 32), nn.GELU(), nn.Linear(32, WORDS)
    return nn.Sequential(*layers)


def batch(step):
    """All samples of a step, on the CPU: the same ones for any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (BATCH, 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.arange(LENGTH) >= lengths] = -100  # padding
    return tokens[:, :-1], targets


def loss_of(model, inputs, targets):
    """The loss for backward(), from this rank's samples; DDP averages the gradients."""
    scores = model(inputs).flatten(0, 1)
    total = cross_entropy(scores, targets.flatten(), reduction="sum")
    count = (targets != -100).sum()
    dist.all_reduce(count)  # tokens of all ranks
    return total / count * dist.get_world_size()


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


# --------------------------------------------------------------------------------------


def steps(reverse=False):
    """A dictionary for each step: the loss, gradients as backward makes them, norm."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = make_model().cuda()
    parallel = DDP(model, device_ids=[torch.cuda.current_device()])
    optimizer = make_optimizer(model)
    noted = []
    for step in range(STEPS):
        mine = [part[rank::ranks].cuda() for part in batch(step)]
        if reverse:
            mine = [part.flip(0) for part in mine]
        loss = loss_of(parallel, *mine)
        optimizer.zero_grad()
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        values = {"loss": mean.cpu()}
        for name, parameter in reversed(list(model.named_parameters())):
            values[f"gradient of {name}"] = parameter.grad.cpu().clone()
        norms = [v.norm() for name, v in values.items() if name != "loss"]
        values["norm of all gradients"] = torch.stack(norms).norm()
        noted.append(values)
        optimizer.step()
    return noted


def away(values, others):
    """name -> the distance of two steps, as a part of the size."""
    return {name: ((values[name] - others[name]).norm() / values[name].norm()).item()
            for name in values}  # fmt: skip


def compare(one, again, many):
    worst = 0.0
    for step in range(STEPS):
        noise = away(one[step], again[step])
        usual = sorted(noise.values())[len(noise) // 2]  # one value may have had luck
        for name, distance in away(one[step], many[step]).items():
            allowed = FACTOR * max(noise[name], usual, torch.finfo(torch.float32).eps)
            if not distance <= allowed:  # true for nan, too
                return (f"step {step}, {name}: {distance:.1e} away from one rank, and "
                        f"rounding allows {allowed:.1e}")  # fmt: skip
            worst = max(worst, distance / allowed)
    return (
        f"{STEPS} steps agree; the largest distance is {worst:.0%} of what is allowed"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", help="file for the steps of one rank")
    parser.add_argument("--compare", help="file that one rank has written")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    noted = steps()
    if options.save:
        torch.save((noted, steps(reverse=True)), options.save)
        print(f"{STEPS} steps of {dist.get_world_size()} rank are in {options.save}")
    elif dist.get_rank() == 0:
        print(compare(*torch.load(options.compare), noted))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
