"""TORCH_DISTRIBUTED_DEBUG=DETAIL: all ranks compare a collective before it is launched.

Models: `ProcessGroupWrapper` of PyTorch, its error word for word. Leaves out: gloo,
over which PyTorch compares, and its errors for a rank that never comes; that PyTorch
misreads a rank whose tensors have another number of dimensions. As there, messages and
what is coalesced are not compared.
"""

import os
from typing import NamedTuple

import torch
import torch.distributed as dist

from simgpu._compat import tree_leaves
from simgpu._frames import called_from

# operation of c10d -> its name in C++'s `OpType`, and which arguments are compared
_COMPARED = {
    "allreduce_": ("ALLREDUCE", (0,)), "reduce_": ("REDUCE", (0,)),
    "broadcast_": ("BROADCAST", (0,)), "allgather_": ("ALLGATHER", (1,)),
    "_allgather_base_": ("_ALLGATHER_BASE", (1,)), "gather_": ("GATHER", (1,)),
    "reduce_scatter_": ("REDUCE_SCATTER", (0,)), "scatter_": ("SCATTER", (0,)),
    "_reduce_scatter_base_": ("_REDUCE_SCATTER_BASE", (1, 0)),
    "alltoall_": ("ALLTOALL", ()), "alltoall_base_": ("ALLTOALL_BASE", ()),
    "barrier": ("BARRIER", ()),
}  # fmt: skip
_DTYPES = {
    torch.uint8: "Byte", torch.int8: "Char", torch.int16: "Short", torch.int32: "Int",
    torch.int64: "Long", torch.float16: "Half", torch.float32: "Float",
    torch.float64: "Double", torch.bool: "Bool", torch.bfloat16: "BFloat16",
    torch.complex32: "ComplexHalf", torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}  # fmt: skip
_DEVICE = (
    "TensorOptions(dtype=float (default), device=cuda, layout=Strided (default), "
    "requires_grad=false (default), pinned_memory=false (default), "
    "memory_format=(nullopt))"
)


def wanted() -> bool:
    """Whether PyTorch would compare the collectives of a new group."""
    by_name = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "") == "DETAIL"
    return by_name or dist.get_debug_level() == dist.DebugLevel.DETAIL


class Fingerprint(NamedTuple):
    """What a rank says of a collective."""

    number: int  # of collectives of the group before
    kind: str  # "ALLREDUCE"
    shapes: list[tuple[int, ...]]
    dtypes: list[str]

    def __str__(self) -> str:
        begin = f"CollectiveFingerPrint(SequenceNumber={self.number}"
        if not self.shapes:
            return f"{begin}OpType={self.kind})"
        shape = ", ".join(map(str, self.shapes[0]))
        devices = " ".join([_DEVICE] * len(self.shapes))
        return (
            f"{begin}, OpType={self.kind}, TensorShape=[{shape}], "
            f"TensorDtypes={' '.join(self.dtypes)}, TensorDeviceTypes={devices})"
        )

    def against(self, other: "Fingerprint") -> str:
        """Where they differ: "Op type: ALLREDUCEvs BROADCAST"."""
        found = ""
        if self.kind != other.kind:
            found += f"  Op type: {self.kind}vs {other.kind}"
        if self.number != other.number:
            found += f"  Sequence number: {self.number}vs {other.number}"
        sizes = [[" ".join(map(str, s)) for s in one.shapes] for one in (self, other)]
        found += _differ("shapes", *sizes)
        found += _differ("dtypes", self.dtypes, other.dtypes)
        counts = [[_DEVICE] * len(one.shapes) for one in (self, other)]
        found += _differ("devices", *counts)
        return f"Collectives differ in the following aspects: {found}" if found else ""


def _differ(what: str, mine: list[str], its: list[str]) -> str:
    if len(mine) != len(its):
        return f"  Tensor Tensor {what}: {' '.join(mine)}vs {' '.join(its)}"
    pairs = [pair for pair in zip(mine, its, strict=True) if pair[0] != pair[1]]
    return f"  Tensor Tensor {what}: {pairs[0][0]}vs {pairs[0][1]}" if pairs else ""


class Fingerprints:
    """What the members of a group say of their collectives.

    Args:
        communicator: of this rank.
    """

    def __init__(self, communicator):
        self.communicator, self._asked = communicator, 0

    def compare(self, name: str, args: tuple) -> None:
        """Wait until all members call a collective, and compare.

        Args:
            name: of the operation of c10d.
            args: its arguments.

        Raises:
            RuntimeError: if another rank's differs, in PyTorch's words.
            torch.distributed.DistBackendError: if one never comes.
        """
        __tracebackhide__ = True
        if name not in _COMPARED:
            return
        kind, places = _COMPARED[name]
        tensors = tree_leaves([args[place] for place in places])
        dtypes = [_DTYPES.get(t.dtype, str(t.dtype)) for t in tensors]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        number = self.communicator.launched
        own = Fingerprint(number, kind, shapes, dtypes)
        for member, other in enumerate(self._all(own)):
            aspects = own.against(other)
            if aspects:
                raise RuntimeError(
                    "Detected mismatch between collectives on ranks. Rank "
                    f"{self.communicator.member} is running collective: {own}, but "
                    f"Rank {member} is running collective: {other}.{aspects}"
                )

    def _all(self, own: Fingerprint) -> list[Fingerprint]:
        """Those of all members, in their order."""
        __tracebackhide__ = True
        group = self.communicator
        board, begin = group.cluster.board, f"{group.name}/fingerprint"
        number, self._asked = self._asked, self._asked + 1
        board.post(f"{begin} {number}/{group.member}", tuple(own))
        doing = f"rank {group.cluster.rank}: {own.kind} ({called_from()})"
        keys = {f"{begin} {number}/{i}": rank for i, rank in enumerate(group.ranks)}
        found = board.read(keys, f"{doing} on {group.title}", group.limit)
        if number:  # all have come here, and so have read the one before
            board.forget(f"{begin} {number - 1}/{group.member}")
        return [Fingerprint(*its) for its in found]
