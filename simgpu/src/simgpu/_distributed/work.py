"""`Work` of collectives: what a program waits for.

A `Work` of PyTorch's own around a future that is done. The last of the future's values
is a tag, which knows the collectives; so it lives as long as the `Work` does.

Source: `WorkNCCL` of ProcessGroupNCCL.cpp; its future is one of CUDA, whose callbacks
run on a stream of their own that waits for the collective. Leaves out: hooks of NCCL's
that are called when a collective has ended.
"""

import functools
import os

import torch
from torch.distributed import DistBackendError

from simgpu import _runtime as state
from simgpu._compat import (
    CppFuture,
    Work,
    current_graph_task_id,
    execution_engine,
    torch_C,
    work_from_future,
)
from simgpu._dispatch.own_work import unseen
from simgpu._dispatch.placement import blocks_of, gpu_of
from simgpu._distributed import exchange as exchanges
from simgpu._distributed import gloo_waits

_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
# operation of c10d -> its number in C++'s `OpType`
_TYPES = {
    "broadcast_": 0, "allreduce_": 1, "reduce_": 3, "allgather_": 4,
    "_allgather_base_": 5, "gather_": 7, "scatter_": 8, "reduce_scatter_": 9,
    "alltoall_base_": 10, "alltoall_": 11, "send": 12, "recv_": 13,
    "_reduce_scatter_base_": 16, "barrier": 1,
}  # fmt: skip
_COALESCED, _UNKNOWN = 17, 100
_NO_TIMING = "getDuration only works if timing was enabled"
_WHERE_TIMING = ", see ProcessGroup::_enable_collectives_timing"
_NOT_YET = "getDuration only works after the work has completed"
_NO_SOURCE = (
    "sourceRank() may only be called on work objects that correspond to a recv or "
    "recv-from-any call."
)
_raw_value = CppFuture.value
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
    with unseen():
        tag = torch.empty(0)
    tag._simgpu = ours
    values = ours.outputs if ours.flat is None else [ours.flat]
    return torch_C.fork(lambda: [*values, tag])  # it is run at once


def launched(work) -> Launched | None:
    """What a `Work` stands for; None if it is another backend's."""
    try:
        return tag_of(_raw["get_future"](work))
    except RuntimeError:
        return None


def tag_of(future) -> Launched | None:
    """What the future of a `Work` stands for; None for any other future."""
    try:
        values = _raw_value(future) if future.done() else None
    except Exception:  # what a failed future raises when it is asked
        return None
    last = values[-1] if isinstance(values, list) and values else None
    return getattr(last, "_simgpu", None) if isinstance(last, torch.Tensor) else None


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
    runtime = state.current()
    if not any((*args, *kwargs.values())):  # it has no limit of its own
        asking = _raw["is_completed"], _raw["is_success"]
        gloo_waits.before_wait(work, runtime.awaited_of_gloo, *asking)
    thread = runtime.thread
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


def _get_op_type(ours: Launched, work) -> int:
    if ours.is_new_engine:
        return _UNKNOWN
    return _TYPES.get(ours.operation, _COALESCED)


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
        "_get_op_type": _get_op_type,
        "_get_duration": lambda ours, work: ours.milliseconds(),
    }
    replaced = {name: _answered_by(how, name) for name, how in answers.items()}
    return {"wait": wait, **replaced}


def in_backward() -> bool:
    return current_graph_task_id() != -1


def before_backward_ends(wait_for_it) -> None:
    """DDP's reducer waits in C++, at the end of backward: wait before it does."""
    if in_backward():
        execution_engine.queue_callback(wait_for_it)
