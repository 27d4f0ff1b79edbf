"""The function mode: sees every torch function before PyTorch reads its arguments.

Only for what the dispatch mode never gets to see: whole numbers as devices, functions
such as `torch.tensor` that build their result in C++ at once, and which call it is in
which C++ makes tensors of its own.
"""

import sys
from numbers import Integral

import torch
from torch.overrides import TorchFunctionMode

from simgpu import _runtime as state
from simgpu._dispatch import cpp_tensors
from simgpu._dispatch.named_devices import find_gpu
from simgpu._dispatch.placement import gpu_of

aten = torch.ops.aten
# what graphs of `torch.export` and `make_fx` call, with the device that is meant
_COPIES = {aten._to_copy, aten._to_copy.default}


_NAMES = {str, torch.device}  # of a device; whatever else is a number of one


class FunctionMode(TorchFunctionMode):
    """Answers the functions in `runtime.functions`, and notes what others ask for."""

    def __init__(self, runtime: state.Runtime):
        super().__init__()
        self.runtime = runtime

    def __torch_function__(self, func, types, args=(), kwargs=None):
        __tracebackhide__ = True  # notebooks then show the program's lines only
        if self.runtime is not state.running:  # this thread has outlived its runtime
            if state.running is None:
                return func(*args, **(kwargs or {}))
            self.runtime = state.running
        runtime = self.runtime
        thread = runtime.thread
        thread.function_calls += 1
        answer = runtime.functions.get(func)
        if answer is not None:
            return answer(*args, **(kwargs or {}))
        device = kwargs.get("device") if kwargs else None
        if device is not None and isinstance(kwargs.get("out"), torch.Tensor):
            kwargs = _without_device(kwargs)
            device = None
        if device is None:
            number = thread.function_calls
            out = func(*args, **kwargs) if kwargs else func(*args)
            if thread.cpp_call is not None:
                call = cpp_tensors.function_call(number)
                if thread.cpp_call == call:
                    cpp_tensors.place_results(runtime, func, out, args)
            return out
        if type(device) not in _NAMES and isinstance(device, Integral):
            kwargs = {**kwargs, "device": find_gpu(device).device}
        if cpp_tensors.is_passed_on(sys._getframe(1)):  # it is C++ that names the CPU
            return func(*args, **kwargs)
        thread.asked_for_cpu = str(device) == "cpu"
        thread.asked_for_copy = func in _COPIES
        try:
            return func(*args, **kwargs)
        finally:
            thread.asked_for_cpu = thread.asked_for_copy = False


def _without_device(kwargs: dict) -> dict:
    """PyTorch compares `device=` with `out=`, and does not know our devices."""
    device, its = kwargs["device"], gpu_of(kwargs["out"])
    if isinstance(device, Integral):
        device = torch.device("cuda", device)
    device = torch.device(device)
    if device.type in ("cuda", "cpu") and find_gpu(device) is not its:
        raise RuntimeError(
            f"device {device} does not match device of out parameter "
            f"({kwargs['out'].device})"
        )
    return {name: value for name, value in kwargs.items() if name != "device"}
