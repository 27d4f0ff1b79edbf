"""`torch.futures.Future(devices=["cuda:0"])`: values on GPUs, in the order of streams.

Who waits for such a future waits on the current streams of its devices for what the
current streams had been given when it was set. A callback runs on streams of its own
that have waited. To C++ it is a future of CPU tensors.
"""

import contextlib
import functools

import torch
from torch.futures import Future

from simgpu import _runtime as state
from simgpu._api.naming import as_device
from simgpu._compat import CppFuture, tree_leaves
from simgpu._dispatch.mode import modes_in_this_thread
from simgpu._dispatch.named_devices import find_gpu
from simgpu._dispatch.placement import gpu_of
from simgpu._distributed.callbacks import HOOKS
from simgpu._distributed.work import record_streams

_raw_init = CppFuture.__init__
_raw_set_result = Future.set_result
_raw_then = Future.then


def new(future, *, devices=None) -> None:
    """`Future.__init__`

    Raises:
        ValueError: for a device without an index.
    """
    devices = [as_device(device) for device in devices or ()]
    for device in devices:
        if device.index is None:
            raise ValueError(f"Expected devices to have indices, got {device}")
    _raw_init(future, [])
    future._simgpu_gpus = [find_gpu(device) for device in devices]


def set_result(future, result) -> None:
    """`Future.set_result`; an error is set for tensors on other GPUs."""
    gpus = getattr(future, "_simgpu_gpus", ())
    if gpus:
        leaves = tree_leaves(result)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = {gpu_of(tensor) for tensor in tensors} - {None, *gpus}
        if others:
            future.set_exception(ValueError(_elsewhere(others, gpus)))
            return
        record_streams(tensors)
        runtime = state.current()
        positions = [
            (gpu.index, runtime.clock.record(gpu.index, runtime.stream_of(gpu)))
            for gpu in gpus
        ]
        future._simgpu = functools.partial(_wait, positions, tensors)
    _raw_set_result(future, result)


def _elsewhere(*gpus) -> str:
    names = [", ".join(sorted(gpu.name for gpu in some)) for some in gpus]
    return (
        f"The result contained tensors residing on device(s) {names[0]} which are not "
        f"among the expected device(s) {names[1]}"
    )


def _wait(positions: list[tuple], tensors: list[torch.Tensor]) -> None:
    """The current streams wait, and then use the tensors."""
    runtime = state.current()
    for index, position in positions:
        stream = runtime.thread.streams.get(index, 0)
        runtime.clock.stream_waits(index, stream, position)
    record_streams(tensors)


def then(future, callback) -> Future:
    """`Future.then`: what follows is a future of the same devices."""
    gpus = getattr(future, "_simgpu_gpus", ())
    if not gpus:
        return _raw_then(future, callback)
    following = Future(devices=[gpu.device for gpu in gpus])

    def run(arrived) -> None:
        with modes_in_this_thread(state.current()), _streams_for_hooks(gpus):
            getattr(future, "_simgpu", lambda: None)()
            try:
                following.set_result(callback(future))
            except Exception as error:
                following.set_exception(error)

    future.add_done_callback(run)
    return following


@contextlib.contextmanager
def _streams_for_hooks(gpus: list):
    """Inside, the current stream of each GPU is one that is kept for callbacks."""
    runtime = state.current()
    before = dict(runtime.thread.streams)
    runtime.sanitizer.watch_accesses()
    runtime.thread.streams.update({gpu.index: HOOKS for gpu in gpus})
    try:
        yield
    finally:
        runtime.thread.streams = before
