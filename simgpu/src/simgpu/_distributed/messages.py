"""What a rank gives to a collective: its kind, its bytes, the size of its group.

Models: the operations of `c10d`, `_c10d_functional` and `_dtensor` as a dispatch mode
sees them.
Leaves out: barriers, and what a rank receives.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from simgpu._compat import process_group_named, tree_leaves

# operation of c10d -> the collective, and which argument holds what the rank gives
_OPERATIONS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "send": ("send", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
}
# the same of _c10d_functional, which DTensor uses: the name begins with one of these
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "isend": "send",
    "shard_dim_alltoall": "all_to_all",  # of _dtensor
}


class Message(NamedTuple):
    """One call of a collective by this rank."""

    when: str  # what `Messages.when` said then
    name: str  # "all_reduce", "all_gather", "send", ...
    nbytes: int  # what the rank gives; in an all-gather, its own part
    ranks: int  # how many ranks take part (2 for a send)
    dtype: str = ""  # of the first tensor: "float32"

    @property
    def sent(self) -> int:
        """Bytes that a rank sends where the ranks form a ring."""
        n, size = self.ranks, self.nbytes
        return {
            "all_reduce": 2 * (n - 1) * size // n,
            "reduce_scatter": (n - 1) * size // n,
            "all_to_all": (n - 1) * size // n,
            "all_gather": (n - 1) * size,
        }.get(self.name, size)


def message_of(op, args, kwargs=None) -> Message | None:
    """What a rank hands over in a call of `c10d` or `_c10d_functional`.

    Args:
        op: the operation, as a dispatch mode sees it.
        args: its arguments.
        kwargs: the same, by their names.

    Returns:
        None for any other operation, and where nothing is handed over.
    """
    if op.namespace == "c10d":
        name, place = _OPERATIONS.get(_name_of(op), ("", 0))
        if name:
            size = 2 if name == "send" else group_in(args).size()
            return _message(name, args[place], size)
    elif op.namespace in ("_c10d_functional", "_dtensor"):
        for prefix, name in _FUNCTIONAL.items():
            if _name_of(op).startswith(prefix):
                return _message(name, args[0], _size_of_named(name, args, kwargs))
    return None


def given_by(operation: str, args) -> list[torch.Tensor]:
    """The tensors that a rank hands over in an operation of c10d."""
    _, place = _OPERATIONS.get(operation, ("", 0))
    return [x for x in tree_leaves(args[place]) if isinstance(x, torch.Tensor)]


def _message(name: str, given, ranks: int) -> Message:
    tensors = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor)]
    nbytes = sum(map(_bytes_in, tensors))
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    return Message("", name, nbytes, ranks, dtype)


def _bytes_in(tensor: torch.Tensor) -> int:
    if tensor.is_sparse:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def _name_of(op) -> str:
    return op._schema.name.partition("::")[2]


def group_in(args) -> dist.ProcessGroup:
    """The process group among the arguments of an operation of c10d.

    Raises:
        RuntimeError: if there is none.
    """
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except RuntimeError:  # another object of TorchScript
                continue
    raise RuntimeError("a collective without a process group")


def _size_of_named(name: str, args, kwargs) -> int:
    """How many ranks a functional collective joins; its group is a name."""
    if name == "send":
        return 2
    values = (*args, *(kwargs or {}).values())
    group = [v for v in values if isinstance(v, (str, dist.ProcessGroup))][-1]
    if isinstance(group, dist.ProcessGroup):
        return group.size()
    return process_group_named(group).size()
