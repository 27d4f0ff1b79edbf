"""The operations of c10d and what they exchange.

`exchanges` reads the arguments of an operation as a dispatch mode sees them. One
operation may stand for several collectives ("coalesced").
"""

import torch

from simgpu import _runtime as state
from simgpu._distributed import exchange as ex
from simgpu._distributed.exchange import Exchange
from simgpu._errors import NotSimulated


def exchanges(call, size: int, rank: int, factor=None) -> list[Exchange]:
    """What an operation of `c10d` exchanges.

    Args:
        call: the operation with its arguments.
        size: of its group.
        rank: of this process in the group.
        factor: of PREMUL_SUM.

    Raises:
        NotSimulated: for an operation that is not known.
    """
    name = call.func._schema.name.partition("::")[2]
    if name not in _READERS:
        raise NotSimulated(f"c10d::{name}")
    return _READERS[name](_Arguments(call, size, rank, factor))


class _Arguments:
    """The arguments of an operation, by name."""

    def __init__(self, call, size: int, rank: int, factor):
        names = [argument.name for argument in call.func._schema.arguments]
        self._values = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
        self.group = (size, rank)
        self.factor = factor

    def __getitem__(self, name: str):
        return self._values[name]

    def reduction(self, tensor) -> ex.Reduction:
        return ex.reduction_of(self["reduce_op"], tensor.dtype, self.factor)

    @property
    def size(self) -> int:
        return self.group[0]


def _all_reduce(a: _Arguments) -> list[Exchange]:
    tensors = a["tensors"]
    return [ex.all_reduce(*a.group, tensors, a.reduction(tensors[0]))]


def _reduce(a: _Arguments) -> list[Exchange]:
    tensors, root = a["tensors"], a["root_rank"]
    return [ex.reduce_to(*a.group, tensors, root, a.reduction(tensors[0]))]


def _broadcast(a: _Arguments) -> list[Exchange]:
    return [ex.broadcast(*a.group, a["tensors"], a["root_rank"])]


def _all_gather(a: _Arguments) -> list[Exchange]:
    pairs = zip(a["output_tensors"], a["input_tensors"], strict=True)
    return [
        ex.all_gather(*a.group, [[t] for t in out], [given]) for out, given in pairs
    ]


def _all_gather_base(a: _Arguments) -> list[Exchange]:
    return [all_gather_into(*a.group, a["output_tensor"], a["input_tensor"])]


def _all_gather_into_coalesced(a: _Arguments) -> list[Exchange]:
    pairs = zip(a["outputs"], a["inputs"], strict=True)
    return [all_gather_into(*a.group, out, given) for out, given in pairs]


def all_gather_into(size: int, rank: int, output, given) -> Exchange:
    """One tensor takes what all ranks give, in their order."""
    if output.dtype != given.dtype:
        raise TypeError("output tensor must have the same type as input tensor")
    if output.numel() != size * given.numel():
        raise ValueError(
            "output tensor size must be equal to world_size times input tensor size"
        )
    if state.current().peers is not None:  # the ranks are not looked at one by one
        return ex.all_gather(1, 0, [[output]], [given])
    outputs = ex.flat(output).chunk(size) if output.numel() else [output] * size
    return ex.all_gather(size, rank, [[part] for part in outputs], [given])


def _reduce_scatter(a: _Arguments) -> list[Exchange]:
    pairs = zip(a["output_tensors"], a["input_tensors"], strict=True)
    return [
        ex.reduce_scatter(*a.group, out, given, a.reduction(out))
        for out, given in pairs
    ]


def _reduce_scatter_base(a: _Arguments) -> list[Exchange]:
    out, given = a["output_tensor"], a["input_tensor"]
    return [reduce_scatter_from(*a.group, out, given, a.reduction(out))]


def _reduce_scatter_coalesced(a: _Arguments) -> list[Exchange]:
    pairs = zip(a["outputs"], a["inputs"], strict=True)
    return [
        reduce_scatter_from(*a.group, out, given, a.reduction(out))
        for out, given in pairs
    ]


def reduce_scatter_from(size: int, rank: int, output, given, reduction) -> Exchange:
    """The parts of one tensor are for the ranks, in their order."""
    if given.dtype != output.dtype:
        raise TypeError("input tensor must be the same type as the output tensor.")
    if given.numel() != size * output.numel():
        raise ValueError(
            "input tensor must be the same size as output size times world size"
        )
    if state.current().peers is not None:
        return ex.reduce_scatter(1, 0, output, [given], reduction)
    parts = ex.flat(given).chunk(size) if given.numel() else [given] * size
    return ex.reduce_scatter(size, rank, output, parts, reduction)


