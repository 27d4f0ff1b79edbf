"""`Work` of collectives: what a program waits for.

A `Work` of PyTorch's own around a future that is done. The last of the future's values
is a tag, which knows the collectives; so it lives as long as the `Work` does.

Source: `WorkNCCL` of ProcessGroupNCCL.cpp; its future is one of CUDA, whose callbacks
run on a stream of their own that waits for the collective. Leaves out: hooks of NCCL's
that are called when a collective has ended.
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
    collect_cpp_futures,
    completed_future,
    current_graph_task_id,
    execution_engine,
    work_from_future,
)
from simgpu._dispatch.mode import modes_in_this_thread
from simgpu._dispatch.placement import blocks_of, gpu_of
from simgpu._distributed import exchange as exchanges
from simgpu._timing.events import StreamPosition

_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
HOOKS = 999  # the number of the stream on which hooks of futures run
# operation of c10d -> its number in C++'s `OpType`
_TYPES = {
    "broadcast_": 0, "allreduce_": 1, "reduce_": 3, "allgather_": 4,
    "_allgather_base_": 5, "gather_": 7, "scatter_": 8, "reduce_scatter_": 9,
    "alltoall_base_": 10, "alltoall_": 11, "send": 12, "recv_": 13,
    "_reduce_scatter_base_": 16, "barrier": 1,
}  # fmt: skip
_COALESCED = 17
_NO_TIMING = "getDuration only works if timing was enabled"
_WHERE_TIMING = ", see ProcessGroup::_enable_collectives_timing"
_NOT_YET = "getDuration only works after the work has completed"
_NO_SOURCE = (
    "sourceRank() may only be called on work objects that correspond to a recv or "
    "recv-from-any call."
)
_raw_then = CppFuture.then
_raw_when_done = CppFuture.add_done_callback
_raw_value = CppFuture.value
_raw_future_wait = CppFuture.wait
_raw = {
    name: getattr(Work, name)
    for name in (
        "wait", "synchronize", "get_future", "is_completed", "result", "is_success",
        "source_rank", "_source_rank", "get_future_result", "_get_op_type",
        "_get_duration", "block_current_stream",
    )
}  # fmt: skip


class Launched:
    """What a `Work` stands for: collectives, and what they write.

    Args:
        collectives: that have been launched.
        outputs: tensors that they write.
        operation: of c10d: "allreduce_".
        host_waits: whether the program waits, as for a barrier.
        flat: where NCCL gathers before it fills the outputs.
        is_new_engine: whether `ProcessGroupNCCL2` would have made it.
    """

    def __init__(self, collectives: list, outputs: list, operation: str = "",
                 host_waits: bool = False, flat: torch.Tensor | None = None,
                 is_new_engine: bool = False):  # fmt: skip
        self.collectives, self.outputs = collectives, outputs
        self.operation, self.is_new_engine = operation, is_new_engine
        self.flat, self._is_filled = flat, False
        self.host_waits = host_waits

    def order(self) -> None:
        """The current stream goes on after them."""
        runtime = state.current()
        for collective in self.collectives:
            key = collective.meeting.key
            current = (key[0], runtime.thread.streams.get(key[0], 0))
            if current != key:
                runtime.clock.stream_waits_for(current, collective.meeting)
                runtime.sanitizer.stream_waits(current, collective.position.number)

    def wait(self, is_host_kept: bool = False) -> None:
        """The same, and what they use need not be kept for them any more.

        Args:
            is_host_kept: whether the program goes on even after a barrier.
        """
        self.order()
        for collective in self.collectives:
            collective.release()
        if self.host_waits and not is_host_kept:
            self.wait_on_host()

    def order_values(self) -> None:
        """What waiting for their future does: the current stream will use the values.

        What they use is kept until they have ended, as NCCL does it.
        """
        self.order()
        record_streams(self.outputs if self.flat is None else [self.flat])

    def wait_on_host(self) -> None:
        """The program goes on after them."""
        clock = state.current().clock
        for collective in self.collectives:
            clock.wait_for_position(collective.position)

    def result(self) -> list[torch.Tensor]:
        """What its future has: the outputs, or the tensor that was filled first."""
        if self.flat is None:
            return list(self.outputs)
        if not self._is_filled:
            self._is_filled = True
            for collective in self.collectives:
                collective.settle()
            with exchanges.plain():
                for row, output in zip(self.flat, self.outputs, strict=True):
                    row.copy_(output)
        return [self.flat]

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

    def milliseconds(self) -> float:
        """From where NCCL's stream came to them until they had ended.

        Raises:
            RuntimeError: if timing was not enabled, or if they have not ended.
        """
        clock = state.current().clock
        begun = [collective.begun for collective in self.collectives]
        if None in begun or not begun:
            where = _WHERE_TIMING if self.is_new_engine else ""
            raise RuntimeError(_NO_TIMING + where)
        last = self.collectives[-1].position
        if not clock.reached(last):
            raise RuntimeError(
                _NOT_YET if self.is_new_engine else "CUDA error: device not ready"
            )
        return clock.between(begun[0], last) * 1e3


def new(*args, **kwargs) -> Work:
    """A `Work` for collectives that have been launched; takes what `Launched` takes."""
    return work_from_future(_future_of(Launched(*args, **kwargs)))


def _future_of(ours: Launched) -> CppFuture:
    """A future of the outputs and a tag: to C++, a list of tensors."""
    tag = torch.empty(0)
    tag._simgpu = ours
    values = ours.outputs if ours.flat is None else [ours.flat]
    return completed_future(lambda: [*values, tag])


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
        wait_for_it = None if ours is None else ours.order_values
    return wait_for_it


def record_streams(tensors: list[torch.Tensor]) -> None:
    """Their memory is not used again before the current streams are done with it."""
    for tensor in tensors:
        gpu = gpu_of(tensor)
        for _, block in blocks_of(tensor) if gpu is not None else ():
            stream = state.current().stream_of(gpu)
            gpu.memory.record_stream(block, gpu.index, stream)


# -- what is asked of a `Work` ---------------------------------------------------------


def wait(work, *args, **kwargs):
    """`Work.wait`: with NCCL, the current stream waits and not the program.

    With a time limit the program waits, too.
    """
    __tracebackhide__ = True
    ours = launched(work)
    if ours is not None:
        ours.wait()
        limit = next(iter((*args, *kwargs.values())), None)
        seconds = limit.total_seconds() if limit else None
        if seconds is not None or os.environ.get(_BLOCKING_WAIT, "0") == "1":
            ours.block(seconds)
        return True
    thread = state.current().thread
    thread.unlogged += 1  # gloo copies out of a buffer of its own
    try:
        return _raw["wait"](work, *args, **kwargs)
    finally:
        thread.unlogged -= 1


def _answered_by(answer, name: str):
    """A method of `Work`: of NCCL's, `answer` has it; of others, PyTorch."""
    raw = _raw[name]

    @functools.wraps(raw)
    def method(work, *args, **kwargs):
        __tracebackhide__ = True
        ours = launched(work)
        return raw(work, *args, **kwargs) if ours is None else answer(ours, work)

    return method


