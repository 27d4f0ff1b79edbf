"""Which operations call cuBLAS, and so have PyTorch take a workspace for it.

Leaves out: linear solvers other than triangular ones, some of which call cuBLAS. Layers
that cuDNN computes on a GPU and PyTorch's products on the CPU (recurrent ones) count as
cuBLAS's. Convolutions are not: their memory is cuDNN's.
"""

import torch

from simgpu.device.gpu import Gpu
from simgpu.device.workspaces import OF_AUTOGRAD

# with those that call cuBLASLt, whose workspace is the same
CALLERS = {
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot",
    "_addmm_activation", "_int_mm", "_scaled_mm", "linalg_solve_triangular",
    "triangular_solve",
}  # fmt: skip


def take_workspace(call, gpu: Gpu) -> None:
    """The thread that runs an operation has a workspace on the current stream.

    Args:
        call: of one of `CALLERS`.
        gpu: where it runs, with workspaces.

    Raises:
        torch.OutOfMemoryError: if there is no room for it.
    """
    __tracebackhide__ = True
    runtime, workspaces = call.runtime, gpu.workspaces
    backward = torch._C._current_autograd_node() is not None
    handles = runtime.thread.cublas_handles
    handle = OF_AUTOGRAD if backward else handles.on(workspaces)
    key = handle, runtime.stream_of(gpu)
    if key in workspaces.ready:
        return
    tensors = call.tensors
    if all(t.layout is torch.strided and t.numel() for t in tensors):
        workspaces.take(key, runtime.workspace_size(gpu))
