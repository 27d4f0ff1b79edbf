"""What NCCL refuses, in its own words."""

import torch
import torch.distributed as dist

from simgpu.dispatch.placement import gpu_of
from simgpu.distributed.groups import backends_of

_HOST_TENSOR = "No backend type associated with device type cpu"
_SPARSE = (
    "NCCL does not support all_reduce with sparse tensors. Please use dense tensors "
    "instead."
)
_NOT_BOUND = (
    "Attempt to perform collective on tensor not on device passed to init_process_group"
)


def check(group: dist.ProcessGroup, communicator, tensors: list) -> None:
    """Refuse what NCCL would refuse.

    Args:
        group: of the ranks that take part.
        communicator: of the group over NCCL; None if it has no NCCL.
        tensors: of this rank.
    """
    __tracebackhide__ = True
    gpus = list(dict.fromkeys(map(gpu_of, tensors)))
    if None in gpus and len(gpus) == 1 and "cpu" not in backends_of(group):
        raise RuntimeError(_HOST_TENSOR)
    if communicator is None or gpus in ([None], []):
        return
    if len(gpus) > 1:
        if None in gpus:
            raise RuntimeError(_HOST_TENSOR)
        raise ValueError("Tensors found on multiple devices")
    if any(tensor.layout is not torch.strided for tensor in tensors):
        raise RuntimeError(_SPARSE)
    if not all(map(_is_dense, tensors)):
        raise ValueError("Tensors must be contiguous")
    bound = communicator.bound
    if bound is not None and bound != gpus[0].device:
        raise dist.DistBackendError(_NOT_BOUND)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side in memory, in whatever order."""
    expected = 1
    ways = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(way for way in ways if way[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True
