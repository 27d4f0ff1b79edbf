"""What NCCL refuses, in its own words."""

import os
import socket

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

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
_DUPLICATE = (
    "NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\nDuplicate GPU detected : rank {} and rank {} both on CUDA device {}"
)
_MOVED = (
    "rank {} has used this process group on cuda:{} and comes with a tensor on cuda:{} "
    "now. NCCL would wait for a second connection, which the other ranks may never "
    "make. Is torch.cuda.set_device(rank) missing?"
)
_ALONE = (
    "rank {} has waited for rank {} in the first collective of a process group; that "
    "rank has not called it"
)


def check(runtime, name: str, group: dist.ProcessGroup, tensors: list) -> None:
    """Refuse what NCCL would refuse.

    Args:
        runtime: of this rank.
        name: of the operation: "c10d::send".
        group: of the ranks that take part.
        tensors: of this rank.
    """
    __tracebackhide__ = True
    backends = backends_of(group)
    gpus = list(dict.fromkeys(map(gpu_of, tensors)))
    if None in gpus and "cpu" not in backends:
        raise RuntimeError(_HOST_TENSOR)
    if backends.get("cuda") != "nccl" or gpus in ([None], []):
        return
    if len(gpus) > 1:
        raise ValueError("Tensors found on multiple devices")
    if any(tensor.layout is not torch.strided for tensor in tensors):
        raise RuntimeError(_SPARSE)
    if not all(map(_is_dense, tensors)):
        raise ValueError("Tensors must be contiguous")
    (gpu,) = gpus
    communicator = runtime.communicators[group.group_name]
    if communicator.bound is not None and communicator.bound != gpu.device:
        raise dist.DistBackendError(_NOT_BOUND)
    if name in ("c10d::send", "c10d::recv_"):
        return
    if communicator.ordinal is None:
        _check_duplicates(group, gpu)
        communicator.ordinal = gpu.ordinal
    elif communicator.ordinal != gpu.ordinal:
        raise dist.DistBackendError(
            _MOVED.format(group.rank(), communicator.ordinal, gpu.ordinal)
        )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side in memory, in whatever order."""
    expected = 1
    ways = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(way for way in ways if way[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _check_duplicates(group: dist.ProcessGroup, gpu) -> None:
    """In a group's first collective, no two ranks may be on one GPU.

    Raises:
        torch.distributed.DistBackendError: in NCCL's words.
    """
    __tracebackhide__ = True
    store = distributed_c10d._world.pg_map[group][1]
    machine = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', 0)}"
    me = group.rank()
    store.set(f"simgpu/{me}", f"{machine} {gpu.ordinal}")
    seen: dict[bytes, int] = {}
    for rank in range(group.size()):
        try:
            its = store.get(f"simgpu/{rank}")  # waits for it, as NCCL does here
        except dist.DistStoreError:
            raise dist.DistBackendError(_ALONE.format(me, rank)) from None
        first = seen.setdefault(its, rank)
        if first != rank and me in (first, rank):
            both = _DUPLICATE.format(me, first + rank - me, gpu.ordinal)
            raise dist.DistBackendError(both)
