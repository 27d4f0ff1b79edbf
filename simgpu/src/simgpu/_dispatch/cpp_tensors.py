"""Tensors that PyTorch's C++ made by itself, and the GPU that it meant.

To C++ every tensor here is a CPU tensor, so where it makes one without another to look
at (zeros in a backward formula, say) it asks for the CPU. In backward the graph tells
which GPU is meant (`backward.py`). Elsewhere such a tensor joins the GPU of the first
operation in the same call into C++ that uses it, or else that of the call's inputs.
"""

import sys
from pathlib import Path

import torch

from simgpu._compat import (
    current_autograd_node,
    device_constructors,
    is_absent,
    pad_packed_sequence,
    raw_run_backward,
    torch_compile,
    torch_ops,
)
from simgpu._dispatch.backward import gpu_of_node
from simgpu._dispatch.placement import gpu_of, is_plain, place, storage_of, tensors_in

_DISPATCH = Path(__file__).parent
# files of the frames between a call and its operation: the simulator's, and
# torch._disable_dynamo's
_MACHINERY = {
    *map(str, _DISPATCH.glob("*.py")),
    *map(str, (_DISPATCH.parent / "_dry").glob("*.py")),
    torch_compile.__file__,
    str(Path(torch.__file__).parent / "_dynamo" / "eval_frame.py"),
}
_OPERATIONS = torch_ops.__file__
_FUNCTION_MODE = str(_DISPATCH / "function_mode.py")
_BACKWARD_CODE = raw_run_backward.__code__
# its lengths are on the host; what is made of numbers, where a GPU has those numbers
_HAVE_HOST_RESULTS = {pad_packed_sequence}
if not is_absent(device_constructors):
    _HAVE_HOST_RESULTS |= device_constructors()


def _call_into_cpp(runtime):
    """Names the Python call that is running: same name, same call into C++.

    None in a thread of C++, such as those of gloo: no Python calls there.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_filename in _MACHINERY:
        if frame.f_code.co_filename == _FUNCTION_MODE and not is_passed_on(
            frame.f_back
        ):
            return function_call(runtime.thread.function_calls)
        frame = frame.f_back
        if frame is None:
            return None
        if _is_given_by_function_mode(frame) and is_passed_on(frame.f_back.f_back):
            frame = frame.f_back.f_back
        if is_passed_on(frame):
            frame = frame.f_back.f_back
    if frame.f_code is _BACKWARD_CODE:
        return "backward"
    # Not every function of C++ is a torch function, which the function mode counts. The
    # frame's instruction tells two others apart, on one line, too: Python has no other
    # name for a call that runs in C++
    return (runtime.thread.function_calls, id(frame), frame.f_lasti)


def _is_given_by_function_mode(frame) -> bool:
    """Whether `frame` is an operation's that our function mode has called."""
    above = frame.f_back
    return (
        frame.f_code.co_filename == _OPERATIONS
        and above is not None
        and above.f_code.co_filename == _FUNCTION_MODE
    )


def is_passed_on(frame) -> bool:
    """Whether in `frame` a mode of the program passes on an operation that it saw."""
    above = frame.f_back
    return (
        frame.f_code.co_filename == _OPERATIONS
        and above is not None
        and above.f_code.co_name == "__torch_dispatch__"
    )


def function_call(number: int):
    """Names a call of a torch function, which the function mode has counted."""
    return (number, "torch function")


def is_called_by_engine(runtime) -> bool:
    """Whether autograd's engine asked for this operation, and no Python code of it."""
    return _call_into_cpp(runtime) == "backward"


def note(runtime, tensor) -> None:
    """A tensor was made on the CPU that nobody asked for there."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        return
    call = _call_into_cpp(runtime)
    if call == "backward":
        known, gpu = gpu_of_node(current_autograd_node())
        if known:
            place_made(tensor, gpu)
            return
    storage_of(tensor)._simgpu_cpp_call = call
    runtime.thread.cpp_call = call


def place_made(tensor: torch.Tensor, gpu) -> None:
    """What C++ made by itself joins a GPU, with the values that it has already."""
    place(tensor, gpu)
    storage_of(tensor)._simgpu_filled = True


def is_of_this_call(runtime, tensor) -> bool:
    """Whether C++ made it in the call that is running, so that it may join a GPU."""
    if tensor.layout != torch.strided:
        return False
    call = getattr(storage_of(tensor), "_simgpu_cpp_call", None)
    return call is not None and (call == "backward" or call == _call_into_cpp(runtime))


def pass_on(runtime, tensors, out) -> None:
    """What C++ computes from a tensor of its own in the same call is one, too."""
    call = runtime.thread.cpp_call
    if not tensors or call != _call_into_cpp(runtime):
        return
    if any(is_of_this_call(runtime, tensor) for tensor in tensors):
        for tensor in tensors_in((out,)):
            storage_of(tensor)._simgpu_cpp_call = call


def place_results(runtime, function, out, args) -> None:
    """A call is over: results that C++ made by itself join the GPU of its inputs."""
    if function in _HAVE_HOST_RESULTS:
        return
    call, runtime.thread.cpp_call = runtime.thread.cpp_call, None
    gpu = next(filter(None, map(gpu_of, tensors_in(args))), None)
    if gpu is None:
        return
    for tensor in tensors_in(out if isinstance(out, (tuple, list)) else (out,)):
        if gpu_of(tensor) is None and is_plain(tensor):
            if getattr(storage_of(tensor), "_simgpu_cpp_call", None) == call:
                place_made(tensor, gpu)
