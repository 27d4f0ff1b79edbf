"""`Work` of collectives: what a program waits for.

A `Work` of PyTorch's own around a future that is done. The last of the future's values
is a tag, which knows the collectives; so it lives as long as the `Work` does.
"""

import contextlib
import functools
import os
from collections.abc import Iterator

import torch
from torch.distributed import DistBackendError

from simgpu import _runtime as state
from simgpu._compat import (
    CppFuture,
    Work,
    current_graph_task_id,
    execution_engine,
    work_from_future,
)
from simgpu._dispatch.mode import modes_in_this_thread
from simgpu._timing.events import StreamPosition

_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
HOOKS = 999  # the number of the stream on which hooks of futures run
_raw_then = CppFuture.then
_raw_value = CppFuture.value
_raw_future_wait = CppFuture.wait
_raw = {
    name: getattr(Work, name)
    for name in ("wait", "synchronize", "get_future", "is_completed", "result")
}


class Launched:
    """What a `Work` stands for: collectives, and what they write.

    Args:
        collectives: that have been launched.
        outputs: tensors that they write.
        host_waits: whether the program waits, as for a barrier.
        stacked: whether NCCL gathers into one tensor before it fills the outputs.
    """

    def __init__(self, collectives: list, outputs: list, host_waits: bool,
                 stacked: bool = False):  # fmt: skip
        self.collectives, self.outputs = collectives, outputs
        self.stacked, self._stack = stacked, None
        self.host_waits = host_waits
        # PyTorch keeps what another stream reads, until somebody waits for it
        self._given = [collective.given for collective in collectives]

    def wait(self) -> None:
        """The current stream goes on after them."""
        runtime = state.current()
        for collective in self.collectives:
            key = collective.meeting.key
            current = (key[0], runtime.thread.streams.get(key[0], 0))
            if current != key:
                runtime.clock.stream_waits_for(current, collective.meeting)
                runtime.sanitizer.stream_waits(current, collective.position.number)
        for tensors in self._given:
            tensors.clear()
        if self.host_waits:
            self.wait_on_host()

    def wait_on_host(self) -> None:
        """The program goes on after them."""
        clock = state.current().clock
        for collective in self.collectives:
            clock.wait_for_position(collective.position)

    def result(self) -> list[torch.Tensor]:
        """What its future has: the outputs, or the tensor that was filled first."""
        if not self.stacked:
            return list(self.outputs)
        if self._stack is None:
            runtime = state.current()
            for collective in self.collectives:
                collective.settle()
            runtime.thread.unlogged += 1  # NCCL has it already
            try:
                with modes_in_this_thread(runtime), torch.no_grad():
                    self._stack = torch.stack(self.outputs)
            finally:
                runtime.thread.unlogged -= 1
        return [self._stack]

    def block(self, limit: float | None) -> None:
        """The program goes on after them: TORCH_NCCL_BLOCKING_WAIT.

        Args:
            limit: seconds of this wait; None: that of the group.

        Raises:
            torch.distributed.DistBackendError: if that is not enough. What has not
                come is given up then.
        """
        for collective in self.collectives:
            try:
                collective.settle(limit)
            except DistBackendError:
                collective.give_up()
                raise
        self.wait_on_host()

    def is_completed(self) -> bool:
        clock = state.current().clock
        clock.event_call()  # NCCL's `Work` asks an event
        return all(clock.reached(c.position) for c in self.collectives)


def new(collectives: list, outputs: list, host_waits: bool = False,
        stacked: bool = False) -> Work:  # fmt: skip
    """A `Work` for collectives that have been launched."""
    ours = Launched(collectives, outputs, host_waits, stacked)
    return work_from_future(_future_of(ours))


def _future_of(ours: Launched) -> torch.futures.Future:
    """A future of the outputs and a tag."""
    future, tag = torch.futures.Future(), torch.empty(0)
    tag._simgpu = ours
    future.set_result([*ours.outputs, tag])
    return future


