"""What NCCL can do with a group in newer PyTorch, and the simulator refuses by name."""

import functools
from collections.abc import Callable

import torch.distributed as dist

from simgpu._distributed.groups import communicator_of
from simgpu._errors import NotSimulated


def methods() -> dict[str, object]:
    """What stands for methods of `ProcessGroup`, where this PyTorch has them."""
    known = dist.ProcessGroup
    found: dict[str, object] = {}
    for name in ("new_window", "get_reconfigure_handle", "reconfigure"):
        if hasattr(known, name):
            found[name] = _refused(name, getattr(known, name))
    for name in ("supports_window", "supports_reconfigure"):
        if hasattr(known, name):
            found[name] = property(_unsupported(getattr(known, name)))
    return found


def _refused(name: str, raw: Callable) -> Callable:
    """A method that is refused where the group has NCCL."""

    @functools.wraps(raw)
    def refused(group: dist.ProcessGroup, *args, **kwargs):
        if communicator_of(group) is None:
            return raw(group, *args, **kwargs)
        raise NotSimulated(f"ProcessGroupNCCL.{name}")

    return refused


def _unsupported(raw: property) -> Callable:
    """Whether a group can do it: with NCCL, not here."""

    def supports(group: dist.ProcessGroup) -> bool:
        return communicator_of(group) is None and raw.fget(group)

    return supports
