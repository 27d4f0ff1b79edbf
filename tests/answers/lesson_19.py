"""Answers to the exercises of lesson 19: right ones, and planted wrong ones."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

TERMS = ["query.A", "out.B"]


def cuts(query_a="whole", query_b="columns", out_a="rows", out_b="whole"):
    return {"query.A": query_a, "query.B": query_b, "out.A": out_a, "out.B": out_b}


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
    "adapters": [(cuts(), {"out.B", "query.A"})],
    "loss_in_slices": [three_numbers, packed],
}

WRONG = {
    "adapters": [
        ((cuts(query_b="whole"), TERMS), r"query: a rank gets (6, 8) from its parts"),
        ((cuts("columns", "rows"), TERMS), "query: a rank gets (6, 8)"),
        ((cuts("columns", "columns"), TERMS), "(6, 8) by (8, 2) by (4, 4), which do"),
        ((cuts(out_a="whole"), TERMS), "out: with 8 numbers a token, a rank of two"),
        ((cuts(out_b="columns"), TERMS), "out: a rank gets (6, 4)"),
        ((cuts(out_a="columns", out_b="rows"), TERMS), "(6, 4) by (8, 2) by (2, 8)"),
        ((cuts(), []), "gradient of query.A on a rank comes from"),
        ((cuts(), "query.A"), "gradient of out.B on a rank comes from"),
        ((cuts(), list(cuts())), "query.B is cut"),
        ((cuts("half"), TERMS), "'half'"),
        ((cuts(), ["A"]), "not 'A'"),
        (({"A": "rows"}, TERMS), "the keys query.A"),
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
        (
            lambda scores, y, first: three_numbers(scores, y, first) * len(y),
            "not the mean",
        ),
        (
            lambda scores, y, first: three_numbers(scores, y, first).expand(len(y)),
            "one number",
        ),
        (local, "one process"),
    ],
}
