"""What lesson 23 takes from the lessons before: slices, stages, averages, and counting.

`slice_blocks` is lesson 19's plan of columns and rows, `Stage` one half of the layers,
as in lesson 20, and `average` lesson 16's all-reduce of one flat tensor. `measure` runs
a way of training in a rank. Used in lesson 23.
"""

import gc
import logging
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

from scripts.small_gpt import GPT, sequences

# PyTorch 2.15 logs advice about the backend of pipelines: lesson 20 has it
logging.getLogger("torch.distributed.pipelining").setLevel("ERROR")

# -- the batch and the loss ------------------------------------------------------------


def share(batch, part: int, parts: int):
    """One of equal parts of the inputs and targets."""
    return [tensor.chunk(parts)[part] for tensor in batch]


def loss_of(scores, targets):
    return cross_entropy(scores.flatten(0, 1), targets.flatten())


def backward(model, tokens, targets):
    loss = loss_of(model(tokens), targets)
    loss.backward()
    return loss.detach()


# -- parts of the model ----------------------------------------------------------------


def slice_blocks(model: GPT, mesh) -> None:
    """Cut the matrices of each block over the ranks of a mesh with one axis."""
    here = Replicate()
    norm = PrepareModuleOutput(  # a DTensor: one all-reduce in backward
        output_layouts=here, desired_output_layouts=here, use_local_output=False
    )
    plan = {"norm1": norm, "norm2": norm}
    for name in ("query", "key", "value", "up"):
        plan[name] = ColwiseParallel()
    for name in ("out", "down"):
        plan[name] = RowwiseParallel()
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


class Stage(nn.Module):
    """The first or the second half of the blocks, with the end that belongs to it."""

    def __init__(self, model: GPT, first: bool):
        super().__init__()
        half = len(model.blocks) // 2
        self.first = first
        self.blocks = model.blocks[:half] if first else model.blocks[half:]
        if first:
            self.token, self.place = model.token, model.place
        else:
            self.norm, self.head = model.norm, model.head

    def forward(self, x):
        if self.first:
            x = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x if self.first else self.head(self.norm(x))


def average(model: nn.Module, group) -> None:
    """Average the gradients over a process group, in one message."""
    parameters = list(model.parameters())
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat, dist.ReduceOp.AVG, group=group)
    parts = flat.split([p.numel() for p in parameters])
    for p, part in zip(parameters, parts, strict=True):
        p.grad = part.view_as(p)


# -- counting --------------------------------------------------------------------------


def start_log() -> None:
    """Let all ranks begin together, and forget what the timeline has so far."""
    import simgpu

    dist.barrier()
    torch.cuda.synchronize()
    if simgpu.is_running():  # not on real GPUs
        simgpu.timeline().clear()


def measure(train, way, *args, depth=2, width=128, number=32):
    """Train in one way: the losses that this rank has or None, and the bytes stored.

    Args:
        train: trains a model: model, function that makes a step -> losses, bytes.
        way: divides a model: model, batch -> model of this rank, such a function.
        args: for the way.
        depth: blocks of the model.
        width: of the model.
        number: sequences of the global batch.
    """
    warnings.simplefilter("ignore")
    gc.collect()  # frees what an earlier way has left
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    x = torch.ones(2, 8, device="cuda", requires_grad=True)
    nn.Linear(8, 8).cuda()(x).sum().backward()  # cuBLAS allocates its workspaces
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    batch = [part.cuda() for part in sequences(number)]
    losses, stored = train(*way(GPT(depth, width).cuda(), batch, *args))
    found = None if losses[0] is None else torch.stack(losses).cpu()
    return found, stored - before


def mean(results) -> torch.Tensor:
    """The losses of each step, averaged over the ranks that have one."""
    return torch.stack([losses for losses, _ in results if losses is not None]).mean(0)
