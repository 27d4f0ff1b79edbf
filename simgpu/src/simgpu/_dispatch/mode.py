"""The dispatch mode: sees every operation below autograd and makes a `Call` of it."""

import contextlib

import torch

from simgpu import _runtime as state
from simgpu._compat import (
    DispatchKey,
    HigherOrderOperator,
    TorchDispatchMode,
    TorchDispatchModeKey,
    dispatch_modes,
    get_dispatch_mode,
    len_dispatch_stack,
    set_dispatch_mode,
    unset_dispatch_mode,
)
from simgpu._dispatch.factories import name_devices
from simgpu._dispatch.function_mode import FunctionMode
from simgpu._dispatch.host_is_full import CANNOT_ALLOCATE, raise_host_is_full
from simgpu._dispatch.host_memory import run_beside_copies
from simgpu._dispatch.operation import known_operations, operation_of
from simgpu._dispatch.operation_call import Call
from simgpu._dispatch.placement import no_torch_function
from simgpu._errors import NotSimulated

_active_mode = get_dispatch_mode
_modes_below = len_dispatch_stack
_FAKE = TorchDispatchModeKey.FAKE
_PROXY = TorchDispatchModeKey.PROXY
_PLAIN = torch.Tensor.__torch_dispatch__
_NO_KWARGS: dict = {}  # never changed: who has other arguments makes a new one


class DispatchMode(TorchDispatchMode):
    """Runs each operation on the simulated GPU of its tensors. One for each thread."""

    supports_higher_order_operators = True

    def __init__(self, runtime: state.Runtime):
        super().__init__()
        self.runtime = runtime

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: the wrapper would import torch._dynamo and slow every operation."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        __tracebackhide__ = True  # notebooks then show the program's lines only
        if self.runtime is not state.running:  # this thread has outlived its runtime
            if state.running is None:
                return func(*args, **(kwargs or {}))
            self.runtime = state.running
        below = _modes_below()
        if below and _active_mode(_FAKE) is not None:  # nothing is computed
            return func(*args, **(kwargs or {}))
        for kind in types:
            if kind.__torch_dispatch__ is not _PLAIN:
                return NotImplemented  # tensor subclasses unwrap themselves first
        operation = known_operations.get(func)
        if operation is None:
            if isinstance(func, HigherOrderOperator):
                return _run_higher_order(self.runtime, func, args, kwargs or {})
            operation = operation_of(func)
        if operation.passes and not below:
            with no_torch_function():
                if _passes(self.runtime, args[0]):
                    return func(*args, **(kwargs or _NO_KWARGS))
        if self.runtime.clock.pending and not operation.silent:
            settle_streams(self.runtime, func.namespace)
        kind = self.runtime.call_kind or Call
        call = kind(self.runtime, operation, func, args, kwargs or _NO_KWARGS)
        if below and _active_mode(_PROXY) is not None:
            return trace(call, types)
        try:
            if self.runtime.unfinished and None in call.gpus:
                return run_beside_copies(call)
            return operation.run(call)
        except Exception as error:
            _note_failure(call, kwargs or _NO_KWARGS, error)
            raise


def _passes(runtime: state.Runtime, given) -> bool:
    """Whether a view of `given` is a view, and nobody looks for its device."""
    thread = runtime.thread
    if thread.cpp_call is not None or thread.script_errors is not None:
        return False
    if runtime.without_values:
        return False
    if runtime.fusing is not None:
        return False  # it follows what views are of
    return not isinstance(given, torch.Tensor) or given.layout is torch.strided


def _note_failure(call: Call, kwargs: dict, error: Exception) -> None:
    """An operation has failed: raise a better error, and keep it for TorchScript."""
    __tracebackhide__ = True
    try:
        if CANNOT_ALLOCATE in str(error):
            raise_host_is_full(call, kwargs, error)
    except RuntimeError as better:
        error = better
        raise
    finally:
        if call.runtime.thread.script_errors is not None:
            call.runtime.thread.script_errors.append(error)


def trace(call: Call, types):
    """`make_fx` records an operation with its devices, and then we run it.

    Its mode is below ours, wherever it was entered; so it is called as if above.
    """
    name_devices(call)
    thread = call.runtime.thread
    device = call.kwargs.get("device")
    tracer = unset_dispatch_mode(_PROXY)
    thread.asked_for_copy = device is not None
    before, thread.asked_for_cpu = thread.asked_for_cpu, str(device) == "cpu"
    try:
        with DispatchMode(call.runtime):
            return tracer.__torch_dispatch__(call.func, types, call.args, call.kwargs)
    finally:
        thread.asked_for_copy, thread.asked_for_cpu = False, before
        set_dispatch_mode(tracer)


def _run_higher_order(runtime: state.Runtime, func, args, kwargs):
    """An operator that takes functions: its own code for CUDA, or for any device.

    Raises:
        NotSimulated: for one that has code for compilers only.
    """
    keys = (DispatchKey.CUDA, DispatchKey.CompositeExplicitAutograd)
    code = next((func.py_kernels[k] for k in keys if k in func.py_kernels), None)
    if code is None:
        raise NotSimulated(func.name())
    with modes_in_this_thread(runtime):
        return code(*args, **kwargs)


def settle_streams(runtime: state.Runtime, namespace: str = "aten") -> None:
    """The values of collectives that the current streams wait for are needed now."""
    __tracebackhide__ = True
    if namespace not in ("c10d", "_c10d_functional"):
        clock, streams = runtime.clock, runtime.thread.streams
        clock.settle([k for k in list(clock.pending) if k[1] == streams.get(k[0], 0)])


@contextlib.contextmanager
def modes_in_this_thread(runtime: state.Runtime):
    """Modes are per thread: enter them, unless this thread has."""
    stack = dispatch_modes()
    if any(isinstance(mode, DispatchMode) for mode in stack):
        yield
    else:
        with FunctionMode(runtime), DispatchMode(runtime):
            yield
