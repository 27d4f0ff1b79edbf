"""What the words in `slices` of model.py mean: PyTorch's styles, and three of our own.

Between sliced layers, each rank has some of the tokens.

    lookup     an embedding; tokens are scattered behind it. One of places, too
    tokens     a norm, on some tokens
    whole      attention or an MLP, a module: all tokens come together before it
    columns    its first layers, each rank with some of the outputs. A single layer for
               queries, keys and values would be cut across them: make it three
    heads      the same of keys and values, with (heads of queries, heads of keys)
    rows       its last layer, which adds up what ranks have, and scatters tokens
    scores     the last layer of the model, each rank with some of the classes
"""

import torch
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    parallel,
)


class Tokens(parallel.SequenceParallel):
    """A norm, which each rank computes for some tokens; what is frozen stays frozen."""

    def _apply(self, module, mesh):
        learns = {name: p.requires_grad for name, p in module.named_parameters()}
        module = super()._apply(module, mesh)
        for name, p in module.named_parameters():
            p.requires_grad_(learns[name])
        return module


class Whole(parallel.ParallelStyle):
    """A module that reads all tokens: they come together before it, once."""

    def _apply(self, module, mesh):
        def gather(module, inputs, named):
            tokens = [*inputs, *named.values()][0]
            tokens = DTensor.from_local(tokens, mesh, [Shard(1)])
            tokens = tokens.redistribute(placements=[Replicate()])
            if inputs:
                return (tokens, *inputs[1:]), named
            return (), {**named, next(iter(named)): tokens}

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


class Heads(parallel.ParallelStyle):
    """The columns of keys or values, head by head.

    Where ranks do not divide these heads, each rank computes all of them and keeps, for
    each of its queries' heads, the one that this reads.

    Args:
        queries: heads of queries.
        keys: heads of keys, and of values.
    """

    def __init__(self, queries, keys):
        super().__init__()
        self.queries, self.keys = queries, keys

    def _apply(self, module, mesh):
        ranks, rank = mesh.size(), mesh.get_local_rank()
        if self.queries % ranks:
            raise ValueError(f"{ranks} ranks cannot share {self.queries} heads")
        if self.keys % ranks == 0:
            return parallel.ColwiseParallel()._apply(module, mesh)
        mine = self.queries // ranks  # heads of queries
        read = torch.arange(rank * mine, (rank + 1) * mine) * self.keys // self.queries

        def choose(module, inputs, output):
            # what other ranks' queries read has gradients there
            heads = output.to_local(grad_placements=[Partial()])
            heads = heads.unflatten(-1, (self.keys, -1))
            return heads[:, :, read.to(heads.device)].flatten(-2)

        for name, p in list(module.named_parameters(recurse=False)):
            p = nn.Parameter(distribute_tensor(p, mesh, [Replicate()]), p.requires_grad)
            module.register_parameter(name, p)
        module.register_forward_hook(choose)
        return module


def styles_of(words):
    """Module's name -> style."""
    split, whole = Shard(1), Replicate()
    known = {
        "tokens": lambda: Tokens(use_local_output=True),
        "whole": Whole,
        "columns": parallel.ColwiseParallel,
        "rows": lambda: parallel.RowwiseParallel(output_layouts=split),
        "lookup": lambda: parallel.RowwiseParallel(
            input_layouts=whole, output_layouts=split
        ),
        "scores": lambda: parallel.ColwiseParallel(
            input_layouts=split, output_layouts=Shard(-1), use_local_output=False
        ),
        "heads": Heads,
    }
    found = {}
    for name, word in words.items():
        word, *sizes = [word] if isinstance(word, str) else word
        if word not in known:
            raise ValueError(
                f"{name}: a layer is one of {', '.join(known)}, not {word}"
            )
        found[name] = known[word](*sizes)
    return found
