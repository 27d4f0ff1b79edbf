"""Answers to the exercises of lesson 19: right ones, and planted wrong ones."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

SLICES = 4 * 24 * 2048 * 1024 * 4


def add(x, op=dist.ReduceOp.SUM):
    dist.all_reduce(x, op)
    return x


def three_numbers(scores, y, first):
    most = add(scores.max(1).values, dist.ReduceOp.MAX)
    total = add((scores - most[:, None]).exp().sum(1))
    column = y - first
    here = (column >= 0) & (column < scores.shape[1])
    own = scores.gather(1, column.clamp(0, scores.shape[1] - 1)[:, None])[:, 0]
    right = add(torch.where(here, own, 0.0))
    return (total.log() + most - right).mean()


def without_maximum(scores, y, first):
    total = add(scores.exp().sum(1))
    words = torch.arange(scores.shape[1], device=y.device) + first
    right = add((scores * (words == y[:, None])).sum(1))
    return (total.log() - right).mean()


def own_maximum(scores, y, first):
    most = scores.max(1).values
    total = add((scores - most[:, None]).exp().sum(1))
    words = torch.arange(scores.shape[1], device=y.device) + first
    right = add((scores * (words == y[:, None])).sum(1))
    return (total.log() + most - right).mean()


def one_maximum_for_all(scores, y, first):
    most = add(scores.max().expand(len(y)).clone(), dist.ReduceOp.MAX)
    total = add((scores - most[:, None]).exp().sum(1))
    words = torch.arange(scores.shape[1], device=y.device) + first
    right = add((scores * (words == y[:, None])).sum(1))
    return (total.log() + most - right).mean()


def gathered(scores, y, first):
    parts = [torch.empty_like(scores) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, scores)
    return torch.nn.functional.cross_entropy(torch.cat(parts, 1), y)


def summed(scores, y, first):
    return three_numbers(scores, y, first) * len(y)


def by_row(scores, y, first):
    return three_numbers(scores, y, first).expand(len(y))


def local(scores, y, first):
    inside = (y - first).clamp(0, scores.shape[1] - 1)
    return torch.nn.functional.cross_entropy(scores, inside)


def plan(gate=ColwiseParallel, up=ColwiseParallel, down=RowwiseParallel):
    return {"gate": gate(), "up": up(), "down": down()}


def packed(scores, targets, first):
    here = (targets >= first) & (targets < first + scores.shape[1])
    column = (targets - first).clamp(0, scores.shape[1] - 1)
    most = add(scores.max(1).values, dist.ReduceOp.MAX)
    total = (scores - most[:, None]).exp().sum(1)
    own = scores.gather(1, column[:, None])[:, 0] * here
    total, own = add(torch.stack([total, own]))
    return (total.log() + most - own).mean()


RIGHT = {
    "sliced_bytes": [(SLICES, 3072), (SLICES, 3073)],
    "loss_in_slices": [three_numbers, packed],
}

WRONG = {
    "sliced_bytes": [
        ((SLICES // 2, 3072), "backward has two"),
        ((SLICES // 8, 3072), "all tokens"),
        ((SLICES * 7 // 4, 3072), "leave out the ring"),
        ((SLICES, 6144), "backward pass"),
        ((SLICES, 12288), "four all-reduces"),
        ((SLICES, 384), "every rank"),
        ((1, 1), "tokens x width"),
    ],
    "plan_of_gated": [
        ({"up": ColwiseParallel(), "down": RowwiseParallel()}, "gate"),
        ({"gate": 1, "up": 1, "down": ColwiseParallel}, "brackets"),
        (plan(down=ColwiseParallel), "wrong part of its input"),
        (
            plan(RowwiseParallel, RowwiseParallel, ColwiseParallel),
            "wrong part of its input",
        ),
        (plan(up=RowwiseParallel), "wrong part of its input"),
        (
            plan(
                lambda: ColwiseParallel(output_layouts=Replicate()),
                lambda: ColwiseParallel(output_layouts=Replicate()),
                lambda: RowwiseParallel(input_layouts=Replicate()),
            ),
            "one all-reduce is enough",
        ),
        (plan(down=lambda: RowwiseParallel(output_layouts=Shard(0))), "another output"),
        ([ColwiseParallel()], "dictionary"),
    ],
    "loss_in_slices": [
        (without_maximum, "overflows"),
        (own_maximum, "one process"),
        (one_maximum_for_all, "is 0 in every column"),
        (gathered, "the loss is right, but"),
        (summed, "not the mean"),
        (by_row, "one number"),
        (local, "one process"),
    ],
}
