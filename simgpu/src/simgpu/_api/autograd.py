"""What autograd is asked while GPUs are simulated: `backward()`, Python Functions.

Backward runs in the calling thread; on which streams, `backward_streams.py` decides.
"""

import contextlib

import torch
from torch.autograd.function import BackwardCFunction

from simgpu import _runtime as state
from simgpu._api import fake_tensors
from simgpu._api.backward_streams import streams_of_forward
from simgpu._api.gradient_hooks import invalid_gradient
from simgpu._compat import (
    current_graph_task_id,
    disable_modes,
    function_modes,
    is_absent,
    is_legacy_batchedtensor,
    raw_run_backward,
)
from simgpu._dispatch import in_place
from simgpu._dispatch.function_mode import FunctionMode
from simgpu._dispatch.mode import DispatchMode, modes_in_this_thread
from simgpu._dispatch.named_devices import HOST
from simgpu._dispatch.placement import gpu_of, place, tensors_in

# a method of the class, of Python's; since 2.14 of C++'s
_raw_apply_function = vars(torch.autograd.Function)["apply"]
_raw_apply_backward = BackwardCFunction.apply


def run_backward(outputs, gradients, *args, **kwargs):
    """The engine checks the device of each gradient it is given."""
    __tracebackhide__ = True
    fake_tensors.refuse_backward(outputs)
    gradients = tuple(map(_root, range(len(outputs)), outputs, gradients))
    if not in_place.is_measured() and not is_absent(disable_modes):
        with disable_modes(), DispatchMode(state.current()):
            in_place.measure()
    thread = state.current().thread
    chosen = thread.device, thread.device_chosen_in
    try:
        inputs = args[2] if len(args) > 2 else ()
        with _function_mode(), streams_of_forward(outputs, inputs):
            return raw_run_backward(outputs, gradients, *args, **kwargs)
    finally:
        _say_that_it_is_over()
        thread.device, thread.device_chosen_in = chosen


def _say_that_it_is_over() -> None:
    dry = state.current().dry
    if dry is not None and current_graph_task_id() == -1:  # not within another one
        dry.watch.backward_is_over()


def _root(index: int, output, gradient):
    """The gradient with which backward begins, where its output is.

    Raises:
        RuntimeError: if it has dimensions and is on another device.
    """
    __tracebackhide__ = True
    if not isinstance(output, torch.Tensor) or not isinstance(gradient, torch.Tensor):
        return gradient
    if is_legacy_batchedtensor(gradient):
        return gradient  # is_grads_batched=True: it hides where it is
    gpu = gpu_of(output)
    if gpu_of(gradient) is gpu:
        return gradient
    if gradient.dim():
        raise RuntimeError(invalid_gradient(index, gpu, gradient))
    return gradient.to(output.device)


def _function_mode():
    """Our mode for the Python code that backward runs: `Tensor.backward` pops it."""
    if any(type(m) is FunctionMode for m in function_modes()):
        return contextlib.nullcontext()
    return FunctionMode(state.current())


def apply_function(cls, *args, **kwargs):
    """`torch.autograd.Function.apply`: its node must know where its tensors live."""
    out = _raw_apply_function.__get__(None, cls)(*args, **kwargs)
    outputs = out if isinstance(out, tuple) else (out,)
    for tensor in tensors_in(outputs):
        node = tensor.grad_fn
        if isinstance(node, BackwardCFunction):
            node._simgpu_outputs = [
                gpu_of(t) if isinstance(t, torch.Tensor) else None for t in outputs
            ]
            node._simgpu_inputs = [
                (t.requires_grad, gpu_of(t)) if isinstance(t, torch.Tensor) else None
                for t in args
            ]
            break
    return out


def apply_backward(self, *gradients):
    """The backward of a Python Function: the engine makes and checks its gradients."""
    for gradient, gpu in zip(
        gradients, getattr(self, "_simgpu_outputs", ()), strict=False
    ):
        if isinstance(gradient, torch.Tensor) and gpu_of(gradient) is None:
            place(gradient, gpu)  # zeros that the engine made for an unused output
    with modes_in_this_thread(state.current()):  # distributed autograd's have none
        out = _raw_apply_backward(self, *gradients)
    results = list(out) if isinstance(out, tuple) else [out]
    inputs = getattr(self, "_simgpu_inputs", ())
    position = -1
    for i, (gradient, its) in enumerate(zip(results, inputs, strict=False)):
        if its is None:
            continue
        position += 1
        wanted, gpu = its
        if not wanted or not isinstance(gradient, torch.Tensor):
            continue
        if gpu_of(gradient) is not gpu:
            if gradient.dim():
                raise RuntimeError(
                    f"Function {self.name()} "
                    + invalid_gradient(position, gpu, gradient, "returned an ")
                )
            results[i] = gradient.to(gpu.device if gpu else HOST)
    return tuple(results) if isinstance(out, tuple) else results[0]
