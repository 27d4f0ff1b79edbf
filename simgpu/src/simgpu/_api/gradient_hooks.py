"""Hooks of backward whose gradient is on another device than the one they were given.

PyTorch compares the type of both (`check_variable_result`), which a CPU tensor in the
place of a GPU's changes. Another GPU's passes there; what the next node makes of it is
refused (`validate_outputs`), unless that is a leaf, which takes it. Tensors, nodes and
modules register their hooks through the two functions here.
"""

import functools
from collections import OrderedDict

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from simgpu._compat import current_autograd_node
from simgpu._device.gpu import Gpu
from simgpu._dispatch.backward import gpu_of_backward
from simgpu._dispatch.errors import type_name
from simgpu._dispatch.named_devices import HOST
from simgpu._dispatch.placement import gpu_of

_raw_register_hook = torch.Tensor.register_hook


def register_hook(self, hook):
    """`Tensor.register_hook`"""
    return _raw_register_hook(self, _checked(hook))


def register(backward_hooks, hook):
    """What C++ calls for `register_hook` and `register_prehook` of a node."""
    hooks = OrderedDict() if backward_hooks is None else backward_hooks
    handle = RemovableHandle(hooks)
    hooks[handle.id] = _checked(hook)
    return hooks, handle


def _checked(hook):
    """The hook, whose result is compared with what it was given."""
    if not callable(hook) or hasattr(hook, "_simgpu_checks"):
        return hook

    @functools.wraps(hook)
    def checked(given, *others):
        __tracebackhide__ = True
        result = hook(given, *others)
        if result is not None:
            _compare(given, result, hook, is_after_node=bool(others))
        return result

    checked._simgpu_checks = True
    return checked


def _compare(given, result, hook, is_after_node: bool) -> None:
    """Refuse a gradient of another kind of device, and watch one of another GPU.

    Args:
        given: a gradient, or those of a node.
        result: what the hook puts in its place.
        hook: for its name.
        is_after_node: whether the hook runs after its node, and not before it.
    """
    __tracebackhide__ = True
    if isinstance(given, torch.Tensor):
        given, result = (given,), (result,)
    if not isinstance(result, tuple):
        return
    for i, (before, after) in enumerate(zip(given, result, strict=False)):
        if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
            continue
        its, new = gpu_of(before), gpu_of(after)
        if its is new:
            continue
        if its is None and gpu_of_backward() is not None:
            continue  # C++ made it: it may be that GPU's
        if its is None or new is None:
            name = getattr(hook, "__name__", "<unknown>")
            raise RuntimeError(
                f"hook '{name}' has changed the type of value (was "
                f"{type_name(before)} got {type_name(after)})"
            )
        node = current_autograd_node()
        if is_after_node and node is not None:
            node = node.next_functions[i][0]
        _watch(node, its, new)


def _watch(node, its: Gpu, other: Gpu) -> None:
    """Refuse what a node returns on `other`, as its inputs were on `its`."""
    if node is None or isinstance(node, BackwardCFunction):
        return  # the code of a Function: `autograd.py` looks at its gradients
    if hasattr(node, "variable"):
        return  # a leaf

    def validate(returned, _):
        handle.remove()
        moved = list(returned)
        for i, gradient in enumerate(returned):
            if isinstance(gradient, torch.Tensor) and gpu_of(gradient) is other:
                if gradient.dim():
                    raise RuntimeError(
                        f"Function {node.name()} "
                        + invalid_gradient(i, its, gradient, "returned an ")
                    )
                moved[i] = gradient.to(its.device)
        return tuple(moved)

    validate._simgpu_checks = True
    handle = node.register_hook(validate)


def invalid_gradient(index: int, gpu: Gpu | None, gradient, before: str = "") -> str:
    """What the engine says of a gradient that should be on `gpu`."""
    device = gpu.device if gpu else HOST
    return (
        f"{before}invalid gradient at index {index} - expected device {device} but got "
        f"{gradient.device}"
    )
