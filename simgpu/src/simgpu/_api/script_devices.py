"""Devices in TorchScript's own code: `x.device`, `x.to("cpu")`, and what errors say.

To TorchScript's interpreter each tensor is the CPU's. So before a function or method is
called, a copy of its graph is made in which operations of our own stand where devices
are asked for or changed; the program's graph stays as it is. The interpreter loses the
text of an error that comes from Python, as all of the simulator's do: it is put back.
Leaves out: code that `torch.jit.fork` runs in other threads.
"""

import weakref

import torch

from simgpu import _runtime as state
from simgpu._api.patch import Patch, patches
from simgpu._compat import torch_C
from simgpu._errors import NotSimulated

_LIBRARY = torch.library.Library("simgpu_script", "DEF")
_LIBRARY.define("device(Tensor self) -> Device")
_LIBRARY.define("is_cuda(Tensor self) -> bool")
_LIBRARY.define("is_cpu(Tensor self) -> bool")
_LIBRARY.define("get_device(Tensor self) -> int")
_LIBRARY.define("cpu(Tensor self) -> Tensor")
_LIBRARY.define("cuda(Tensor self) -> Tensor")
_LIBRARY.define(
    "to(Tensor self, Device? device, ScalarType? dtype, bool non_blocking, bool copy)"
    " -> Tensor"
)
_LIBRARY.define(
    "to_other(Tensor self, Tensor other, bool non_blocking, bool copy) -> Tensor"
)


def _to(tensor, device, dtype, non_blocking: bool, copy: bool):
    device = tensor.device if device is None else device
    return tensor.to(device, dtype or tensor.dtype, non_blocking, copy)


def _to_other(tensor, other, non_blocking: bool, copy: bool):
    return tensor.to(other.device, other.dtype, non_blocking, copy)


_CODE = {
    "device": lambda tensor: tensor.device,
    "is_cuda": lambda tensor: tensor.is_cuda,
    "is_cpu": lambda tensor: tensor.is_cpu,
    "get_device": lambda tensor: tensor.get_device(),
    "cpu": lambda tensor: tensor.cpu(),
    "cuda": lambda tensor: tensor.cuda(),
    "to": _to,
    "to_other": _to_other,
}
for _name, _function in _CODE.items():
    _LIBRARY.impl(_name, _function, "CompositeImplicitAutograd")

# kind of a node -> our operation, which takes all its inputs
_SAME = {
    "prim::device": "device", "prim::is_cuda": "is_cuda", "prim::is_cpu": "is_cpu",
    "aten::get_device": "get_device", "aten::cpu": "cpu", "aten::cuda": "cuda",
}  # fmt: skip
# beginning of the schema of `to` -> our operation, positions of its inputs
_TO = {
    "aten::to.device(": ("to", (0, 1, 2, 3, 4)),
    "aten::to.prim_Device(": ("to", (0, 1, 2, 3, 4)),
    "aten::to.dtype_layout(": ("to", (0, 3, 1, 5, 6)),
    "aten::to.other(": ("to_other", (0, 1, 2, 3)),
}
_DEVICE = torch_C.DeviceObjType.get()


# -- graphs ----------------------------------------------------------------------------


def _with_devices(graph):
    """A graph with our operations; None if it has nothing to do with them."""
    found = [(node, *_ours(node)) for node in _nodes(graph) if _ours(node)]
    for node, name, positions in found:
        inputs = [node.inputsAt(i) for i in positions]
        new = graph.create(f"simgpu_script::{name}", inputs, 1)
        new.output().setType(_DEVICE if name == "device" else node.output().type())
        new.insertBefore(node)
        new.copyMetadata(node)
        node.output().replaceAllUsesWith(new.output())
        node.destroy()
    return graph if found else None


def _nodes(block):
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _ours(node) -> tuple | None:
    """(our operation, positions of its inputs) for a node, if there is one."""
    kind = node.kind()
    if kind in _SAME:
        return _SAME[kind], (0,)
    if kind == "aten::to":
        schema = node.schema()
        return next((ours for n, ours in _TO.items() if schema.startswith(n)), None)
    return None


_known = weakref.WeakKeyDictionary()  # function or method -> what runs in its place


def _prepared(function):
    """The function with devices; None if the program's own does as well."""
    if function not in _known:
        graph = _with_devices(function.inlined_graph)
        unit = torch.jit.CompilationUnit()
        made = graph and unit.create_function(function.name, graph)
        _known[function] = made
    return _known[function]


def _bind(arguments, args: tuple, kwargs: dict) -> list | None:
    """The arguments of a call by position; None if they do not fit."""
    values = list(args)
    for argument in arguments[len(args) :]:
        if argument.name in kwargs:
            values.append(kwargs[argument.name])
        elif argument.has_default_value():
            values.append(argument.default_value)
        else:
            return None
    fits = len(args) <= len(arguments) and len(values) == len(arguments)
    return values if fits and kwargs.keys() <= {a.name for a in arguments} else None


# -- calls -----------------------------------------------------------------------------


_CLASSES_OF_CPP = "__torch__.torch.classes."


def _is_of_cpp(owner) -> bool:
    """Whether a method's object is C++'s, such as a `ReduceOp`: it has no graph."""
    return owner is not None and owner._type().qualified_name().startswith(
        _CLASSES_OF_CPP
    )


def _call(raw):
    """`__call__` of a function or method of TorchScript."""

    def run(self, *args, **kwargs):
        __tracebackhide__ = True
        owner = getattr(self, "owner", None)
        if state.running is None or _is_of_cpp(owner):
            return raw(self, *args, **kwargs)
        thread = state.running.thread
        before, thread.script_errors = thread.script_errors, []
        try:
            made = _prepared(self)
            first = () if owner is None else (owner,)
            values = made and _bind(self.schema.arguments, (*first, *args), kwargs)
            if values is None:
                return raw(self, *args, **kwargs)
            return raw_call_function(made, *values)
        except RuntimeError as error:
            _put_back_text(error, thread.script_errors)
            raise
        finally:
            thread.script_errors = before

    return run


def _put_back_text(error: RuntimeError, raised: list) -> None:
    """Raise an error again that has lost its text, with that of what was raised."""
    __tracebackhide__ = True
    text = str(error)
    if not raised or not text.rstrip().endswith("RuntimeError:"):
        return
    if isinstance(raised[-1], NotSimulated):
        raise raised[-1] from None
    raise type(error)(f"{text.rstrip()} {raised[-1]}\n") from None


raw_call_function = torch.jit.ScriptFunction.__call__
_raw_call_method = torch_C.ScriptMethod.__call__


def rows() -> list[Patch]:
    """Their part of the table of replacements."""
    reason = "its interpreter knows no GPU"
    return [
        *patches(torch.jit.ScriptFunction, reason, __call__=_call(raw_call_function)),
        *patches(torch_C.ScriptMethod, reason, __call__=_call(_raw_call_method)),
    ]
