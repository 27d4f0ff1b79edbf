"""What a rank gives in a collective, what it takes, and how values become one.

Every collective is described in the same way: flat pieces of memory that this rank
gives, which part of them goes to which rank, and where what comes from each is put.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from simgpu._compat import (
    DisableTorchDispatch,
    DisableTorchFunction,
    StorageBase,
)
from simgpu._dispatch.own_work import unseen
from simgpu._dispatch.placement import over

_REFUSED = {
    "BAND": "Cannot use ReduceOp.BAND with NCCL",
    "BOR": "Cannot use ReduceOp.BOR with NCCL",
    "BXOR": "Cannot use ReduceOp.BXOR with NCCL",
}
_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
_NO_FLOAT8 = {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2}
_PREMULTIPLIED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class Reduction(NamedTuple):
    """How the values of several ranks become one."""

    name: str  # of the `ReduceOp`: "SUM"
    factor: float | torch.Tensor | None = None  # by which each multiplies its own first

    def premultiplied(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """What a rank gives, flat."""
        pieces = [rows(tensor).contiguous().view(-1) for tensor in tensors]
        if self.factor is None:
            return pieces
        return [(piece * self.factor).to(piece.dtype) for piece in pieces]


class Exchange(NamedTuple):
    """One rank's part in a collective. Ranks are counted within the group."""

    name: str  # "all_reduce"
    gives: list[torch.Tensor]  # flat, on this rank
    parts: list[tuple[int, int]]  # for each rank: from which element to which
    takes: list[list[torch.Tensor]]  # for each rank: where what it gives is put, flat
    root: int = -1
    reduction: Reduction | None = None

    @property
    def dtype(self) -> torch.dtype:
        tensors = [*self.gives, *(t for pieces in self.takes for t in pieces)]
        return tensors[0].dtype if tensors else torch.uint8

    @property
    def counts(self) -> list[int]:
        """How many elements come from each rank."""
        return [sum(t.numel() for t in pieces) for pieces in self.takes]

    @property
    def nbytes(self) -> int:
        """The larger of what it gives and what it takes, counted as nccl-tests do."""
        given = sum(t.nbytes for t in self.gives)
        if self.reduction is not None and self.name != "reduce_scatter":
            return given
        taken = sum(t.nbytes for pieces in self.takes for t in pieces)
        return given if self.name == "reduce_scatter" else max(given, taken)


class Destination:
    """Where a value is put, which keeps no memory: whoever frees it, reads it no more.

    Args:
        tensor: flat, or with gaps.
        storages: those that are known already, by their number in C++.
    """

    __slots__ = ("storage", "dtype", "place", "numel")

    def __init__(self, tensor: torch.Tensor, storages: dict[int, StorageWeakRef]):
        whole = tensor.untyped_storage()
        self.storage = storages.get(whole._cdata)
        if self.storage is None:
            self.storage = storages[whole._cdata] = StorageWeakRef(whole)
        self.dtype, self.numel = tensor.dtype, tensor.numel()
        self.place = (tensor.storage_offset(), tensor.shape, tensor.stride())

    def tensor(self) -> torch.Tensor | None:
        """The tensor that was given; None if its memory is gone."""
        whole = StorageBase._new_with_weak_ptr(self.storage.cdata)
        if whole is None:
            return None
        return over(whole, self.dtype, *self.place)


def destinations(takes: list[list[torch.Tensor]]) -> list[list[Destination]]:
    """What a rank takes from each, without keeping it."""
    storages: dict[int, StorageWeakRef] = {}
    return [[Destination(tensor, storages) for tensor in its] for its in takes]


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Inside, tensors are what C++ knows of them, and nothing is simulated."""
    with (
        DisableTorchFunction(), DisableTorchDispatch(),
        torch.no_grad(), unseen(),
    ):  # fmt: skip
        yield


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor as they lie in memory; no operation of its own."""
    plain = tensor.data
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return torch.as_strided(plain, (plain.numel(),), (1,), plain.storage_offset())


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same of one that NCCL reaches by way of a copy: it may have gaps."""
    if tensor.is_complex() or tensor.is_contiguous():
        return flat(tensor)
    return tensor.data


def reduction_named(name: str, dtype: torch.dtype, factor=None) -> Reduction:
    """A `ReduceOp` as NCCL takes it.

    Raises:
        ValueError: for one that NCCL does not have, in its words.
        TypeError: for one that it does not have for these numbers.
        RuntimeError: for numbers that it cannot add.
    """
    if name in _REFUSED:
        raise ValueError(_REFUSED[name])
    if dtype is torch.bool:
        if name == "AVG":
            raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
        name = {"SUM": "MAX", "PRODUCT": "MIN"}.get(name, name)
    if name == "PREMUL_SUM" and dtype not in _PREMULTIPLIED:
        raise TypeError("PreMulSum Data type must be half, float, bfloat16 or double")
    if dtype in _NO_FLOAT8:
        raise RuntimeError("Unsupported Float8 type for NCCL reduction")
    return Reduction(name, factor)


def reduction_of(op, dtype: torch.dtype, factor=None) -> Reduction:
    """The same for the `ReduceOp` among the arguments of an operation of c10d."""
    name = _NAMES[op.op()] if factor is None else "PREMUL_SUM"
    return reduction_named(name, dtype, factor)


def reduce(values: list[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    """One value out of those of all ranks, in the order of the ranks.

    Args:
        values: flat tensors of one length; the first is changed.
        reduction: how.
    """
    if values[0].dtype in _FLOAT8:  # a CPU does not add them
        values = [value.float() for value in values]
    name, total = reduction.name, values[0]
    combine = {
        "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
    }.get(name, torch.add)  # fmt: skip
    if name == "AVG" and total.is_floating_point():  # NCCL multiplies before it adds
        share = torch.tensor(1 / len(values), dtype=total.dtype)
        values = [total.mul_(share), *(value * share for value in values[1:])]
    for value in values[1:]:
        combine(total, value, out=total)
    if name == "AVG" and not total.is_floating_point():
        total.div_(len(values), rounding_mode="trunc")
    return total


# -- the collectives -------------------------------------------------------------------


def _whole(tensors: list[torch.Tensor]) -> tuple[int, int]:
    return (0, sum(tensor.numel() for tensor in tensors))


def _cuts(pieces: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Where each piece begins and ends when they lie one after the other."""
    ends, end = [], 0
    for piece in pieces:
        ends.append((end, end + piece.numel()))
        end += piece.numel()
    return ends


