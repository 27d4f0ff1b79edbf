"""Collectives in PyTorch's profiler, under the names that NCCL's have there.

Models: that each is there once, with the shapes of what the rank gives. Leaves out: how
long it takes. The event is as long as the launch; the timeline has simulated times.
"""

import torch
from torch.autograd.profiler_util import FunctionEvent

from simgpu._compat import RecordFunctionFast, profiler_enabled

_raw_new_event = FunctionEvent.__init__
_NCCL = "nccl:"
# operation of c10d -> its name there, where it is another
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
}  # fmt: skip


is_on = profiler_enabled


def note(operation: str, tensors: list[torch.Tensor]) -> None:
    """Tell a profiler that runs of a collective: an operation of c10d, or its name."""
    if is_on():
        name = _NCCL + NAMES.get(operation, operation)
        with RecordFunctionFast(name, tensors):
            pass


def new_event(event, *args, **kwargs) -> None:
    """`FunctionEvent`: a collective of NCCL's does not end in the call."""
    _raw_new_event(event, *args, **kwargs)
    event.is_async = event.is_async or event.name.startswith(_NCCL)
