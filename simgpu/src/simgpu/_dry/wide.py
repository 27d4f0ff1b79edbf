"""Where PyTorch itself goes through all ranks, or all parameters for each parameter,
and where it keeps meshes for longer than a dry run.

A job of 16,384 ranks costs no more here than one of 8: a list with a part of a tensor
for each rank is one that makes the part when somebody asks for it.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from unittest import mock

import torch

from simgpu._compat import (
    StridedShard,
    forget_planners,
    forget_shardings,
    forget_transforms,
    fsdp_param,
    is_absent,
    raw_propagate_strided,
    sharding_prop,
)


class Chunks(Sequence):
    """The parts of a tensor for all ranks, as `torch.chunk` cuts it.

    Args:
        tensor: that is cut.
        count: of the parts; those that get nothing are empty.
        dim: along which.
    """

    def __init__(self, tensor: torch.Tensor, count: int, dim: int):
        self._tensor, self._count, self._dim = tensor, count, dim
        self._each = math.ceil(tensor.size(dim) / count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(self._count))]
        if not -self._count <= i < self._count:
            raise IndexError("list index out of range")
        first = i % self._count * self._each
        left = self._tensor.size(self._dim) - first
        if left <= 0 and first:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, first, min(left, self._each))


@contextlib.contextmanager
def narrowed() -> Iterator[None]:
    """PyTorch's loops over all ranks are not gone through."""
    with contextlib.ExitStack() as stack:
        for module, name, cheap in (
            (fsdp_param, "_chunk_with_empty", Chunks),
            (sharding_prop, "_propagate_use_strided_shard_flag", _propagate_strided),
        ):
            if not is_absent(module) and hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, cheap))
        yield


@contextlib.contextmanager
def meshes_apart() -> Iterator[None]:
    """A DTensor meets no mesh of another dry run.

    PyTorch keeps what it has found out about DTensors, with their meshes. Meshes of one
    shape are equal, also if the process groups of the older one are gone, or if it was
    another rank that was in it.
    """
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    for forget in (forget_shardings, forget_transforms, forget_planners):
        if not is_absent(forget):
            forget()


def _propagate_strided(strategy, schema) -> None:
    """Of an optimizer's step it is asked for each parameter, with all of them."""
    seen = vars(schema).get("_simgpu_strided")
    if seen is None or seen[0] is not schema.args_schema:
        any_is = any(
            isinstance(placement, StridedShard)
            for spec in schema.args_spec
            for placement in spec.placements
        )
        seen = vars(schema)["_simgpu_strided"] = schema.args_schema, any_is
    if seen[1]:
        raw_propagate_strided(strategy, schema)
