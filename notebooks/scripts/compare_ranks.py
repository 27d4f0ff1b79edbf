"""Compare the first steps of a training on N ranks with those on one rank.

    torchrun --standalone --nproc-per-node=1 compare_ranks.py --save=one.pt
    torchrun --standalone --nproc-per-node=4 compare_ranks.py --compare=one.pt

One rank trains four times, each time with the samples of each batch in another order.
All are right, so their distance is what rounding does in float32. N ranks may be ten
times as far away. The script names the first value that is further away. It switches
TF32 off, with which a value may differ by a thousandth. Switch dropout and autocast
off yourself: where one rank differs from itself by more than rounding, any program
would pass, and nothing is saved. BatchNorm that is not synchronized differs, and is
named rightly. Used in lesson 29.
"""

import argparse
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, ORDERS, FACTOR = 3, 3, 10
MOST = 1e-2  # of one rank's distance from itself: float32 rounds far less
EPS = torch.finfo(torch.float32).eps

# -- Put your model here, one global batch, and your loss -----------------------------
BATCH, LENGTH, WORDS = 16, 12, 20


def make_model():
    layers = nn.Embedding(WORDS, 32), nn.GELU(), nn.Linear(32, WORDS)
    return nn.Sequential(*layers)


def batch(step):
    """All samples of a step, on the CPU: the same ones for any number of ranks.

    A tensor, or tensors in a tuple, a list or a dictionary, with the samples along the
    first dimension. What has no dimension is given to all ranks as it is. Pad all
    samples to one length, so that the ranks have equal shapes.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (BATCH, 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.arange(LENGTH) >= lengths] = -100  # padding
    return {"inputs": tokens[:, :-1], "targets": targets}


def loss_of(model, mine):
    """The loss for backward(), from this rank's samples; DDP averages the gradients."""
    scores, targets = model(mine["inputs"]).flatten(0, 1), mine["targets"]
    total = cross_entropy(scores, targets.flatten(), reduction="sum")
    count = (targets != -100).sum()
    dist.all_reduce(count)  # tokens of all ranks
    return total / count * dist.get_world_size()


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


# --------------------------------------------------------------------------------------


def share(samples, rank, ranks, order=None):
    """Every `ranks`-th sample, from `rank` on, on this GPU, in a random order."""
    if isinstance(samples, Mapping):  # a tokenizer's BatchEncoding is one, and no dict
        return {k: share(part, rank, ranks, order) for k, part in samples.items()}
    if isinstance(samples, (tuple, list)):
        return tuple(share(part, rank, ranks, order) for part in samples)
    if not isinstance(samples, torch.Tensor):
        return samples
    if samples.dim():
        if len(samples) % ranks:
            raise SystemExit(
                f"{ranks} ranks cannot share {len(samples)} samples equally"
            )
        samples = samples[rank::ranks]
        if order is not None:
            generator = torch.Generator().manual_seed(order)
            samples = samples[torch.randperm(len(samples), generator=generator)]
    return samples.cuda()


def steps(order=None):
    """A dictionary for each step: the loss, gradients as backward makes them, norm."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = make_model().cuda()
    parallel = DDP(model, device_ids=[torch.cuda.current_device()])
    optimizer = make_optimizer(model)
    noted = []
    for step in range(STEPS):
        loss = loss_of(parallel, share(batch(step), rank, ranks, order))
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        values = {"loss": mean.cpu()}
        for name, parameter in reversed(list(model.named_parameters())):
            if parameter.grad is not None:  # it is frozen, or not used
                values[f"gradient of {name}"] = parameter.grad.cpu().clone()
        norms = [v.norm() for name, v in values.items() if name != "loss"]
        values["norm of all gradients"] = torch.stack(norms).norm()
        noted.append(values)
        optimizer.step()
        optimizer.zero_grad()
    return noted


def away(values, others):
    """name -> the distance of two steps, as a part of the size."""
    # a gradient may be zero, or rounding alone, as that of a bias on attention's keys
    least = EPS * values["norm of all gradients"].clamp(min=EPS)
    return {name: ((value - others[name]).norm() / value.norm().clamp(min=least)).item()
            for name, value in values.items()}  # fmt: skip


def must_be_steady(one, again):
    """Refuse what differs from itself: it would allow the ranks any distance."""
    for other in again:
        far = sorted(away(one[0], other[0]).values())[len(one[0]) // 2]
        if not far < MOST:  # true for nan, too
            raise SystemExit(
                f"one rank is {far:.1e} away from itself in another order, which is no "
                "rounding: switch dropout and autocast off, and seed what is random"
            )


def compare(one, again, many):
    worst = 0.0
    for step in range(STEPS):
        trials = [away(one[step], other[step]) for other in again]
        noise = {name: max(trial[name] for trial in trials) for name in one[step]}
        usual = sorted(noise.values())[len(noise) // 2]  # one value may have had luck
        for name, distance in away(one[step], many[step]).items():
            allowed = FACTOR * max(noise[name], usual, EPS)
            if not distance <= allowed:  # true for nan, too
                if not one[step][name].any():
                    return f"step {step}, {name}: zero on one rank, not zero on several"
                return (f"step {step}, {name}: {distance:.1e} away from one rank, and "
                        f"rounding allows {allowed:.1e}")  # fmt: skip
            worst = max(worst, distance / allowed)
    return (
        f"{STEPS} steps agree; the largest distance is {worst:.0%} of what is allowed"
    )


def main():
    parser = argparse.ArgumentParser()
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--save", help="file for the steps of one rank")
    either.add_argument("--compare", help="file that one rank has written")
    options = parser.parse_args()
    if options.save and os.environ["WORLD_SIZE"] != "1":
        parser.error("--save is for one rank: --nproc-per-node=1")
    torch.backends.cudnn.allow_tf32 = False  # it is True by default, for convolutions
    torch.backends.cuda.matmul.allow_tf32 = False  # set_float32_matmul_precision does
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    noted = steps()
    if options.save:
        again = [steps(order) for order in range(ORDERS)]
        must_be_steady(noted, again)
        torch.save((noted, again), options.save)
        print(f"{STEPS} steps of {dist.get_world_size()} rank are in {options.save}")
    elif dist.get_rank() == 0:
        print(compare(*torch.load(options.compare), noted))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
