"""What a collective is for, as the timeline names it: DDP's buckets, FSDP's modules."""

import sys

# imported by programs that use it; it takes longer to load than the whole simulator
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def sharded_module() -> str:
    """The module whose parameters FSDP2 gathers or reduces now; "" if it does not."""
    fsdp = sys.modules.get(_FSDP)
    frame = None if fsdp is None else sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == fsdp.__file__:
            group = frame.f_locals.get("self")
            if isinstance(group, fsdp.FSDPParamGroup):
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
