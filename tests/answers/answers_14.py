"""Answers to the exercises of lesson 14: right ones, and wrong ones with the reason."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

SLICES = 4 * 24 * 2048 * 1024 * 4
ROWS = 4 * 24 * 12 * 1024 * 1024


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


RIGHT = {
    "handed_over": [
        lambda: (SLICES, ROWS, 3072),
        lambda: (SLICES, ROWS, 3073),
    ],
    "gated_plan": [lambda: (plan(),)],
    "sliced_loss": [lambda: (three_numbers,)],
}
WRONG = {
    "handed_over": [
        (lambda: (SLICES // 2, ROWS, 3072), "backward has two"),
        (lambda: (SLICES // 8, ROWS, 3072), "whole batch"),
        (lambda: (SLICES, ROWS // 4, 3072), "4 bytes"),
        (lambda: (SLICES, ROWS * 7 // 4, 3072), "leave out the ring"),
        (lambda: (SLICES, ROWS, 6144), "backward pass"),
        (lambda: (SLICES, ROWS, 12288), "four all-reduces"),
        (lambda: (1, ROWS, 1), "tokens x width"),
    ],
    "gated_plan": [
        (lambda: ({"up": ColwiseParallel(), "down": RowwiseParallel()},), "gate"),
        (lambda: ({"gate": 1, "up": 1, "down": ColwiseParallel},), "brackets"),
        (lambda: (plan(down=ColwiseParallel),), "wrong part of its input"),
        (
            lambda: (plan(RowwiseParallel, RowwiseParallel, ColwiseParallel),),
            "wrong part of its input",
        ),
        (lambda: (plan(up=RowwiseParallel),), "wrong part of its input"),
        (
            lambda: (
                plan(
                    lambda: ColwiseParallel(output_layouts=Replicate()),
                    lambda: ColwiseParallel(output_layouts=Replicate()),
                    lambda: RowwiseParallel(input_layouts=Replicate()),
                ),
            ),
            "one all-reduce is enough",
        ),
        (
            lambda: (plan(down=lambda: RowwiseParallel(output_layouts=Shard(0))),),
            "another output",
        ),
        (lambda: ([ColwiseParallel()],), "dictionary"),
    ],
    "sliced_loss": [
        (lambda: (without_maximum,), "overflows"),
        (lambda: (own_maximum,), "one process"),
        (lambda: (one_maximum_for_all,), "is 0 in every column"),
        (lambda: (gathered,), "the loss is right, but"),
        (lambda: (summed,), "not the mean"),
        (lambda: (by_row,), "one number"),
        (lambda: (local,), "one process"),
    ],
}
