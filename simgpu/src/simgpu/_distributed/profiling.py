"""Collectives in PyTorch's profiler, under the names that NCCL's have there.

Models: that each is there once, with the shapes of what the rank gives; its kernel, by
the name that NCCL has compiled for it, with what PyTorch tells of it
(ParamCommsUtils.hpp). Leaves out: how long the host's part takes.
That event is as long as the launch; the kernel has the timeline's simulated times.
"""

import contextlib
import threading
import time

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.distributed import ProcessGroup

from simgpu._compat import (
    RecordFunctionFast,
    current_graph_task_id,
    profiler_enabled,
)
from simgpu._timing import collective_cost

_raw_new_event = FunctionEvent.__init__
_NCCL = "nccl:"
# operation of c10d, or a functional one -> its name there, where it is another
NAMES = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "allreduce_coalesced",
    "reduce_": "reduce", "broadcast_": "broadcast",
    "allgather_": "all_gather", "_allgather_base_": "_all_gather_base",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "alltoall_": "all_to_all", "alltoall_base_": "all_to_all",
    "gather_": "gather", "scatter_": "scatter", "barrier": "all_reduce_barrier",
    "all_reduce_": "all_reduce", "all_reduce_coalesced": "allreduce_coalesced",
    "all_gather_into_tensor": "_all_gather_base",
    "all_gather_into_tensor_out": "_all_gather_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "reduce_scatter_tensor_out": "_reduce_scatter_base",
    "all_to_all_single": "all_to_all",
}  # fmt: skip
# collective -> its kernel, where NCCL has not one for sends and receives alone
_KERNELS = {
    "all_reduce": "AllReduce", "barrier": "AllReduce", "reduce": "Reduce",
    "reduce_scatter": "ReduceScatter", "all_gather": "AllGather",
    "broadcast": "Broadcast",
}  # fmt: skip
_OF_ANY_TYPE = {"all_gather", "broadcast"}
_TYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16",
    torch.bfloat16: "bf16", torch.int32: "u32", torch.int64: "u64",
    torch.complex64: "f32", torch.complex128: "f64",
}  # fmt: skip
_SCALARS = {
    torch.float32: "Float", torch.float64: "Double", torch.float16: "Half",
    torch.bfloat16: "BFloat16", torch.int32: "Int", torch.int64: "Long",
    torch.uint8: "Byte", torch.int8: "Char", torch.bool: "Bool",
}  # fmt: skip
_last = threading.local()  # what was noted of the collective that is launched


is_on = profiler_enabled


def note(operation: str, tensors: list[torch.Tensor], group: ProcessGroup) -> None:
    """Tell a profiler that runs of a collective: an operation of c10d, or its name."""
    if is_on():
        _last.group = group
        _last.name = name = _NCCL + NAMES.get(operation, operation)
        with RecordFunctionFast(name, tensors):
            _last.real_ns = time.time_ns()


def about(exchange, communicator, channel) -> dict:
    """What a profiler tells of the kernel that was noted last.

    Returns:
        its `range`, the `kernel`, `args` as PyTorch names them, and of the `launch` the
        real time in ns, the thread, and whether that was in a backward pass.
    """
    given = sum(tensor.numel() for tensor in exchange.gives)
    # of a reduction, what comes from each rank goes to the same place
    taken = (
        max(exchange.counts, default=0) if exchange.reduction else sum(exchange.counts)
    )
    ranks = list(communicator.ranks)
    is_backward = current_graph_task_id() != -1
    args = {
        "Collective name": _last.name.removeprefix(_NCCL), "In msg nelems": given,
        "Out msg nelems": taken or given, "Group size": len(ranks),
        "dtype": _SCALARS.get(exchange.dtype, str(exchange.dtype)),
        "Process Group Name": _last.group.group_name, "Process Group Ranks": str(ranks),
        "Process Group Description": _last.group.group_desc,
    }  # fmt: skip
    return {
        "range": _last.name, "kernel": _kernel(exchange, communicator, channel),
        "launch": (_last.real_ns, threading.get_native_id(), is_backward), "args": args,
    }  # fmt: skip


def _kernel(exchange, communicator, channel) -> str:
    """As `best_kernel` in NCCL's src/device/generate.py has it: few are compiled.

    All protocols go by LL there, all reductions by Sum, and NVLS by RING.
    """
    name = _KERNELS.get(exchange.name)
    if name is None:
        return "ncclDevKernel_SendRecv"
    way = "RING"
    if exchange.name not in _OF_ANY_TYPE:
        dtype = torch.float32 if exchange.name == "barrier" else exchange.dtype
        name += f"_Sum_{_TYPES.get(dtype, 'u8')}"
        with contextlib.suppress(ValueError):
            chosen = collective_cost.choose(
                exchange.name, communicator.bytes_of(exchange), channel.group,
                communicator.cluster.topology,
            )  # fmt: skip
            way = "TREE" if chosen.algorithm == "tree" else "RING"
    return f"ncclDevKernel_{name}_{way}_LL"


def new_event(event, *args, **kwargs) -> None:
    """`FunctionEvent`: on the host, a collective of NCCL's does not end in the call."""
    _raw_new_event(event, *args, **kwargs)
    if event.device_type == DeviceType.CPU and event.name.startswith(_NCCL):
        event.is_async = True
