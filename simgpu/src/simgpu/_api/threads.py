"""Threads of the program: each sees the GPUs, and has a time of its own.

A new thread's time begins where its parent's is, and whoever joins it is as late as its
end. Threads of a pool may be older than the simulator, and so may items of its queue.
"""

import contextlib
import threading
from concurrent.futures import Future
from concurrent.futures.thread import _WorkItem

from simgpu import _runtime as state
from simgpu._dispatch.function_mode import FunctionMode
from simgpu._dispatch.mode import DispatchMode, modes_in_this_thread

_raw_start = threading.Thread.start
_raw_join = threading.Thread.join
_raw_bootstrap_inner = threading.Thread._bootstrap_inner
_raw_new_item = _WorkItem.__init__
_raw_run_item = _WorkItem.run
_raw_set_result, _raw_set_exception = Future.set_result, Future.set_exception
_raw_result, _raw_exception = Future.result, Future.exception


def run_thread(thread) -> None:
    """Modes are per thread: each new thread enters the simulator's own pair."""
    runtime = state.running
    if runtime is None:
        return _raw_bootstrap_inner(thread)
    with FunctionMode(runtime), DispatchMode(runtime), _time_of(thread, runtime):
        return _raw_bootstrap_inner(thread)


def run_item(item, *args) -> None:
    """A thread of a pool runs one item."""
    runtime = state.running
    if runtime is None:
        return _raw_run_item(item, *args)
    with modes_in_this_thread(runtime), _time_of_item(item, runtime):
        return _raw_run_item(item, *args)


def start(thread) -> None:
    """A new thread's time begins where that of its parent is."""
    if state.running is not None:
        thread._simgpu_begin = state.running.clock.now()
    _raw_start(thread)


@contextlib.contextmanager
def _time_of(thread, runtime):
    """What a thread does all its life: its time begins, and is kept for the end."""
    runtime.clock.host = runtime.clock.latest
    runtime.clock.go_on_from(getattr(thread, "_simgpu_begin", None))
    try:
        yield
    finally:
        thread._simgpu_end = runtime.clock.now()


def join(thread, timeout=None) -> None:
    """Whoever waits for a thread is as late as it was at its end."""
    _raw_join(thread, timeout)
    _wait_for(getattr(thread, "_simgpu_end", None))


def _wait_for(end) -> None:
    """Be at least as late as another thread was at `end`."""
    if state.running is not None and end is not None:
        state.running.clock.go_on_from(end, at_least=True)


# What a pool is given begins where who submits it is; who asks for the result waits.


def new_item(item, *args, **kwargs) -> None:
    _raw_new_item(item, *args, **kwargs)
    if state.running is not None:
        item._simgpu_begin = state.running.clock.now()


@contextlib.contextmanager
def _time_of_item(item, runtime):
    """What a thread of a pool does for one item."""
    runtime.clock.go_on_from(getattr(item, "_simgpu_begin", None), at_least=True)
    item.future._simgpu_end = None  # it is one of ours: its end is to be noted
    yield


def set_result(future, result) -> None:
    _note_end(future)
    _raw_set_result(future, result)


def set_exception(future, exception) -> None:
    _note_end(future)
    _raw_set_exception(future, exception)


def _note_end(future) -> None:
    if state.running is not None and hasattr(future, "_simgpu_end"):
        future._simgpu_end = state.running.clock.now()


def result(future, timeout=None):
    try:
        return _raw_result(future, timeout)
    finally:
        _wait_for(getattr(future, "_simgpu_end", None))


def exception(future, timeout=None):
    try:
        return _raw_exception(future, timeout)
    finally:
        _wait_for(getattr(future, "_simgpu_end", None))
