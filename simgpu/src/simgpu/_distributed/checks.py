"""What NCCL refuses, in its own words."""

import warnings

import torch
import torch.distributed as dist

from simgpu._compat import tree_leaves
from simgpu._dispatch.placement import gpu_of, is_dense
from simgpu._distributed.groups import backends_of

_HOST_TENSOR = "No backend type associated with device type cpu"
_SPARSE = (
    "NCCL does not support all_reduce with sparse tensors. Please use dense tensors "
    "instead."
)
_NOT_BOUND = (
    "Attempt to perform collective on tensor not on device passed to init_process_group"
)
_P2P = (
    "Detected non-contiguous tensor in P2P operations. It is user responsibility to "
    "guarantee that source and destination tensors have the same contiguity format."
)
_FP8 = (
    "NCCL error: invalid argument (run with NCCL_DEBUG=WARN for details)\n"
    "ncclInvalidArgument: Invalid value for an argument.\n"
    "Last error:\nFP8 reduction support begins with sm90 capable devices."
)
_ABSENT = {  # what PyTorch has for other backends
    "allgather_coalesced_": "ProcessGroupNCCL does not support allgather_coalesced",
    "recv_any_source_": "ProcessGroupNCCL does not support recvAnysource",
    "monitored_barrier_": "ProcessGroupNCCL does not support monitoredBarrier, only "
    "GLOO supports monitored barrier.",
}
_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2}
_DTYPES = {
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, *_FLOAT8,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
}  # fmt: skip
# how C++ calls the others
_NAMES = {
    torch.int16: "Short", torch.uint16: "UInt16", torch.uint32: "UInt32",
    torch.uint64: "UInt64", torch.complex32: "ComplexHalf",
    torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
}  # fmt: skip
_COMPLEX = {"allreduce_", "reduce_", "broadcast_"}  # they see two real numbers
# made of sends, with a table of types of its own
_SENDS = {"alltoall_", "alltoall_base_", "gather_", "scatter_"}
# arguments whose tensors must be contiguous, where it is not all
_CONTIGUOUS = {
    "allgather_": (1,), "reduce_scatter_": (0,), "gather_": (1,), "scatter_": (),
    "send": (), "recv_": (), "allreduce_coalesced_": (),
}  # fmt: skip
_MESSAGES = {"send", "recv_"}


def check(name: str, args, group: dist.ProcessGroup, communicator, tensors) -> None:
    """Refuse what NCCL would refuse.

    Args:
        name: of the operation of c10d.
        args: its arguments.
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
    if name in _ABSENT:
        raise NotImplementedError(_ABSENT[name])
    if len(gpus) > 1:
        if None in gpus:
            raise RuntimeError(_HOST_TENSOR)
        raise ValueError("Tensors found on multiple devices")
    if any(tensor.layout is not torch.strided for tensor in tensors):
        raise RuntimeError(_SPARSE)
    check_dtype(name, tensors, gpus[0])
    _check_contiguous(name, args, tensors)
    bound = communicator.bound
    if bound is not None and bound != gpus[0].device:
        raise dist.DistBackendError(_NOT_BOUND)


def check_dtype(name: str, tensors: list[torch.Tensor], gpu) -> None:
    """Refuse numbers that NCCL does not have, or not on this card."""
    __tracebackhide__ = True
    for dtype in {tensor.dtype for tensor in tensors}:
        if dtype in _FLOAT8 and gpu.card.capability < (9, 0):
            if "reduce" in name:
                raise dist.DistBackendError(_FP8)
        if dtype in _DTYPES or (dtype.is_complex and name in _COMPLEX):
            continue
        its = _NAMES.get(dtype, str(dtype).removeprefix("torch.").capitalize())
        if name in _SENDS:
            raise RuntimeError(f"Unconvertible NCCL type {its}")
        raise TypeError(
            f"Input tensor data type is not supported for NCCL process group: {its}"
        )


def _check_contiguous(name: str, args, tensors: list[torch.Tensor]) -> None:
    __tracebackhide__ = True
    if name in _MESSAGES and not all(map(_is_contiguous, tensors)):
        warnings.warn(_P2P, stacklevel=2)
    if name == "allreduce_coalesced_" and not all(map(is_dense, tensors)):
        raise ValueError("Tensors must be non-overlapping and dense")
    if name in _CONTIGUOUS:
        places = [args[place] for place in _CONTIGUOUS[name]]
        tensors = [x for x in tree_leaves(places)
                   if isinstance(x, torch.Tensor)]  # fmt: skip
    if not all(map(_is_contiguous, tensors)):
        raise ValueError("Tensors must be contiguous")


def _is_contiguous(tensor: torch.Tensor) -> bool:
    """In rows, or with the channels last."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return tensor.is_contiguous() or (
        last is not None and tensor.is_contiguous(memory_format=last)
    )
