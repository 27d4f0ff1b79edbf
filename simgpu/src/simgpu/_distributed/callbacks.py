"""Futures of collectives: who waits for one, and callbacks.

To C++ they are futures of CPU tensors that are done. Who waits for one on a GPU, waits
on the current stream; a callback runs on a stream of its own that has waited.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch

from simgpu import _runtime as state
from simgpu._compat import CppFuture
from simgpu._dispatch.mode import modes_in_this_thread
from simgpu._distributed.work import (
    before_backward_ends,
    in_backward,
    record_streams,
    tag_of,
)
from simgpu._timing.events import StreamPosition

HOOKS = 999  # the number of the stream on which callbacks run
_raw_collect_all = torch.futures.collect_all
_raw_then = CppFuture.then
_raw_when_done = CppFuture.add_done_callback
_raw_value = CppFuture.value
_raw_wait = CppFuture.wait


def waiter(future):
    """What lets the current stream wait for a future; None if it is plain.

    C++ hands on the future of a `Work` as it is: `Reducer._run_allreduce_hook`.
    """
    wait_for_it = getattr(future, "_simgpu", None)
    if wait_for_it is None:
        ours = tag_of(future)
        wait_for_it = None if ours is None else ours.order_values
    return wait_for_it


def wait(future):
    """`Future.wait`: the current stream waits for what the future stands for."""
    wait_for_it = waiter(future)
    if wait_for_it is not None:
        wait_for_it()
    ours = tag_of(future)
    return _raw_wait(future) if ours is None else ours.result()


def value(future):
    """`Future.value`"""
    ours = tag_of(future)
    return _raw_value(future) if ours is None else ours.result()


def then(future, callback):
    """What a hook does when a bucket has arrived, on a stream of its own."""
    if not callable(callback):
        return _raw_then(future, callback)  # says so
    done: list[StreamPosition] = []
    following = _raw_then(future, _in_modes(future, callback, done))
    if waiter(future) is None:
        return following
    try:
        value = following.value()
    except Exception:  # it is the future's: whoever waits for it will get it
        return following
    found = torch.futures.Future()
    found.set_result(value)
    found._simgpu = functools.partial(_wait_for_positions, done, value)
    before_backward_ends(found._simgpu)
    return found


def add_done_callback(future, callback) -> None:
    """`Future.add_done_callback`: on a stream of its own, too."""
    if callable(callback):
        callback = _in_modes(future, callback, [])
    _raw_when_done(future, callback)


def _in_modes(future, callback, done: list[StreamPosition]):
    """A callback as it runs when a future is done; where it ends is noted."""
    runtime = state.current()

    def run(arrived):
        wait_for_it = waiter(future)
        with modes_in_this_thread(runtime):  # gloo's threads have none
            if wait_for_it is None:
                return callback(arrived)
            with _hook_stream(runtime, done):
                wait_for_it()
                return callback(arrived)

    return run


@contextlib.contextmanager
def _hook_stream(runtime, done: list[StreamPosition]) -> Iterator[None]:
    """Inside, the current stream is one for hooks; where it ends is noted."""
    index = runtime.thread.device
    before = runtime.thread.streams.get(index, 0)
    runtime.sanitizer.watch_accesses()
    runtime.thread.streams[index] = HOOKS
    try:
        yield
    finally:
        runtime.thread.streams[index] = before
        done.append(runtime.clock.record(index, HOOKS))
        if in_backward():
            # a hook of DDP's: what it had for itself may be used again at once, as by
            # PyTorch's own PowerSGD, and what it returns DDP waits for
            runtime.sanitizer.stream_waits((index, before), done[-1].number)


def _wait_for_positions(positions: list[StreamPosition], value) -> None:
    runtime = state.current()
    index = runtime.thread.device
    for position in positions:
        runtime.clock.stream_waits(
            index, runtime.thread.streams.get(index, 0), position
        )
    leaves = value if isinstance(value, (list, tuple)) else [value]
    record_streams([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])


def collect_all(futures: list):
    """`torch.futures.collect_all`: who waits for it, waits for each of them."""
    waits = [wait_for_it for wait_for_it in map(waiter, futures) if wait_for_it]
    together = _raw_collect_all(futures)
    if not waits:
        return together
    collected = torch.futures.Future()

    def run(arrived) -> None:
        try:
            arrived.wait()
        except Exception as error:
            collected.set_exception(error)
        else:
            collected.set_result(futures)

    collected._simgpu = lambda: [wait_for_it() for wait_for_it in waits]
    _raw_when_done(together, run)
    return collected


def wait_all(futures: list) -> list:
    """`torch.futures.wait_all`"""
    return [future.wait() for future in collect_all(futures).wait()]