def _all_to_all(a: _Arguments) -> list[Exchange]:
    return [ex.all_to_all(*a.group, a["output_tensors"], a["input_tensors"])]


def _all_to_all_base(a: _Arguments) -> list[Exchange]:
    out = _split(a["output"], a["output_split_sizes"], a.size)
    given = _split(a["input"], a["input_split_sizes"], a.size)
    return [ex.all_to_all(*a.group, out, given)]


def all_to_all_single(size, rank, output, given, out_splits, in_splits) -> Exchange:
    """Rows of one tensor are for the ranks, in their order."""
    pieces = _split(output, out_splits, size), _split(given, in_splits, size)
    return ex.all_to_all(size, rank, *pieces)


def _split(tensor, rows: list[int], size: int) -> list[torch.Tensor]:
    """The part of a tensor for each rank, flat: so many rows, or the same for all."""
    whole = ex.flat(tensor)
    if not rows:
        if tensor.shape and tensor.shape[0] % size:
            raise RuntimeError(
                "Tensor's dim 0 does not divide equally across group size"
            )
        each = whole.numel() // size
        return list(whole.split(each)) if each else [whole] * size
    if len(rows) != size:
        raise RuntimeError("Number of tensor splits not equal to group size")
    if sum(rows) != tensor.shape[0]:
        raise RuntimeError("Split sizes doesn't match total dim 0 size")
    row = whole.numel() // tensor.shape[0] if tensor.shape[0] else 0
    return list(whole.split([count * row for count in rows]))


def _gather(a: _Arguments) -> list[Exchange]:
    outputs, given = a["output_tensors"], a["input_tensors"]
    outputs = outputs[0] if outputs else []
    if a.group[1] == a["root_rank"]:
        _check_list("gather", "output", outputs, given[0], a.size)
    elif outputs:
        raise ValueError("ProcessGroupNCCL::gather: requires empty output on non-root")
    return [ex.gather(*a.group, outputs, given[0], a["root_rank"])]


def _scatter(a: _Arguments) -> list[Exchange]:
    out = a["output_tensors"][0]
    given = a["input_tensors"][0] if a["input_tensors"] else []
    if a.group[1] == a["root_rank"]:
        _check_list("scatter", "input", given, out, a.size)
    elif given:
        raise ValueError("ProcessGroupNCCL::scatter: requires empty input on non-root")
    return [ex.scatter(*a.group, out, given, a["root_rank"])]


def _check_list(what: str, which: str, tensors: list, like, size: int) -> None:
    """The root's list must have a tensor for each rank, all alike.

    Raises:
        ValueError: in the words of PyTorch.
    """
    begin = f"ProcessGroupNCCL::{what}: "
    if len(tensors) != size:
        raise ValueError(
            f"{begin}Incorrect {which} list size {len(tensors)}. "
            f"{which.capitalize()} list size should be {size}, same as size of the "
            "process group."
        )
    for i, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype:
            raise ValueError(
                f"{begin}invalid tensor type at index {i} "
                f"(expected {like.dtype}, got {tensor.dtype})"
            )
        if tensor.shape != like.shape:
            raise ValueError(
                f"{begin}invalid tensor size at index {i} "
                f"(expected {_sizes(like)}, got {_sizes(tensor)})"
            )


def _sizes(tensor) -> str:
    """As gloo and PyTorch's checks print them: (2, 3)."""
    return f"({', '.join(map(str, tensor.shape))})"


def _barrier(a: _Arguments) -> list[Exchange]:
    return [ex.barrier(a.size)]


_READERS = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce,
    "reduce_": _reduce,
    "broadcast_": _broadcast,
    "allgather_": _all_gather,
    "_allgather_base_": _all_gather_base,
    "allgather_into_tensor_coalesced_": _all_gather_into_coalesced,
    "reduce_scatter_": _reduce_scatter,
    "_reduce_scatter_base_": _reduce_scatter_base,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_coalesced,
    "alltoall_": _all_to_all,
    "alltoall_base_": _all_to_all_base,
    "gather_": _gather,
    "scatter_": _scatter,
    "barrier": _barrier,
}
