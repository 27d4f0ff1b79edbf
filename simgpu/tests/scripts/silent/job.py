"""What the programs of this folder share: ranks, messages with gradients, training.

Each trains the same way on any number of ranks, unless its argument is "wrong".
"""

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

WRONG = sys.argv[1:] == ["wrong"]
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
RANK, RANKS = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum over ranks."""
    x = x.clone()
    dist.all_reduce(x)
    return x


def gathered(x: torch.Tensor) -> torch.Tensor:
    """The parts of all ranks, one after the other along the first dimension."""
    out = x.new_empty(len(x) * RANKS, *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def scattered(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of the sum over ranks."""
    out = x.new_empty(len(x) // RANKS, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous())
    return out


def pair(name: str, there: Callable, back: Callable) -> type:
    """A function and what its gradient does."""

    def forward(context, x):
        return there(x)

    def backward(context, gradient):
        return back(gradient)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), members)


Sum = pair("Sum", total, torch.clone)
Copy = pair("Copy", torch.clone, total)
Gather = pair("Gather", gathered, scattered)
Scatter = pair("Scatter", scattered, gathered)


def part(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """This rank's part."""
    return x.chunk(RANKS, dim)[RANK].clone()


def sliced(weight: torch.Tensor, dim: int = 0) -> nn.Parameter:
    """This rank's part of a weight."""
    return nn.Parameter(part(weight.detach(), dim))


def average(model: nn.Module) -> None:
    """Average all gradients over the ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)


def nothing(model: nn.Module) -> None:
    """All gradients are complete."""


def train(model: nn.Module, loss: Callable, finish: Callable = average) -> None:
    """Take two steps.

    Args:
        loss: of the number of the step.
        finish: what makes the gradients complete.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss(step).backward()
        finish(model)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
