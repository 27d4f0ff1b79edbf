"""What PyTorch says where devices do not fit together.

PyTorch's own file native_functions.yaml says how each CUDA operation checks its
devices.
"""

import torch

from simgpu._compat import DisableTorchFunction
from simgpu._dispatch.declarations import declaration, has_cuda_kernel
from simgpu._dispatch.named_devices import HOST
from simgpu._dispatch.placement import gpu_of, tensors_in

_raw_type = torch.Tensor.type
# operations that CUDA runs as another one, whose name is that of its function
_RUNS_AS = {"convolution": "_cudnn_convolution", "mv": "addmv_out_out"}
TYPE_NAMES = {
    torch.float32: "FloatTensor", torch.float64: "DoubleTensor",
    torch.float16: "HalfTensor", torch.bfloat16: "BFloat16Tensor",
    torch.int64: "LongTensor", torch.int32: "IntTensor", torch.int16: "ShortTensor",
    torch.int8: "CharTensor", torch.uint8: "ByteTensor", torch.bool: "BoolTensor",
}  # fmt: skip


def type_name(tensor) -> str:
    """What `tensor.type()` says: "torch.cuda.sparse.FloatTensor"."""
    with DisableTorchFunction():
        name = _raw_type(tensor)
    if gpu_of(tensor):
        return "torch.cuda." + name.removeprefix("torch.")
    return name


_OTHER_NAMES = {
    "complex32": "ComplexHalf", "complex64": "ComplexFloat",
    "complex128": "ComplexDouble", "uint16": "UInt16", "uint32": "UInt32",
    "uint64": "UInt64", "quint8": "QUInt8", "qint8": "QInt8", "qint32": "QInt32",
}  # fmt: skip


def scalar_type_name(tensor) -> str:
    """What C++ calls the type of a tensor's elements: "Long"."""
    if tensor.dtype in TYPE_NAMES:
        return TYPE_NAMES[tensor.dtype].removesuffix("Tensor")
    name = str(tensor.dtype).removeprefix("torch.")
    return _OTHER_NAMES.get(name, name.capitalize())


# those that `processErrorMsg` in torch/csrc/Exceptions.cpp knows
_OLD_TYPES = {
    torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8,
}  # fmt: skip


def name_in_errors(tensor) -> str:
    """What C++ calls the type of a GPU's tensor in an error: "CUDABFloat16Type".

    Of old types, Python shows its own names: "torch.cuda.FloatTensor".
    """
    if tensor.dtype in _OLD_TYPES:
        return type_name(tensor)
    return f"{'Sparse' * tensor.is_sparse}CUDA{scalar_type_name(tensor)}Type"


def mismatch(call, gpus: list) -> str:
    """What CUDA says when a call gets tensors of several devices.

    Args:
        call: the operation.
        gpus: of its tensors; None for the host.
    """
    func, tensors = call.operation.func, call.tensors
    name = func._schema.name.removeprefix("aten::")
    devices = [gpu.device if gpu else HOST for gpu in gpus]
    if name.startswith("masked_fill"):
        return (
            "expected self and mask to be on the same device, but got mask on "
            f"{devices[1]} and self on {devices[0]}"
        )
    operands = _operands(call, devices)
    if name == "convolution":
        kinds = [type_name(tensor) for tensor in tensors]
        for what, kind in zip(("weight", "bias"), kinds[1:], strict=False):
            if kind != kinds[0]:
                return (
                    f"Input type ({kinds[0]}) and {what} type ({kind}) should be the "
                    "same"
                )
        if devices[1] == devices[0]:  # the bias is added to the result
            return _words_of_iterator([(t, d) for _, t, d in operands])
    entry = declaration(func)
    if "structured: True" in entry and "structured_inherits" not in entry:
        name_of_first, _, out = operands[0]
        others = [d for n, _, d in operands if n != name_of_first]
        if "NoCheck" in entry and "out" in call.kwargs and others[0] != out:
            return (
                f"Expected out tensor to have device {others[0]}, but got {out} instead"
            )
    if "NoCheck" in entry or not (has_cuda_kernel(entry) or name in _RUNS_AS):
        return _words_of_iterator([(t, d) for _, t, d in operands])
    first = next(device for _, _, device in operands)
    for argument, _, its in operands:
        if its != first:
            return differs(argument, its, first, _method(call, entry))
    # an argument that is given by name alone: CUDA's kernel meets it
    return _words_of_iterator([*zip(tensors, devices, strict=True)])


def differs(argument: str, device, others, method: str) -> str:
    """What CUDA says of one argument that is not where those before it are.

    Args:
        argument: its name.
        device: where it is.
        others: where they are.
        method: the name of CUDA's function, as torchgen makes it.
    """
    return (
        f"Expected all tensors to be on the same device, but got {argument} is on "
        f"{device}, different from other tensors on {others} (when checking argument "
        f"in method wrapper_CUDA_{method})"
    )


def _operands(call, devices: list) -> list[tuple]:
    """(argument, tensor, device), what is written to `out=` first, as CUDA checks."""
    known = {id(t): d for t, d in zip(call.tensors, devices, strict=True)}
    outs, others = [], []
    for argument, value in call.named_arguments():
        found = [
            (argument.name, tensor, known[id(tensor)])
            for tensor in tensors_in((value,))
            if id(tensor) in known  # indices of `x[i]` are checked apart
        ]
        if not argument.kwarg_only:
            others += found
        elif argument.name in call.operation.writes:
            outs += found
    return outs + others


def _words_of_iterator(operands: list[tuple]) -> str:
    """TensorIterator names the first device of all but the CPU, and who is elsewhere.

    Args:
        operands: (tensor, device), what is written to first.
    """
    common = next(d for _, d in operands if d.type != "cpu")
    elsewhere = [(tensor, device) for tensor, device in operands if device != common]
    # a CPU scalar may join, so it is not what is refused where there is more
    refused = [d for t, d in elsewhere if t.dim() or d.type != "cpu"]
    other = refused[0] if refused else elsewhere[0][1]
    return (
        "Expected all tensors to be on the same device, but found at least two "
        f"devices, {common} and {other}!"
    )


def _method(call, entry: str) -> str:
    """The name of CUDA's function, as torchgen makes it."""
    func = call.operation.func
    name = func._schema.name.removeprefix("aten::")
    overload = func._schema.overload_name
    out = "_out" if any(a.is_out for a in func._schema.arguments) else ""
    if name == "convolution" and call.args[6]:
        return "_cudnn_convolution_transpose"
    if name in _RUNS_AS:
        return _RUNS_AS[name]
    if "structured" in entry:
        return f"{name}{out}_{overload}" if overload else f"{name}{out}"
    return f"{overload}_{name}{out}"
