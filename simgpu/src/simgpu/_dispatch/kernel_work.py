"""How much work a kernel is: its bytes, its FLOPs, its shape, and its type.

Models: each tensor counts once where it is read and once where it is written, with the
bytes that it has; FLOPs come from PyTorch's own formulas (`torch.utils.flop_counter`).
Operations without a formula (element-wise ones, reductions) count as bytes alone. A
convolution is the product of its input's windows and its weight, and so is each
gradient of it: PyTorch's formula forgets groups in the gradient of the weight.
"""

import math
from collections.abc import Callable

import torch
from torch.utils.flop_counter import flop_registry

from simgpu._dispatch.placement import tensors_in
from simgpu._timing.kernel_cost import Attention, Product, Work

_MOST_KNOWN = 100_000
_STRIDED = torch.strided
_INDICES = (torch.int64, torch.int32, torch.bool, torch.uint8)
_known: dict[tuple, tuple[int, Product | Attention | None]] = {}
# operation -> FLOPs and the shape of products of a call with the result `out`, where
# values decide, or PyTorch has no formula or a wrong one: `count(call, out)`
COUNTED: dict[str, Callable] = {}


def work_of(call, out, outputs: list[torch.Tensor]) -> Work:
    """The work of a call with the result `out`, in which `outputs` are the tensors."""
    operation = call.operation
    nbytes, elements = 0, 1
    if operation.writes:
        moved = _moved_in_place(call, outputs)
    elif operation.is_factory:
        moved = outputs
    elif operation.gathers:  # of its first tensor only as much as it returns
        moved = (*call.tensors[1:], *outputs, *outputs)
    else:
        moved = (*call.tensors, *outputs)
    for tensor in moved:
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
        return Work(nbytes, 0, elements, "", None, operation.traffic)
    of_inputs = not outputs or operation.name in COUNTED
    dtype = _computes_in(operation.name, call.tensors if of_inputs else outputs)
    flops, shape = arithmetic_of(call, out)
    if "attention" in operation.name:
        return Work(nbytes, flops, elements, dtype, None, 1.0, True, shape)
    return Work(nbytes, flops, elements, dtype, shape)


def _moved_in_place(call, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What an operation that writes arguments moves, each tensor so often."""
    operation = call.operation
    written = tensors_in([call.argument(*where) for where in operation.written])
    mine = {id(tensor) for tensor in written}
    read = []
    for tensor in reversed(call.tensors):  # one that is read, too, comes before `out`
        if id(tensor) in mine:
            mine.remove(id(tensor))
        else:
            read.append(tensor)
    if operation.scatters:  # of its first tensor only as much as it is given
        given = [tensor for tensor in read if tensor.dtype not in _INDICES] or read
        return read + given[:1] * operation.scatters
    return read + written * (1 if operation.overwrites else 2)


def bytes_in(tensor: torch.Tensor) -> int:
    """Bytes that an operation moves of a tensor: each that it has, once."""
    if tensor.layout is not torch.strided:
        return tensor._nnz() * tensor.element_size()
    nbytes = tensor.nbytes
    if nbytes and 0 in tensor.stride():  # expanded: the same bytes again and again
        return min(nbytes, tensor.untyped_storage().nbytes())
    return nbytes


def arithmetic_of(call, out) -> tuple[int, Product | Attention | None]:
    """FLOPs of a call with the result `out`, and the shape of its products."""
    if call.operation.name in COUNTED:
        return COUNTED[call.operation.name](call, out)
    return by_formula(call, out)


def by_formula(call, out) -> tuple[int, Product | Attention | None]:
    """The same by PyTorch's formula, which is asked once for the same shapes."""
    func = call.operation.func
    values = (*call.args, *call.kwargs.values())
    key = (func, *(_shape(value) for value in values))
    if key not in _known:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        args, shape = call.args, _product_of(call)
        if "attention" in call.operation.name:
            args, shape = _with_all_heads(args), _attention_of(call)
        count = flop_registry[func.overloadpacket](*args, **call.kwargs, out_val=out)
        _known[key] = int(count), shape
    return _known[key]


def _with_all_heads(args) -> list:
    """Arguments of attention, with keys and values for each head of the queries.

    Where heads share keys, a kernel computes with them for each head. PyTorch 2.11
    cannot count the FLOPs of shared heads. A shape will do in place of a tensor.
    """

    def is_in_heads(value) -> bool:  # (batch, heads, tokens, width)
        return isinstance(value, torch.Tensor) and value.dim() == 4

    heads = max((value.shape[1] for value in args if is_in_heads(value)), default=0)
    return [
        (value.shape[0], heads, *value.shape[2:]) if is_in_heads(value) else value
        for value in args
    ]


def _attention_of(call) -> Attention | None:
    """The shape of a call of attention; its first tensors are (B, H, S, D)."""
    named = {argument.name: value for argument, value in call.named_arguments()}
    query, key = named.get("query"), named.get("key")
    if query is None or key is None or query.dim() != 4:
        return None
    batch, heads, queries, width = query.shape
    causal = bool(named.get("is_causal"))
    return Attention(batch * heads, queries, key.shape[2], width, causal)


def _product_of(call) -> Product | None:
    """The shape of the matrix product of a call, if it is one."""
    name, tensors = call.operation.name, call.tensors
    if name in ("mm", "bmm", "_scaled_mm"):
        left, right = tensors[:2]
    elif name in ("addmm", "baddbmm"):
        left, right = tensors[1:3]
    else:
        return None
    batch = left.shape[0] if left.dim() == 3 else 1
    return Product(batch, left.shape[-2], right.shape[-1], left.shape[-1])


def _convolution(call, out) -> tuple[int, Product]:
    """A convolution of any dimensions, also a transposed one; a bias counts nothing."""
    transposed, groups = call.argument(6, "transposed"), call.argument(8, "groups")
    x, weight = call.tensors[:2]
    product = _windows(x if transposed else out, weight, groups)
    return 2 * math.prod(product[:4]), product


def _gradients_of_convolution(call, out) -> tuple[int, Product]:
    """Those of its input and its weight: each has as many products as it has."""
    transposed, groups = call.argument(7, "transposed"), call.argument(9, "groups")
    gradient, x, weight = call.tensors[:3]
    product = _windows(x if transposed else gradient, weight, groups)
    asked = sum(call.argument(10, "output_mask")[:2])
    return 2 * math.prod(product[:4]) * asked, product


def _windows(outer, weight, groups: int) -> Product:
    """The product of a convolution: of (N, C, ...) `outer` each place is a row."""
    places = outer.shape[0] * math.prod(outer.shape[2:])
    columns = weight.shape[0] // groups
    inner = math.prod(weight.shape[1:])
    return Product(groups, places, columns, inner, convolution=True)


COUNTED |= {
    "convolution": _convolution,
    "cudnn_convolution": _convolution,
    "cudnn_convolution_transpose": _convolution,
    "convolution_backward": _gradients_of_convolution,
}


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
