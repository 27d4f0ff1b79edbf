"""Functional collectives, and gradients through collectives, with exact values."""

import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dnn
from common import check, join, leave

warnings.filterwarnings("ignore", category=FutureWarning)
rank, ranks, device = join()
world = dist.group.WORLD
total = sum(range(ranks))


def gradient(what, collective, x, weights, expected):
    """The gradient at x of a sum of collective(x), weighted by position."""
    x.requires_grad_()
    (collective(x) * weights).sum().backward()
    check(f"gradient of {what}", x.grad, expected)


x = torch.full((2,), float(rank), device=device)
y = funcol.all_reduce(x, "sum", world)
check("all_reduce leaves its input", x, [rank] * 2)
check("all_reduce", y, [total] * 2)
check("all_reduce avg, used at once", funcol.all_reduce(x, "avg", world) + 1,
      [total / ranks + 1] * 2)  # fmt: skip
every = [r for r in range(ranks) for _ in range(2)]
check("all_gather_tensor", funcol.all_gather_tensor(x, 0, world), every)
gathered = funcol.all_gather_tensor(x.view(2, 1), 1, world)
check("all_gather_tensor of columns", gathered, [list(range(ranks))] * 2)
rows = torch.arange(2.0 * ranks, device=device)
mine = rows[2 * rank : 2 * rank + 2] * ranks
check(
    "reduce_scatter_tensor", funcol.reduce_scatter_tensor(rows, "sum", 0, world), mine
)
check("broadcast", funcol.broadcast(x, 1, world), [1, 1])
one = torch.arange(1.0 * ranks, device=device) + 10 * rank
swapped = funcol.all_to_all_single(one, None, None, world)
check("all_to_all_single", swapped, [10 * r + rank for r in range(ranks)])
turned = funcol.permute_tensor(x, [(r + 1) % ranks for r in range(ranks)], world)
check("permute_tensor", turned, [(rank - 1) % ranks] * 2)
many = funcol.all_reduce_coalesced([x, x + 1], "sum", world)
check("all_reduce_coalesced", torch.cat(list(many)), [total] * 2 + [total + ranks] * 2)
many = funcol.all_gather_into_tensor_coalesced([x, x + 1], world)
check("all_gather_into_tensor_coalesced", many[1], [r + 1 for r in every])
many = funcol.reduce_scatter_tensor_coalesced([rows, rows], "sum", [0, 0], world)
check("reduce_scatter_tensor_coalesced", many[1], mine)

# Each rank's loss weighs what it received by its rank + 1.
weight = rank + 1.0
weights = total + ranks  # all of them
each = [r + 1 for r in every]
to = [r + 1 for r in range(ranks)]  # numbers for each rank


def swap(x):
    return funcol.all_to_all_single_autograd(x, [rank + 1] * ranks, to, world)


def scatter_sum(x):
    return dnn.reduce_scatter(x.new_empty(2), list(x.split(2)))


def gather_and_grad(x):
    return funcol.all_gather_tensor_autograd(x, 0, world)


def scatter_and_grad(x):
    return funcol.reduce_scatter_tensor_autograd(x, "sum", 0, world)


both = [weights] * 2
root = [weights if rank == 0 else 0] * 2
swapped = [r + 1 for r in range(ranks) for _ in range(r + 1)]
gradient("all_reduce", dnn.all_reduce, x.clone(), weight, both)
gradient("all_gather", lambda x: torch.cat(dnn.all_gather(x)), x.clone(), weight, both)
gradient("broadcast", lambda x: dnn.broadcast(x, 0), x.clone(), weight, root)
gradient("reduce_scatter", scatter_sum, rows.clone(), weight, each)
gradient("all_gather_tensor_autograd", gather_and_grad, x.clone(), weight, both)
gradient("reduce_scatter_tensor_autograd", scatter_and_grad, rows.clone(), weight, each)
ones = torch.ones(sum(to), device=device)
gradient("all_to_all_single_autograd", swap, ones, weight, swapped)
x = one.clone().requires_grad_()
(dnn.all_to_all_single(torch.empty_like(x), x) * weight).sum().backward()
check("gradient of all_to_all_single", x.grad, to)

leave(f"functional: {ranks} ranks")
