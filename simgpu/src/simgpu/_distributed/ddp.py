"""`DistributedDataParallel`: what its C++ makes is on the GPU of the replica."""

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from simgpu import _runtime as state
from simgpu._compat import DDPJoinHook
from simgpu._dispatch.placement import gpu_of
from simgpu._distributed.groups import communicator_of
from simgpu._errors import NotSimulated

_BUILTIN = "_register_builtin_comm_hook"
_raw_register_builtin_hook = getattr(DistributedDataParallel, _BUILTIN)


@contextlib.contextmanager
def _cpp_tensors_on(gpu) -> Iterator[None]:
    """What C++ makes inside, such as the reducer's buckets, is on `gpu`."""
    thread = state.current().thread
    before, thread.gpu_of_cpp_tensors = thread.gpu_of_cpp_tensors, gpu
    try:
        with _cpp_waits():
            yield
    finally:
        thread.gpu_of_cpp_tensors = before


@contextlib.contextmanager
def _cpp_waits() -> Iterator[None]:
    """C++ waits at once for the collectives that it launches inside."""
    thread = state.current().thread
    thread.cpp_waits += 1
    try:
        yield
    finally:
        thread.cpp_waits -= 1


def waiting(raw):
    """A function of C++ that waits for its own collectives."""

    @functools.wraps(raw)
    def function(*args, **kwargs):
        __tracebackhide__ = True
        with _cpp_waits():
            return raw(*args, **kwargs)

    return function


def on_replica(name: str):
    """A method of DDP in which C++ makes tensors that go with the replica."""
    raw = getattr(DistributedDataParallel, name)

    @functools.wraps(raw)
    def method(ddp, *args, **kwargs):
        __tracebackhide__ = True
        replica = ddp
        if name == "__init__":
            replica = kwargs.get("module", args[0] if args else None)
            _check_replica(replica)
        elif name == "__setstate__":  # it is being unpickled, and has no module yet
            replica = args[0]["_modules"]["module"]
        with _cpp_tensors_on(_gpu_of_module(replica)):
            return raw(ddp, *args, **kwargs)

    return method


def cast_in_order(raw):
    """`_root_copy_hook`, which casts the parameters on a stream of its own.

    PyTorch lets that stream read them while the optimizer may still write: a race,
    which a real card hardly ever loses. Here it waits.
    """

    @functools.wraps(raw)
    def method(ddp, *args, **kwargs):
        __tracebackhide__ = True
        ddp._mp_stream.wait_stream(torch.accelerator.current_stream())
        return raw(ddp, *args, **kwargs)

    return method


def register_builtin_hook(ddp, comm_hook_type) -> None:
    """`_register_builtin_comm_hook`: PyTorch's Python stands for C++'s FP16_COMPRESS.

    They do the same. C++'s copies in a callback of the future, on a stream that waits,
    which is not seen from here.
    """
    __tracebackhide__ = True
    is_fp16 = comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS
    if not is_fp16 or communicator_of(ddp.process_group) is None:
        _raw_register_builtin_hook(ddp, comm_hook_type)
        return
    ddp.register_comm_hook(ddp.process_group, fp16_compress_hook)
    ddp.logger._set_comm_hook_name(str(comm_hook_type))


def in_join(name: str):
    """The same for what a rank does in `join()` that has no more data."""
    raw = getattr(DDPJoinHook, name)

    @functools.wraps(raw)
    def method(hook, *args, **kwargs):
        __tracebackhide__ = True
        with _cpp_tensors_on(_gpu_of_module(hook.ddp)):
            return raw(hook, *args, **kwargs)

    return method


def _gpu_of_module(module):
    if not isinstance(module, torch.nn.Module):
        return None  # DDP will say so
    first = next(module.parameters(), None)
    return None if first is None else gpu_of(first)


def _check_replica(module) -> None:
    """The reducer's buckets would be on one GPU.

    Raises:
        NotSimulated: for a module on several.
    """
    if isinstance(module, torch.nn.Module):
        gpus = {gpu_of(parameter) for parameter in module.parameters()}
        if len(gpus - {None}) > 1:
            raise NotSimulated(
                "DistributedDataParallel of a module on several GPUs",
                "Give each rank one.",
            )
