"""How much work a kernel is: its bytes, its FLOPs, and the type it computes in.

Models: each tensor that it reads or writes counts once, with the bytes that it has;
FLOPs come from PyTorch's own formulas (`torch.utils.flop_counter`). Operations without
a formula (element-wise ones, reductions) count as bytes alone.
"""

import torch

_MOST_KNOWN = 100_000
_STRIDED = torch.strided
_known_flops: dict[tuple, int] = {}


def work_of(call, out, outputs: list[torch.Tensor]) -> tuple[int, int, int, str]:
    """The work of a call with the result `out`, in which `outputs` are the tensors.

    Returns:
        Bytes read and written, FLOPs, elements of the largest output, and the type in
        which it computes, as `Clock.kernel` takes them.
    """
    operation = call.operation
    nbytes, elements = 0, 1
    for tensor in (*_read(call, outputs), *outputs):
        try:
            if tensor.layout is _STRIDED and 0 not in tensor.stride():
                nbytes += tensor.nbytes
            else:
                nbytes += bytes_in(tensor)
        except RuntimeError:  # a nested tensor, which has no strides
            nbytes += tensor.untyped_storage().nbytes()
    for tensor in outputs:
        elements = max(elements, tensor.numel())
    if operation.flop_formula is None:
        return nbytes, 0, elements, ""
    dtype = _computes_in(operation.name, outputs or call.tensors)
    return nbytes, flops_of(call, out), elements, dtype


def _read(call, outputs):
    """The tensors that a kernel reads."""
    if call.operation.is_factory:
        return ()
    if call.operation.gathers:  # of its first tensor only as much as it returns
        return (*call.tensors[1:], *outputs)
    return call.tensors


def bytes_in(tensor: torch.Tensor) -> int:
    """Bytes that an operation moves of a tensor: each that it has, once."""
    if tensor.layout is not torch.strided:
        return tensor._nnz() * tensor.element_size()
    nbytes = tensor.nbytes
    if nbytes and 0 in tensor.stride():  # expanded: the same bytes again and again
        return min(nbytes, tensor.untyped_storage().nbytes())
    return nbytes


def flops_of(call, out) -> int:
    """Floating-point operations of a call with the result `out`."""
    func = call.operation.func
    values = (*call.args, *call.kwargs.values())
    key = (func, *(_shape(value) for value in values))
    if key not in _known_flops:
        if len(_known_flops) >= _MOST_KNOWN:
            _known_flops.clear()
        count = call.operation.flop_formula(*call.args, **call.kwargs, out_val=out)
        _known_flops[key] = int(count)
    return _known_flops[key]


def _shape(value):
    """What the formulas read of an argument, as something to look up by."""
    if isinstance(value, torch.Tensor):
        return value.shape
    return tuple(map(_shape, value)) if isinstance(value, (list, tuple)) else value


def _computes_in(name: str, tensors: list[torch.Tensor]) -> str:
    """In which type a kernel computes; float32 may be rounded to TF32."""
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    if dtype != "float32":
        return dtype
    if name.startswith(("convolution", "cudnn")):
        return "tf32" if torch.backends.cudnn.allow_tf32 else dtype
    return dtype if torch.get_float32_matmul_precision() == "highest" else "tf32"