def _synchronize(ours: Launched, work) -> None:
    ours.wait(is_host_kept=True)


def _is_success(ours: Launched, work) -> bool:
    told = _raw["is_success"](work)  # that it goes out of use
    if not ours.is_new_engine:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")
    return told


def _source_rank(ours: Launched, work):
    raise RuntimeError(_NO_SOURCE)


def _get_future(ours: Launched, work):
    """A future of its tensors; who waits for it, waits for the collectives."""
    before_backward_ends(ours.wait)  # a hook's, for which DDP waits in C++
    if ours.is_new_engine:
        ours.wait(is_host_kept=True)
    return _future_of(ours)


def _get_future_result(ours: Launched, work) -> torch.futures.Future:
    """A future of how it ended, which NCCL's watchdog sets: 0 is success."""
    ours.wait_on_host()
    found = torch.futures.Future()
    found.set_result(0)
    return found


def methods() -> dict:
    """What stands for the methods of `Work`."""
    answers = {
        "synchronize": _synchronize,
        "block_current_stream": _synchronize,
        "is_completed": lambda ours, work: ours.is_completed(),
        "result": lambda ours, work: ours.result(),
        "is_success": _is_success,
        "source_rank": _source_rank,
        "_source_rank": _source_rank,
        "get_future": _get_future,
        "get_future_result": _get_future_result,
        "_get_op_type": lambda ours, work: _TYPES.get(ours.operation, _COALESCED),
        "_get_duration": lambda ours, work: ours.milliseconds(),
    }
    replaced = {name: _answered_by(how, name) for name, how in answers.items()}
    return {"wait": wait, **replaced}


# -- futures ---------------------------------------------------------------------------


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
    done: list[StreamPosition] = []
    following = _raw_then(future, _in_modes(future, callback, done))
    if _waiter(future) is None:
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
        wait_for_it = _waiter(future)
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
        if _in_backward():
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
    waits = [wait_for_it for wait_for_it in map(_waiter, futures) if wait_for_it]
    together = collect_cpp_futures(futures)
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


def _in_backward() -> bool:
    return current_graph_task_id() != -1


def before_backward_ends(wait_for_it) -> None:
    """DDP's reducer waits in C++, at the end of backward: wait before it does."""
    if _in_backward():
        execution_engine.queue_callback(wait_for_it)
