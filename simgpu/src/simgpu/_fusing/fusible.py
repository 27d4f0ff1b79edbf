"""Which operations compiled code fuses, and how they go through their elements."""

import torch

from simgpu._dispatch.kernel_work import bytes_in
from simgpu._fusing.kernels import ROW, Way, in_steps, source_of

_POINTWISE = {
    "_to_copy", "cat", "stack", "native_dropout", "constant_pad_nd", "slice_backward",
    "select_backward", "nll_loss_backward", "index_select", "gather", "index",
    "_unsafe_index", "repeat", "roll", "flip", "tril", "triu", "zeros", "ones", "full",
    "arange", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
    "new_full", "scalar_tensor", "copy_", "zero_", "fill_", "log_sigmoid_forward",
}  # fmt: skip
ROWS = {
    "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data",
    "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm",
    "_fused_rms_norm_backward", "native_group_norm", "native_group_norm_backward",
    "native_batch_norm", "native_batch_norm_backward", "cudnn_batch_norm",
    "cudnn_batch_norm_backward",
}  # fmt: skip
_REDUCTIONS = {
    "sum", "mean", "amax", "amin", "max", "min", "any", "all", "argmax", "argmin",
    "var", "std", "var_mean", "std_mean", "prod", "nll_loss_forward", "mse_loss",
    "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "linalg_vector_norm",
    "norm", "logsumexp",
}  # fmt: skip
DRAWS = {"native_dropout"}  # its mask is written: nobody draws it again
# arguments of which no element is read
_UNREAD = {"nll_loss_backward": {1}, "copy_": {0}, "zero_": {0}, "fill_": {0}}
_PICKS = {"nll_loss_forward"}  # it reads of its first tensor one element for a row
_BREAKS = {"_local_scalar_dense", "is_nonzero", "equal", "_to_copy", "copy_"}
_UNROLLED = 8  # `unroll_reductions_threshold`: shorter sums are pointwise operations
MASKS = (torch.bool, torch.uint8)
# `MixOrderReduction.can_fuse`: elements, rows at least; columns at most
_MIXED = 5 * 2**20, 4096, 2**14


def is_fused(call) -> bool:
    """Whether compiled code makes a fused kernel of a call."""
    operation, gpus = call.operation, call.gpus
    if not (
        operation.name in _POINTWISE or operation.name in ROWS
        or operation.name in _REDUCTIONS or torch.Tag.pointwise in operation.func.tags
    ):  # fmt: skip
        return False
    if operation.random and operation.name not in DRAWS:
        return False
    if "out" in call.kwargs or operation.func.namespace != "aten":
        return False
    first = gpus[0] if gpus else None
    for tensor, gpu in zip(call.tensors, gpus, strict=True):
        if tensor.layout is not torch.strided or tensor.is_meta:
            return False
        if gpu is not first and (gpu is not None or tensor.dim()):
            return False
    if gpus and first is None or is_dynamic(operation, call.args):
        return False
    device, thread = call.kwargs.get("device"), call.runtime.thread
    to_host = thread.asked_for_copy or thread.asked_for_cpu
    return device is None or device.type != "cpu" or not to_host


def is_dynamic(operation, args) -> bool:
    """Whether the shape of an operation's result depends on values."""
    if operation.dynamic:
        if operation.name not in ("index", "_unsafe_index"):
            return True
        return any(index is not None and index.dtype in MASKS for index in args[1])
    return False


def breaks_graph(call) -> bool:
    """Whether what comes after an operation is no kernel with what was before."""
    name = call.operation.name
    return call.operation.func.namespace != "aten" or name in _BREAKS


def is_reduction(call, outputs: list[torch.Tensor]) -> bool:
    """Whether what it reads is added up: its results are written at once."""
    if call.operation.name not in _REDUCTIONS:
        return False
    few = max((t.numel() for t in outputs), default=1)
    return len(outputs) > 1 or call.tensors[0].numel() > _UNROLLED * few


def sources(call, outputs: list[torch.Tensor]) -> tuple:
    """What a call reads, as `Node.sources` has it."""
    operation = call.operation
    if operation.is_factory:
        return ()
    found = []
    unread = _UNREAD.get(operation.name, ())
    for i, (tensor, gpu) in enumerate(zip(call.tensors, call.gpus, strict=True)):
        if gpu is None or i in unread or not tensor.numel():
            continue
        source = source_of(tensor)
        if not i and (operation.gathers or operation.name in _PICKS):
            least = sum(bytes_in(out) for out in outputs)
            source = source[0], min(source[1], least), source[2]
        found.append(source)
    return tuple(found)


def way_of(call, outputs: list[torch.Tensor]) -> Way:
    """How a reduction, or an operation along rows, goes to write these of its results.

    What is added up along the last dimensions are rows.
    """
    of, name = call.tensors[0], call.operation.name
    rank, dims = of.dim(), call.argument(1, "dim")
    columns = max((t.numel() for t in outputs), default=1)
    steps = in_steps(of.numel(), columns)
    if name in ROWS:
        if "batch_norm" not in name and "backward" not in name:
            return ROW
    else:
        dims = [dims] if isinstance(dims, int) else dims
        if not isinstance(dims, (list, tuple)) or not dims or len(dims) == rank:
            return Way("rows", ends=True, in_steps=of.numel() > 2**15)
        if {dim % rank for dim in dims} == set(range(rank - len(dims), rank)):
            return ROW
    rows = of.numel() // max(columns, 1)
    least, fewest, most = _MIXED
    mixes = of.numel() >= least and rows >= max(fewest, 2 * columns) and columns <= most
    return Way("columns", ends=True, mixes=mixes, in_steps=steps)