def all_reduce(size, rank, tensors, reduction: Reduction) -> Exchange:
    """The value of all ranks is reduced, and every rank has it."""
    pieces = [flat(tensor) for tensor in tensors]
    given = reduction.premultiplied(tensors)
    return Exchange("all_reduce", given, [_whole(pieces)] * size, [pieces] * size,
                    reduction=reduction)  # fmt: skip


def reduce_to(size, rank, tensors, root: int, reduction: Reduction) -> Exchange:
    """The same, and the root has it."""
    pieces = [flat(tensor) for tensor in tensors]
    parts = [_whole(pieces) if r == root else (0, 0) for r in range(size)]
    takes = [pieces if rank == root else []] * size
    return Exchange(
        "reduce", reduction.premultiplied(tensors), parts, takes, root, reduction
    )


def broadcast(size, rank, tensors, root: int) -> Exchange:
    """What the root has, all have."""
    pieces = [flat(tensor) for tensor in tensors]
    if rank == root:
        parts = [(0, 0) if r == root else _whole(pieces) for r in range(size)]
        return Exchange("broadcast", pieces, parts, [[]] * size, root)
    takes = [pieces if r == root else [] for r in range(size)]
    return Exchange("broadcast", [], [(0, 0)] * size, takes, root)


def all_gather(size, rank, outputs: list[list[torch.Tensor]], inputs) -> Exchange:
    """Every rank has what each of them gives.

    Args:
        size: of the group.
        rank: of this process in it.
        outputs: for each rank, where what it gives is put.
        inputs: what this one gives.
    """
    pieces = [flat(tensor) for tensor in inputs]
    takes = [[rows(tensor) for tensor in its] for its in outputs]
    return Exchange("all_gather", pieces, [_whole(pieces)] * size, takes)


def reduce_scatter(size, rank, output, inputs: list, reduction: Reduction) -> Exchange:
    """The value of all ranks is reduced; each has its part of it."""
    pieces = reduction.premultiplied(inputs)
    return Exchange("reduce_scatter", pieces, _cuts(pieces), [[flat(output)]] * size,
                    reduction=reduction)  # fmt: skip


def all_to_all(size, rank, outputs: list, inputs: list) -> Exchange:
    """Each rank gives each a piece."""
    pieces = [flat(tensor) for tensor in inputs]
    takes = [[flat(tensor)] for tensor in outputs]
    return Exchange("all_to_all", pieces, _cuts(pieces), takes)


def gather(size, rank, outputs: list, given, root: int) -> Exchange:
    """The root has what each of them gives."""
    pieces = [flat(given)]
    parts = [_whole(pieces) if r == root else (0, 0) for r in range(size)]
    takes = [[flat(t)] for t in outputs] if rank == root else [[]] * size
    return Exchange("gather", pieces, parts, takes, root)


def scatter(size, rank, output, inputs: list, root: int) -> Exchange:
    """The root gives each a piece."""
    takes = [[flat(output)] if r == root else [] for r in range(size)]
    if rank != root:
        return Exchange("scatter", [], [(0, 0)] * size, takes, root)
    pieces = [flat(tensor) for tensor in inputs]
    return Exchange("scatter", pieces, _cuts(pieces), takes, root)


def send(tensor) -> Exchange:
    """A message from rank 0 of a pair to rank 1, as the sender sees it."""
    pieces = [flat(tensor)]
    return Exchange("send", pieces, [(0, 0), _whole(pieces)], [[], []])


def receive(tensor) -> Exchange:
    """The same, as the receiver sees it."""
    return Exchange("send", [], [(0, 0)] * 2, [[flat(tensor)], []])


def barrier(size) -> Exchange:
    """Nothing is given, but all must come."""
    return Exchange("barrier", [], [(0, 0)] * size, [[]] * size)