def launched(work) -> Launched | None:
    """What a `Work` stands for; None if it is another backend's."""
    try:
        return _tag_of(_raw["get_future"](work))
    except RuntimeError:
        return None


def _tag_of(future) -> Launched | None:
    """What the future of a `Work` stands for; None for any other future."""
    try:
        values = _raw_value(future) if future.done() else None
    except Exception:  # what a failed future raises when it is asked
        return None
    last = values[-1] if isinstance(values, list) and values else None
    return getattr(last, "_simgpu", None) if isinstance(last, torch.Tensor) else None


def _waiter(future):
    """What lets the current stream wait for a future; None if it is plain.

    C++ hands on the future of a `Work` as it is: `Reducer._run_allreduce_hook`.
    """
    wait_for_it = getattr(future, "_simgpu", None)
    if wait_for_it is None:
        ours = _tag_of(future)
        wait_for_it = None if ours is None else ours.wait
    return wait_for_it


def wait(work, *args, **kwargs):
    """`Work.wait`: with NCCL, the current stream waits and not the program."""
    __tracebackhide__ = True
    ours = launched(work)
    if ours is not None:
        ours.wait()
        if os.environ.get(_BLOCKING_WAIT, "0") == "1":
            timeout = next(iter((*args, *kwargs.values())), None)
            ours.block(timeout.total_seconds() if timeout else None)
        return True
    thread = state.current().thread
    thread.unlogged += 1  # gloo copies out of a buffer of its own
    try:
        return _raw["wait"](work, *args, **kwargs)
    finally:
        thread.unlogged -= 1


def synchronize(work) -> None:
    if launched(work) is None:
        _raw["synchronize"](work)
    else:
        wait(work)


def is_completed(work) -> bool:
    ours = launched(work)
    return _raw["is_completed"](work) if ours is None else ours.is_completed()


def result(work) -> list:
    ours = launched(work)
    return _raw["result"](work) if ours is None else ours.outputs


def get_future(work):
    """A future of its tensors; who waits for it, waits for the collectives."""
    ours = launched(work)
    future = _raw["get_future"](work)
    if ours is None:
        return future
    before_backward_ends(ours.wait)  # a hook's, for which DDP waits in C++
    return _future_of(ours)


def future_wait(future):
    """`Future.wait`: the current stream waits for what the future stands for."""
    wait_for_it = _waiter(future)
    if wait_for_it is not None:
        wait_for_it()
    ours = _tag_of(future)
    return _raw_future_wait(future) if ours is None else ours.result()


def future_value(future):
    """`Future.value`"""
    ours = _tag_of(future)
    return _raw_value(future) if ours is None else ours.result()


def then(future, callback):
    """What a hook does when a bucket has arrived, on a stream of its own."""
    if not callable(callback):
        return _raw_then(future, callback)  # says so
    runtime = state.current()
    wait_for_it = _waiter(future)
    done: list[StreamPosition] = []

    def in_modes(arrived):
        with modes_in_this_thread(runtime):  # gloo's threads have none
            if wait_for_it is None:
                return callback(arrived)
            with _hook_stream(runtime, done):
                wait_for_it()
                return callback(arrived)

    following = _raw_then(future, in_modes)
    if wait_for_it is None:
        return following
    found = torch.futures.Future()
    found.set_result(following.value())
    found._simgpu = functools.partial(_wait_for_positions, done)
    before_backward_ends(found._simgpu)
    return found


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


def _wait_for_positions(positions: list[StreamPosition]) -> None:
    runtime = state.current()
    index = runtime.thread.device
    for position in positions:
        runtime.clock.stream_waits(
            index, runtime.thread.streams.get(index, 0), position
        )


def before_backward_ends(wait_for_it) -> None:
    """DDP's reducer waits in C++, at the end of backward: wait before it does."""
    if current_graph_task_id() != -1:
        execution_engine.queue_callback(wait_for_it)
