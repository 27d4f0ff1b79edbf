"""What a collective is for, as the timeline names it: DDP's buckets, FSDP's modules."""

import sys

from torch.distributed.fsdp._fully_shard import _fsdp_param_group

_FSDP = _fsdp_param_group.__file__
_GROUP = _fsdp_param_group.FSDPParamGroup


def sharded_module() -> str:
    """The module whose parameters FSDP2 gathers or reduces now; "" if it does not."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _FSDP:
            group = frame.f_locals.get("self")
            if isinstance(group, _GROUP):
                return group._module_fqn or "the rest"  # of the root's parameters
        frame = frame.f_back
    return ""


class Buckets:
    """Counts the buckets that DDP's reducer reduces in one backward pass."""

    def __init__(self):
        self._pass, self._count = None, 0

    def next(self, backward: int) -> str:
        """The name of the next bucket.

        Args:
            backward: the number of the pass in autograd's engine.
        """
        if backward != self._pass:
            self._pass, self._count = backward, 0
        self._count += 1
        return f"bucket {self._count}"
