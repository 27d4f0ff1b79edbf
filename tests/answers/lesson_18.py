"""Answers to the exercises of lesson 18: right ones, and planted wrong ones."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def largest(shards, activations, blocks):
    terms = {"GPUs": shards, "tokens": activations, "groups": blocks}
    return max(terms, key=terms.get)


def by_peaks(parameters, block, gpus, activations):
    def peak(gpus, activations, block):
        return 16 * parameters / gpus + activations + 16 * block

    peaks = {
        "gpus": peak(2 * gpus, activations, block),
        "tokens": peak(gpus, activations / 2, block),
        "groups": peak(gpus, activations, block / 2),
    }
    return min(peaks, key=peaks.get)


def gpus_divide_activations(parameters, block, gpus, activations):
    return largest(16 * parameters / gpus, activations / gpus, 16 * block)


def without_adamw(parameters, block, gpus, activations):
    return largest(8 * parameters / gpus, activations, 16 * block)


def with_one_block(parameters, block, gpus, activations):
    return largest(16 * parameters / gpus, activations, 4 * block)


def without_gpus(parameters, block, gpus, activations):
    return largest(16 * parameters, activations, 16 * block)


def clipped(parts, most):
    squares = sum(p.square().sum() for p in parts)
    dist.all_reduce(squares)
    norm = squares.sqrt()
    if norm > most:
        for p in parts:
            p *= most / norm
    return norm


def clipped_one_by_one(parts, most):
    total = 0.0
    for p in parts:
        square = p.norm() ** 2
        dist.all_reduce(square)
        total += square.item()
    scale = min(1.0, most / total**0.5)
    for p in parts:
        p.mul_(scale)
    return total**0.5


def clips_alone(parts, most):
    return nn.utils.clip_grad_norm_([as_parameter(p) for p in parts], most)


def as_parameter(part):
    p = nn.Parameter(torch.zeros_like(part))
    p.grad = part
    return p


def norm_of_all(squares_of, root=True, op=dist.ReduceOp.SUM):
    """The root of what the ranks' `squares_of(parts)` are together."""

    def norm(parts):
        squares = squares_of(parts)
        dist.all_reduce(squares, op)
        return squares.sqrt() if root else squares

    return norm


def of_all_parts(parts):
    return torch.cat(parts).square().sum()


def scales(
    norm_of, by=lambda norm, most: most / norm, if_=lambda parts, norm, most: True
):
    """Scales where `if_` says so, and returns the norm."""

    def clip(parts, most):
        norm = norm_of(parts)
        if if_(parts, norm, most):
            for part in parts:
                part.mul_(by(norm, most))
        return norm

    return clip


whole_norm = norm_of_all(of_all_parts)
adds_norms = scales(norm_of_all(lambda parts: torch.cat(parts).norm(), root=False))
adds_norms_of_parts = scales(
    norm_of_all(lambda parts: sum(part.norm() for part in parts) ** 2)
)
decides_alone = scales(
    whole_norm, if_=lambda parts, norm, most: torch.cat(parts).norm() > most
)
takes_the_largest = scales(norm_of_all(of_all_parts, op=dist.ReduceOp.MAX))
always_scales = scales(whole_norm)
scales_by_the_square = scales(whole_norm, by=lambda norm, most: most / norm**2)


def only_looks(parts, most):
    norm = whole_norm(parts)
    parts = [part * most / norm for part in parts]
    return norm


def returns_the_new_norm(parts, most):
    clipped(parts, most)
    return clipped(parts, most)


def rank_0_alone(parts, most):
    norm = torch.cat(parts).norm()
    if dist.get_rank() == 0:
        raise ValueError("rank 0 has given up")
    return norm


def each_of(groups, root=True, **options):
    """Shards each of `groups(model)`, and then the model."""

    def shard_it(model, mesh):
        for group in groups(model):
            fully_shard(group, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh) if root else model

    return shard_it


def blocks(model):
    return model.blocks


def pairs_and_ends(model):
    pairs = [list(model.blocks[i : i + 2]) for i in range(0, 6, 2)]
    return [*pairs, model.embed, model.head]


def root_first(model, mesh):
    fully_shard(model, mesh=mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    return model


def in_bfloat16(model, mesh):
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False, **options)
    return fully_shard(model, mesh=mesh, **options)


def raises(model, mesh):
    raise KeyError("blocks")


RIGHT = {
    "make_room": [by_peaks],
    "clip": [clipped_one_by_one],
    "shard_it": [each_of(blocks, reshard_after_forward=False)],
}

WRONG = {
    "make_room": [
        (gpus_divide_activations, '"groups" makes only the four blocks half'),
        (without_adamw, "the shards 32.0, activations 26.0"),
        (
            with_one_block,
            '12.0, the four blocks 16.0; "tokens" makes only activations half',
        ),
        (
            without_gpus,
            'activations 30.0, the four blocks 3.5; "GPUs" makes only the shards',
        ),
        (lambda parameters, block, gpus, activations: "DDP", "'DDP'"),
    ],
    "clip": [
        (decides_alone, "decide by the whole norm"),
        (clips_alone, "the ranks disagree"),
        (adds_norms, "norms cannot be added"),
        (adds_norms_of_parts, "norms of a rank's parts"),
        (takes_the_largest, "larger of"),
        (
            lambda parts, most: norm_of_all(of_all_parts, root=False)(parts),
            "root is missing",
        ),
        (
            lambda parts, most: whole_norm(parts) / dist.get_world_size() ** 0.5,
            "not averaged",
        ),
        (only_looks, "in place"),
        (always_scales, "nothing to scale"),
        (scales_by_the_square, "norm is 0.07"),
        (returns_the_new_norm, "before the clipping"),
        (rank_0_alone, "in 2 ranks: rank 0"),
    ],
    "shard_it": [
        (lambda model, mesh: fully_shard(model, mesh=mesh), "gathered at once"),
        (
            each_of(lambda model: (list(model.blocks[:3]), list(model.blocks[3:]))),
            "gathered at once",
        ),
        (each_of(blocks, root=False), "embed.weight is not sharded"),
        (each_of(blocks), "13 all-gathers"),
        (each_of(pairs_and_ends), "10 all-gathers in a step, at most 8: each module"),
        (root_first, "the inner modules first"),
        (lambda model, mesh: model, "no parameter is sharded"),
        (in_bfloat16, "not those of one process"),
        (raises, "KeyError"),
    ],
}
