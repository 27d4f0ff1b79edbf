"""`DistributedDataParallel`: what its C++ makes is on the GPUs of the replica."""

import contextlib
import functools
from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from simgpu import _runtime as state
from simgpu._compat import (
    DDPJoinHook,
    TorchDispatchMode,
    assign_buckets,
    raw_broadcast_coalesced,
    raw_verify_parameters,
)
from simgpu._dispatch.placement import gpu_of, gpus_of
from simgpu._distributed.groups import communicator_of

_raw_reducer = dist.Reducer
_FIRST_BUCKET = 2**20  # bytes of the first bucket, as PyTorch has it

_BUILTIN = "_register_builtin_comm_hook"
_raw_register_builtin_hook = getattr(DistributedDataParallel, _BUILTIN, None)


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


def verify(*args, **kwargs):
    """`_verify_params_across_processes`, whose C++ waits for its own collectives."""
    __tracebackhide__ = True
    with _cpp_waits():
        return raw_verify_parameters(*args, **kwargs)


def broadcast_coalesced(process_group, tensors, *args, **kwargs):
    """`_broadcast_coalesced`: C++ flattens what it takes to be on one device."""
    __tracebackhide__ = True
    with _cpp_waits():
        for of_one_gpu in _by_gpu(tensors).values():
            its = [tensors[index] for index in of_one_gpu]
            raw_broadcast_coalesced(process_group, its, *args, **kwargs)


# -- modules on several GPUs -----------------------------------------------------------


def _by_gpu(tensors) -> dict:
    """GPU -> the positions of the tensors that it has."""
    found: dict = {}
    for index, gpu in enumerate(gpus_of(list(tensors))):
        found.setdefault(gpu, []).append(index)
    return found


def reducer(parameters, buckets, limits, group, sparse, cap, *more, **options):
    """`torch.distributed.Reducer`, whose C++ would mix GPUs in one bucket.

    For a module on several GPUs each bucket has the gradients of one, and stays as it
    is; PyTorch orders them anew after the first backward pass, which is left out.
    """
    __tracebackhide__ = True
    parts = _by_gpu(parameters)
    if len(parts) == 1:
        return _raw_reducer(
            parameters, buckets, limits, group, sparse, cap, *more, **options
        )
    sizes = [_FIRST_BUCKET, cap]
    found = []  # (positions in `parameters`, limit in bytes, GPU)
    for gpu, places in parts.items():
        assigned = assign_buckets(
            [parameters[i] for i in places], sizes, [sparse[i] for i in places]
        )
        for bucket, limit in zip(*assigned, strict=True):
            found.append(([places[i] for i in bucket], limit, gpu))
    found.sort(key=lambda bucket: min(bucket[0]), reverse=True)
    buckets, limits, gpus = map(list, zip(*found, strict=True))
    lengths = [sum(parameters[i].numel() for i in bucket) for bucket in buckets]
    with _BucketsInOrder(list(zip(gpus, lengths, strict=True))):
        return _FixedReducer(
            parameters, buckets, limits, group, sparse, cap, *more, **options
        )


class _FixedReducer(_raw_reducer):
    """One whose buckets are never put in another order."""

    def _rebuild_buckets(self) -> bool:
        return False


class _BucketsInOrder(TorchDispatchMode):
    """While a reducer is made: each flat bucket is made on its own GPU.

    Args:
        buckets: (GPU, elements) of each, as C++ will make them.
    """

    def __init__(self, buckets: list[tuple]):
        super().__init__()
        self._left = deque(buckets)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_next = self._left and func is torch.ops.aten.empty.memory_format
        if not is_next or list(args[0]) != [self._left[0][1]]:
            return func(*args, **kwargs)
        with _cpp_tensors_on(self._left.popleft()[0]):
            return func(*args, **kwargs)


# -- one GPU or several ----------------------------------------------------------------


def on_replica(name: str):
    """A method of DDP in which C++ makes tensors that go with the replica."""
    raw = getattr(DistributedDataParallel, name)

    @functools.wraps(raw)
    def method(ddp, *args, **kwargs):
        __tracebackhide__ = True
        replica = ddp
        if name == "__init__":
            replica = kwargs.get("module", args[0] if args else None)
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
