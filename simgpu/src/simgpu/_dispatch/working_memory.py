"""Memory that an operation takes beside its results: kept for cuBLAS, or given back.

Models: cuBLAS's workspaces; the buffers of sums and means for which several blocks of
threads work on one number; what `index_put` sorts to accumulate. Leaves out: what other
kernels take while they run, such as cuDNN's workspaces and the buffers of all other
reductions; linear solvers but triangular ones. Layers that cuDNN computes on a GPU, and
products on the CPU (recurrent ones), count as cuBLAS's.

Sources: aten/src/ATen/native/cuda/Reduce.cuh (`setReduceConfig`) and Indexing.cu
(`index_put_with_sort_kernel`) of PyTorch. `tests/recordings/alloc_training.json` has
sums of 2048 rows of 1024 numbers, which take 16 MiB and 32 bytes.
"""

import math

import torch

from simgpu._compat import current_autograd_node, is_torch
from simgpu._device.cards import Card
from simgpu._device.gpu import Gpu
from simgpu._device.workspaces import OF_AUTOGRAD

# those that call cuBLAS, or cuBLASLt, whose workspace is the same
_CALL_CUBLAS = (
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot",
    "_addmm_activation", "_int_mm", "_scaled_mm", "linalg_solve_triangular",
    "triangular_solve",
)  # fmt: skip
# of a reduction
_WARP = 32  # threads
_MOST_THREADS = 512  # of a block
_VECTOR = 4  # numbers that a thread loads at once
_FEW, _MANY = 16, 256  # numbers for one thread
_COUNTER = 4  # bytes, with which the blocks that share a number know the last


def take_workspace(call, gpu: Gpu, outputs: list) -> None:
    """The thread that runs a product has a workspace on the current stream.

    Raises:
        torch.OutOfMemoryError: if there is no room for it.
    """
    __tracebackhide__ = True
    runtime, workspaces = call.runtime, gpu.workspaces
    backward = current_autograd_node() is not None
    handles = runtime.thread.cublas_handles
    handle = OF_AUTOGRAD if backward else handles.on(workspaces)
    key = handle, runtime.stream_of(gpu)
    if key in workspaces.ready:
        return
    if all(t.layout is torch.strided and t.numel() for t in call.tensors):
        workspaces.take(key, runtime.workspace_size(gpu))


def take_for_sum(call, gpu: Gpu, outputs: list) -> None:
    """Blocks of threads that share a number leave their parts of it in a buffer."""
    __tracebackhide__ = True
    source, (target,) = call.tensors[0], outputs
    numbers = source.numel()
    if numbers < _MANY or numbers < _MANY * (sums := target.numel()):
        return
    if source.layout is not torch.strided or not source.is_contiguous():
        return
    dims = call.argument(1, "dim") if len(call.operation.arguments) > 2 else None
    dims = [d % source.dim() for d in dims or range(source.dim())]
    last = max(source.dim() - 1, 0)
    rows = last not in dims  # each thread has columns of its own, and adds up rows
    if rows and sorted(dims) != list(range(len(dims))):
        return
    size = max(target.element_size(), 4)  # sums of half precision are float32
    _take(call, gpu, sum_buffers(gpu.card, numbers // sums, sums, rows, size))


def sum_buffers(card: Card, each: int, sums: int, rows: bool, size: int) -> list[int]:
    """Bytes that a sum over a contiguous tensor takes while it runs.

    Args:
        card: on which.
        each: numbers that are added to one.
        sums: how many of these there are.
        rows: whether whole rows are added up, so that a row's numbers stay apart.
        size: bytes of a number.
    """
    vector = math.gcd(sums, _VECTOR) if rows else 1
    across, along = (sums // vector, each) if rows else (each, sums)
    if not rows and sums == 1 and each > 128:
        across //= _VECTOR
    most = _MOST_THREADS // vector
    wide, high = min(_power(across), most), min(_power(along), most)
    width = min(wide, _WARP)
    height = min(high, most // width)
    width = min(wide, most // height)
    values = each if rows else -(-each // width)
    if values < min(height * _FEW, _MANY):
        return []  # each row of threads has a number of its own
    values = -(-values // height)
    blocks = -(-sums // (vector * width)) if rows else sums
    at_once = card.multi_processors * (
        card.threads_per_multi_processor // (width * height)
    )
    if values < _MANY or blocks > at_once:
        return []
    shared = max(min(-(-at_once // blocks), -(-values // _FEW)), -(-values // _MANY))
    if shared == 1:
        return []
    parts = width * vector if rows else 1
    return [size * sums * shared * parts, _COUNTER * blocks]


def _power(count: int) -> int:
    """The largest power of two that is not larger."""
    return 1 << (count.bit_length() - 1)


def take_to_sort(call, gpu: Gpu, outputs: list) -> None:
    """`index_put` adds what goes to the same place in order: it sorts the places."""
    __tracebackhide__ = True
    if not call.argument(3, "accumulate"):
        return
    indices = [tensor for tensor in call.args[1] if tensor is not None]
    count = math.prod(torch.broadcast_shapes(*(t.shape for t in indices)))
    lists = 3 * len(indices) - 1  # each index made positive, times its stride, added up
    lists += 3  # sorted places, their numbers in order, sorted numbers
    _take(call, gpu, [8 * count] * lists + [1])


def take_to_copy(call, gpu: Gpu, outputs: list) -> None:
    """Until PyTorch 2.15, GroupNorm copies tensors whose channels lie last."""
    __tracebackhide__ = True
    if not is_torch((2, 15)):
        wide = [t for t in call.tensors if t.dim() > 2 and not t.is_contiguous()]
        _take(call, gpu, [t.numel() * t.element_size() for t in wide])


def _take(call, gpu: Gpu, sizes: list[int]) -> None:
    """Take memory, and give it back."""
    __tracebackhide__ = True
    stream = call.runtime.stream_of(gpu)
    blocks = [gpu.memory.malloc(size, stream) for size in sizes]
    for block in blocks:
        if block is not None:
            gpu.memory.free(block)


# operation -> what takes its memory, called with the call, the GPU and the results
TAKES = {
    **dict.fromkeys(_CALL_CUBLAS, take_workspace),
    **dict.fromkeys(("sum", "mean"), take_for_sum),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), take_to_sort),
    **dict.fromkeys(("native_group_norm", "native_group_norm_backward"), take_to_copy),
}
