"""`split_group`: parts of a group, each a group of its own, as NCCL's split makes them.

Models: that all ranks of the parent take part, those of no part, too, and count the
group as PyTorch does.
"""

import copy
import inspect

import torch.distributed as dist

from simgpu import _runtime as state
from simgpu._compat import process_group_name
from simgpu._distributed import group_calls, groups
from simgpu._frames import called_from

# since 2.15 the parts of `split_group` keep their order, and outsiders are told so
_KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters
_TELLS_OUTSIDERS = "NonGroupMember" in str(
    inspect.signature(dist.split_group).return_annotation
)


def split_group(parent_pg=None, split_ranks=None, timeout=None, pg_options=None,
                group_desc=None, **kwargs):  # fmt: skip
    """`split_group`: this rank's part of a group, as a group of its own.

    Returns:
        The group; on ranks of no part, what this PyTorch gives them.

    Raises:
        ValueError: for parts that are none, in PyTorch's words.
        torch.distributed.DistBackendError: if a member of the parent never calls it, or
            calls it with other parts.
    """
    __tracebackhide__ = True
    parent = parent_pg or dist.group.WORLD
    communicator = groups.communicator_of(parent)
    if communicator is None or communicator.bound is None:
        raise RuntimeError(
            "No device associated with the default pg, not safe to split any process "
            "groups"
        )
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    backend = kwargs.get("backend")
    if backend is not None:
        _check_part_of(str(backend), groups.backends_of(parent))
    parts = [list(part) if _KEEPS_ORDER else sorted(part) for part in split_ranks]
    _check_parts(parts)
    mine = next((part for part in parts if communicator.member in part), None)
    if group_desc is None:
        group_desc = f"{parent.group_desc}:split:{communicator.splits}"
    communicator.splits += 1  # what new_group() calls it is not the same on all ranks
    name = f"{communicator.name}/split {communicator.splits}"
    runtime = state.current()
    if runtime.peers is None:
        group_calls.compare_split(communicator, name, mine, called_from())
    if mine is None:  # PyTorch counts groups on all ranks
        process_group_name(parts[0], True)
        return dist.GroupMember.NON_GROUP_MEMBER if _TELLS_OUTSIDERS else None
    runtime.thread.name_of_group = f"{name}/{mine}"
    try:
        return dist.new_group(
            [communicator.ranks[member] for member in mine], timeout, backend,
            use_local_synchronization=True, group_desc=group_desc,
            device_id=communicator.bound, pg_options=copy.deepcopy(pg_options),
            **({"sort_ranks": False} if _KEEPS_ORDER else {}),
        )  # fmt: skip
    finally:
        runtime.thread.name_of_group = None


def _check_parts(parts: list[list[int]]) -> None:
    """Raise unless each part is one, and no rank is in two."""
    for part in parts:
        if not part:
            raise ValueError("the split group cannot be empty")
        if len(part) > dist.get_world_size():
            raise ValueError(
                "the split group's size should be less or equal to the world_size set "
                "by init_process_group"
            )
        if len(part) != len(set(part)):
            raise ValueError("the split group cannot have duplicate ranks")
    members = [rank for part in parts for rank in part]
    if len(members) != len(set(members)):
        raise ValueError("the split groups must not share a rank")


def _check_part_of(backend: str, of_parent: dict[str, str]) -> None:
    """Raise unless a group has all the backends that its part asks for."""
    for device, name in groups.backends_named(backend).items():
        if device not in of_parent:
            raise ValueError(
                f"Requested backend for device '{device}' is not present in the parent "
                f"process group (parent backends: {of_parent})"
            )
        if name != of_parent[device]:
            raise ValueError(
                f"Backend mismatch for device '{device}': parent has "
                f"'{of_parent[device]}', requested '{name}'. Backend names must match "
                "exactly when filtering split_group backends."
            )


def split_of(group: dist.ProcessGroup, ranks: list[int], timeout=None, opts=None,
             group_name=None, group_desc=None, device_types=None):  # fmt: skip
    """`ProcessGroup.split_group`: one part of it; None on all other ranks."""
    if groups.communicator_of(group) is None:
        raise RuntimeError("No backend of this process group supports splitting")
    return split_group(group, [list(ranks)], timeout, opts, group_desc)
