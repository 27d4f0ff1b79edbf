"""Collectives: gloo computes the values, the clock takes NCCL's time for them."""

import re

import torch
from torch.utils._pytree import tree_leaves

from simgpu import runtime
from simgpu.dispatch.call import Call
from simgpu.dispatch.devices import current_gpu
from simgpu.dispatch.mode import modes_in_this_thread
from simgpu.dispatch.operation import handles
from simgpu.dispatch.placement import gpu_of, place
from simgpu.distributed import checks, messages
from simgpu.distributed.groups import backends_of
from simgpu.errors import NotSimulated

# in gloo's words: what NCCL can do and gloo cannot
_BEYOND_GLOO = re.compile(
    "does not support|Invalid scalar type|can't be cast|nsupported"
)
_raw_wait = torch._C._distributed_c10d.Work.wait
_raw_then = torch._C.Future.then


@handles("c10d::", "_c10d_functional::")
def run_collective(call: Call):
    """An operation of c10d: check as NCCL does, let gloo run it, and time it."""
    __tracebackhide__ = True
    func, args, kwargs = call.func, call.args, call.kwargs
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    name = func._schema.name
    if name == "c10d::barrier":
        return _run_barrier(call)
    if func.namespace == "c10d":
        checks.check(call.runtime, name, messages.group_in(args), tensors)
    try:
        out = func(*args, **kwargs)
    except RuntimeError as error:
        if _BEYOND_GLOO.search(str(error)):
            raise NotSimulated(name, f"gloo, which answers for NCCL: {error}") from None
        raise
    gpu = gpu_of(tensors[0]) if tensors else None
    if gpu is not None:
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                place(tensor, gpu)
        _log(call, gpu, tensors)
    return out


def _log(call: Call, gpu, tensors: list[torch.Tensor]) -> None:
    """Tell the clock of a collective on `gpu`."""
    message = messages.message_of(call.func, call.args, call.kwargs)
    if call.func._schema.name == "c10d::recv_":
        message = messages.Message("", "recv", sum(t.nbytes for t in tensors), 2)
    if message is not None and not call.runtime.thread.unlogged:
        sent = _bytes_sent(message, tensors)
        stream = call.runtime.stream_of(gpu)
        clock = call.runtime.clock
        clock.collective(gpu, stream, message.name, message.nbytes, sent)


def _bytes_sent(message: messages.Message, tensors: list[torch.Tensor]) -> int:
    """Bytes that leave this rank's GPU, or come to it where those are more."""
    if message.ranks == 1:
        return 0
    if message.name not in ("gather", "scatter"):
        return message.sent
    here = sum(tensor.nbytes for tensor in tensors)
    if len(tensors) == 1:  # it sends its part, or takes it
        return here
    return here * (message.ranks - 1) // (message.ranks + 1)  # all but its own part


def _run_barrier(call: Call):
    """NCCL's is a collective of almost nothing, for which the host waits."""
    out = call.func(*call.args, **call.kwargs)
    if "nccl" in backends_of(messages.group_in(call.args)).values():
        gpu, clock = current_gpu(), call.runtime.clock
        stream = call.runtime.stream_of(gpu)
        clock.collective(gpu, stream, "barrier", 0, 0)
        clock.wait_for_stream(gpu.index, stream)
    return out


def wait(work, *args, **kwargs):
    """gloo's `wait` copies out of a buffer of its own, where NCCL has none."""
    thread = runtime.current().thread
    thread.unlogged += 1
    try:
        return _raw_wait(work, *args, **kwargs)
    finally:
        thread.unlogged -= 1


def then(future, callback):
    """What a hook does when a bucket has arrived: gloo's threads have no modes."""
    now = runtime.current()

    def in_modes(done):
        with modes_in_this_thread(now):
            return callback(done)

    return _raw_then(future, in_modes)
