"""What PyTorch says where devices do not fit together.

PyTorch's own file native_functions.yaml says how each CUDA operation checks its
devices. The method names in a few messages are the CPU's (a real GPU says `cudnn_...`).
"""

import torch

from simgpu._compat import DisableTorchFunction
from simgpu._dispatch.declarations import declaration
from simgpu._dispatch.named_devices import HOST
from simgpu._dispatch.placement import gpu_of, tensors_in
from simgpu._dispatch.scalars import joins_scalars

_raw_type = torch.Tensor.type
# operations that CUDA runs as another one: name -> (that one, argument -> argument)
_RUNS_AS = {
    "embedding": ("_index_select", {"indices": "index"}),
}
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


def mismatch(call, gpus: list) -> str:
    """What CUDA says when a call gets tensors of several devices.

    Args:
        call: the operation.
        gpus: of its tensors; None for the host.
    """
    func, args, tensors = call.operation.func, call.args, call.tensors
    name = func._schema.name.removeprefix("aten::")
    devices = [gpu.device if gpu else HOST for gpu in gpus]
    if name == "convolution" and None in gpus:
        return (
            f"Input type ({type_name(tensors[0])}) and weight type "
            f"({type_name(tensors[1])}) should be the same"
        )
    if name.startswith("masked_fill"):
        return (
            "expected self and mask to be on the same device, but got mask on "
            f"{devices[1]} and self on {devices[0]}"
        )
    if name == "where" and len(devices) == 3:
        return (
            "Expected condition, x and y to be on the same device, but condition is "
            f"on {devices[0]} and x and y are on {devices[1]} and {devices[2]} "
            "respectively"
        )
    if "rnn" in name or "lstm" in name or "gru" in name:
        return (
            "Input and parameter tensors are not at the same device, found input "
            f"tensor at {devices[0]} and parameter tensor at {devices[1]}"
        )
    entry = declaration(func)
    structured = "structured" in entry
    known = structured or "CUDA" in entry or name in _RUNS_AS
    if joins_scalars(func) or not known:
        first = next(d for d in devices if d.type == "cuda")
        other = next(d for d in devices if d != first)
        return (
            "Expected all tensors to be on the same device, but found at least two "
            f"devices, {first} and {other}!"
        )
    run_as, renamed = _RUNS_AS.get(name, (None, {}))
    if run_as is None:
        overload = func._schema.overload_name
        run_as = f"{overload}_{name}"
        if structured:
            run_as = f"{name}_{overload}" if overload else name
    position = next(i for i, device in enumerate(devices) if device != devices[0])
    argument = _argument_name(func, args, tensors[position])
    return (
        "Expected all tensors to be on the same device, but got "
        f"{renamed.get(argument, argument)} is on {devices[position]}, different from "
        f"other tensors on {devices[0]} (when checking argument in method "
        f"wrapper_CUDA_{run_as})"
    )


def _argument_name(func, args, tensor) -> str:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if any(tensor is item for item in tensors_in((value,))):
            return argument.name
    return "self"
