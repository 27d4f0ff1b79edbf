"""Every public call of torch.cuda and torch.accelerator without an answer: refused."""

import torch
import torch.accelerator.memory
import torch.cuda.gds
import torch.cuda.graphs
import torch.cuda.nccl

from simgpu._errors import NotSimulated


def refuse(call: str, *why: str):
    def refused(*args, **kwargs):
        raise NotSimulated(call, *why)

    refused.__name__ = call.rsplit(".", 1)[-1]
    return refused


def _refused_class(call: str):
    def refused(cls, *args, **kwargs):
        raise NotSimulated(call)

    return type(call.rsplit(".", 1)[-1], (), {"__new__": refused})


# names of torch.cuda that work as they are, or are data
_KEPT = {
    "CudaError", "DeferredCudaCallError", "check_error", "cudaStatus", "has_half",
    "has_magma", "device", "device_of", "is_tf32_supported", "ipc_collect",
    "StreamContext", "stream", "current_blas_handle", "current_solver_handle",
    "get_stream_from_external", "get_sync_debug_mode", "set_sync_debug_mode",
    "get_gencode_flags", "list_gpu_processes", "device_memory_used", "memory_usage",
    "utilization", "clock_rate", "power_draw", "temperature", "graph",
    "make_graphed_callables",
}  # fmt: skip
_MODULES = {
    torch.cuda: (*torch.cuda.__all__, "_compile_kernel"),
    torch.cuda.graphs: (
        "CUDAGraph", "graph", "graph_pool_handle", "make_graphed_callables",
    ),
    torch.cuda.gds: ("GdsFile", "gds_register_buffer", "gds_deregister_buffer"),
    torch.cuda.memory: torch.cuda.memory.__all__,
    torch.accelerator: torch.accelerator.__all__,
    torch.accelerator.memory: torch.accelerator.memory.__all__,
    torch.cuda.nccl: ("init_rank",),
}  # fmt: skip


def unanswered(answered: set[tuple[str, str]], kept: set[str]) -> list[tuple]:
    """(module, name, what refuses it) of every public call without an answer.

    Args:
        answered: ("torch.cuda" or "torch.accelerator", name) of what is replaced.
        kept: names that work as they are.
    """
    found = []
    for module, names in _MODULES.items():
        family = ".".join(module.__name__.split(".")[:2])
        for name in names:
            value = getattr(module, name, None)
            known = name in kept or name in _KEPT or (family, name) in answered
            if known or not callable(value):
                continue
            if name.endswith(("Tensor", "Storage")):  # tensor_types.py; legacy storages
                continue
            call = f"{module.__name__}.{name}"
            make = _refused_class if isinstance(value, type) else refuse
            found.append((module, name, make(call)))
    return found
