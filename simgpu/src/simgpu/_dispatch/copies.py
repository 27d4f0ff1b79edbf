"""Copies: between devices, to the host for `.item()`, and into pinned memory.

What a copy costs is in `_timing/cost.py`; when it runs, in `_timing/clock.py`.
"""

import torch

from simgpu import _runtime as state
from simgpu._dispatch import cpp_tensors, host_memory, sanitizing
from simgpu._dispatch.named_devices import HOST, find_gpu, kept_on
from simgpu._dispatch.operation import handles
from simgpu._dispatch.operation_call import Call
from simgpu._dispatch.placement import (
    bytes_in,
    is_pinned,
    pin,
    pinned_block,
    place,
    place_all,
)
from simgpu._timing.captured import NOT_PINNED

aten = torch.ops.aten


@handles("_to_copy")
def to_copy(call: Call):
    """`x.to(...)`: a change of type stays; a change of device crosses a link."""
    __tracebackhide__ = True
    if not call.tensors:  # a number, to which C++ gives a type under torch.vmap
        return call.run_on(None)
    (tensor,) = call.tensors
    thread = call.runtime.thread
    source, device = call.gpus[0], call.kwargs.get("device")
    if tensor.is_meta and device is None:  # it has no values, and stays where it is
        return call.func(*call.args, **call.kwargs)
    asked, thread.asked_for_copy = thread.asked_for_copy, False
    if device is None or (device.type == "cpu" and not asked):
        target = source  # C++ passes on the CPU that it sees
    elif device.type in ("cuda", "cpu"):
        target = find_gpu(device)
    else:
        return call.func(*call.args, **call.kwargs)
    wait = not call.kwargs.get("non_blocking")
    wants_pinned = call.kwargs.get("pin_memory")
    here = {"device": HOST if target is None else kept_on()}
    call.kwargs = {**call.kwargs, **here, "pin_memory": None, "non_blocking": False}
    if target is source:
        out = call.run_on(source)
        if source is None and device is not None and not asked:
            cpp_tensors.note(call.runtime, out)  # C++ may mean another input's GPU
        return out
    # PyTorch takes pinned memory where the host need not wait
    pinned = not wait if source is not None else is_pinned(tensor)
    if source is None and pinned:
        pinned = host_memory.is_read_by_stream(tensor, call.kwargs.get("dtype"), wait)
    out = _cross(call, tensor, source, target, pinned=pinned, wait=wait)
    if wants_pinned or (pinned and target is None):
        pin(out)
    if pinned and not wait and None in (source, target):
        _hold(call, tensor, out, source, target)
    return out


@handles("copy_")
def copy_(call: Call):
    """`target.copy_(source)`, which works across devices."""
    __tracebackhide__ = True
    into, tensor = call.tensors[:2]
    target, source = call.gpus[:2]
    if target is None and source is not None:
        if cpp_tensors.is_of_this_call(call.runtime, into):
            cpp_tensors.place_made(into, source)
            target = source
    if source is None and target is not None:
        if cpp_tensors.is_of_this_call(call.runtime, tensor):
            source = target
    if target is source:
        return call.run_on(target)
    wait = not call.argument(2, "non_blocking")
    pinned = is_pinned(into if target is None else tensor)
    if pinned and source is None:
        pinned = host_memory.is_read_by_stream(tensor, into.dtype, wait, into)
    elif pinned and target is None:
        pinned = host_memory.is_written_by_stream(into, tensor, wait)
    held = pinned and not wait and None in (source, target)
    before = host_memory.content(call.runtime, into) if held else None
    out = _cross(call, tensor, source, target, pinned=pinned, wait=wait, into=into)
    if held:
        _hold(call, tensor, into, source, target, before)
    return out


def _cross(call: Call, tensor, source, target, *, pinned, wait, into=None):
    """Run a copy of `tensor` to another device, `into` a tensor or a new one."""
    __tracebackhide__ = True
    if target is None:
        call.read_values()
    if call.runtime.thread.unlogged:
        return place(call.func(*call.args, **call.kwargs), target)
    ends = [gpu for gpu in (source, target) if gpu is not None]
    keys = [(gpu.index, call.runtime.stream_of(gpu)) for gpu in ends]
    call.is_work_of(ends[-1])
    if call.is_captured and len(ends) == 1 and not pinned:
        raise RuntimeError(NOT_PINNED)
    sanitizing.before_copy(call, keys, tensor, source, into, target)
    host = None if len(ends) == 2 else tensor if source is None else into
    later = target is None and not pinned  # the host writes what has come
    if call.runtime.unfinished and not later:
        host_memory.use(call, keys[0], host, pinned, source)
    out = call.compute_on(ends[-1])
    if target is not None:
        blocks = place_all([out], target)
        sanitizing.after_kernel(call, keys[-1], [out], blocks)
    nbytes = bytes_in(tensor)
    streams = [stream for _, stream in keys]
    call.runtime.clock.copy(source, target, nbytes, streams, pinned, wait)
    if call.runtime.unfinished and later:
        host_memory.use(call, keys[0], host, pinned, source)
    return out


def _hold(call: Call, tensor, into, source, target, before=None) -> None:
    """A copy that the host does not wait for uses pinned memory until its end."""
    if call.runtime.thread.unlogged or call.is_captured:
        return
    gpu = source or target
    key = (gpu.index, call.runtime.stream_of(gpu))
    block = pinned_block(tensor if source is None else into)
    if block is not None:
        block.streams.add(key)
    host_memory.hold(call, key, tensor, into, block, before)


@handles("_local_scalar_dense", "is_nonzero", "equal")
def read_back(call: Call):
    """`.item()` and its like: a copy to the host, which waits for it."""
    __tracebackhide__ = True
    gpu = call.common_gpu()
    if gpu is not None:
        call.read_values()
    logged = gpu is not None and not call.runtime.thread.unlogged
    if logged and call.runtime.sanitizer.watching:
        sanitizing.before_kernel(call, gpu)
    out = call.func(*call.args, **call.kwargs)
    if logged:
        nbytes = 1 if isinstance(out, bool) else call.tensors[0].element_size()
        log_copy(gpu, None, nbytes)
    return out


@handles("is_pinned")
def ask_is_pinned(call: Call) -> bool:
    return is_pinned(call.tensors[0])


@handles("_pin_memory")
def pin_memory(call: Call):
    """A copy in pinned memory; the host makes it."""
    out = call.computed(aten.clone.default, call.tensors[0])
    pin(out)
    if not call.runtime.thread.unlogged:
        call.runtime.clock.pin(bytes_in(out))
    return out


def log_copy(source, target, nbytes: int) -> None:
    """Log a small copy that PyTorch makes by itself; the host waits for it."""
    runtime = state.current()
    if not runtime.thread.unlogged:
        ends = [gpu for gpu in (source, target) if gpu is not None]
        streams = [runtime.stream_of(gpu) for gpu in ends]
        runtime.clock.copy(source, target, nbytes, streams)
