"""Answers to the exercises of lesson 18: right ones, and planted wrong ones."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def in_one_line(parameters, ranks):
    return 4 * parameters + 12 * parameters / ranks


def all_of_ddp(parameters, ranks):
    return 16 * parameters


def all_of_stage_1(parameters, ranks):
    return 8 * parameters + 8 * parameters / ranks


def all_of_stage_3(parameters, ranks):
    return 16 * parameters / ranks


def without_adamw(parameters, ranks):
    return 4 * parameters + 4 * parameters / ranks


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


def adds_norms(parts, most):
    norm = torch.cat(parts).norm()
    dist.all_reduce(norm)
    [p.mul_(most / norm) for p in parts]
    return norm


def adds_norms_of_parts(parts, most):
    square = sum(part.norm() for part in parts) ** 2
    dist.all_reduce(square)
    [p.mul_(most / square.sqrt()) for p in parts]
    return square.sqrt()


def decides_alone(parts, most):
    own = torch.cat(parts).norm()
    square = own**2
    dist.all_reduce(square)
    if own > most:
        [p.mul_(most / square.sqrt()) for p in parts]
    return square.sqrt()


def takes_the_largest(parts, most):
    norm = torch.cat(parts).norm()
    dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    [p.mul_(most / norm) for p in parts]
    return norm


def without_root(parts, most):
    squares = torch.cat(parts).square().sum()
    dist.all_reduce(squares)
    return squares


def averages(parts, most):
    squares = torch.cat(parts).square().sum()
    dist.all_reduce(squares)
    return (squares / dist.get_world_size()).sqrt()


def only_looks(parts, most):
    squares = torch.cat(parts).square().sum()
    dist.all_reduce(squares)
    parts = [p * most / squares.sqrt() for p in parts]
    return squares.sqrt()


def always_scales(parts, most):
    squares = torch.cat(parts).square().sum()
    dist.all_reduce(squares)
    [p.mul_(most / squares.sqrt()) for p in parts]
    return squares.sqrt()


def scales_by_the_square(parts, most):
    squares = torch.cat(parts).square().sum()
    dist.all_reduce(squares)
    [p.mul_(most / squares) for p in parts]
    return squares.sqrt()


def returns_the_new_norm(parts, most):
    clipped(parts, most)
    return clipped(parts, most)


def rank_0_alone(parts, most):
    norm = torch.cat(parts).norm()
    if dist.get_rank() == 0:
        raise ValueError("rank 0 has given up")
    return norm


def stays_whole(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    return model


def root_alone(model, mesh):
    return fully_shard(model, mesh=mesh)


def blocks_alone(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return model


def each_block(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def each_linear(model, mesh):
    for block in model.blocks:
        fully_shard(block.up, mesh=mesh)
        fully_shard(block.down, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def pairs_and_ends(model, mesh):
    for i in range(0, 6, 2):
        fully_shard([model.blocks[i], model.blocks[i + 1]], mesh=mesh)
    fully_shard(model.embed, mesh=mesh)
    fully_shard(model.head, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def root_first(model, mesh):
    fully_shard(model, mesh=mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    return model


def threes(model, mesh):
    fully_shard(list(model.blocks[:3]), mesh=mesh)
    fully_shard(list(model.blocks[3:]), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def nothing(model, mesh):
    return model


def in_bfloat16(model, mesh):
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False, **options)
    return fully_shard(model, mesh=mesh, **options)


def raises(model, mesh):
    raise KeyError("blocks")


RIGHT = {
    "stage_2_bytes": [in_one_line],
    "clip": [clipped_one_by_one],
    "shard_it": [stays_whole],
}

WRONG = {
    "stage_2_bytes": [
        (all_of_ddp, "that is DDP"),
        (all_of_stage_1, "that is stage 1"),
        (all_of_stage_3, "that is stage 3"),
        (without_adamw, "without AdamW"),
        (lambda parameters, ranks: parameters, "not 1,000"),
    ],
    "clip": [
        (decides_alone, "decide by the whole norm"),
        (clips_alone, "the ranks disagree"),
        (adds_norms, "norms cannot be added"),
        (adds_norms_of_parts, "norms of a rank's parts"),
        (takes_the_largest, "larger of"),
        (without_root, "root is missing"),
        (averages, "not averaged"),
        (only_looks, "in place"),
        (always_scales, "nothing to scale"),
        (scales_by_the_square, "norm is 0.07"),
        (returns_the_new_norm, "before the clipping"),
        (rank_0_alone, "in 2 ranks: rank 0"),
    ],
    "shard_it": [
        (root_alone, "gathered at once"),
        (threes, "gathered at once"),
        (blocks_alone, "embed.weight is not sharded"),
        (each_block, "13 all-gathers"),
        (each_linear, "all-gathers in a step"),
        (pairs_and_ends, "10 all-gathers in a step, at most 8: each module"),
        (root_first, "the inner modules first"),
        (nothing, "no parameter is sharded"),
        (in_bfloat16, "not those of one process"),
        (raises, "KeyError"),
    ],
}
