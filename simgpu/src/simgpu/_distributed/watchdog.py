"""What PyTorch's watchdog of NCCL leaves behind, beside what the simulator says itself.

Models: the lines on stderr when a collective has waited for its whole time limit, as
programs that read logs know them, and the line of a rank that does not wait, but hears
of it; a dump of the flight recorder whenever a collective cannot end; the warning about
a process group that was not destroyed. Leaves out: line numbers of PyTorch's C++, and
the words of the engine that came with 2.14.
"""

import os
import time

import torch

from simgpu import _runtime as state
from simgpu._distributed import flight_entries, flight_recorder
from simgpu._lines import write_line

_LATE = (
    "[Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, "
    "OpType={}, NumelIn={}, NumelOut={}, Timeout(ms)={}) ran for {} milliseconds "
    "before timing out."
)
_STATUS = (
    "[PG ID {} PG GUID {}({}) Rank {}]  failure detected by watchdog at work sequence "
    "id: {} PG status: last enqueued work: {}{}, last completed work: {}"
)
_STACK = "Stack trace of the failed collective: \n{}"
_NO_STACK = (
    "Stack trace of the failed collective not found, potentially because "
    "FlightRecorder is disabled. You can enable it by setting "
    "TORCH_NCCL_TRACE_BUFFER_SIZE to a non-zero value."
)
_CORRUPT = (
    "[Rank {}] Some NCCL operations have failed or timed out. Due to the asynchronous "
    "nature of CUDA kernels, subsequent GPU operations might run on "
    "corrupted/incomplete data."
)
_TOLD = (
    "[PG ID {} PG GUID {}({}) Rank {}] Received a dump signal due to a collective "
    "timeout from  rank {} and we will try our best to dump the debug info. Last "
    "enqueued NCCL work: {}, last completed NCCL work: {}.This is most likely caused "
    "by incorrect usages of collectives, e.g., wrong sizes used across ranks, the "
    "order of collectives is not same for all ranks or the scheduled collective, for "
    "some reason, didn't run. Additionally, this can be caused by GIL deadlock or "
    "other reasons such as network errors or bugs in the communications library (e.g. "
    "NCCL), etc. "
)
_DOWN = "[Rank {}] To avoid data inconsistency, we are taking the entire process down."
_NOT_DESTROYED = (
    "Warning: WARNING: destroy_process_group() was not called before program exit, "
    "which can leak resources. For more info, please see "
    "https://pytorch.org/docs/stable/distributed.html#shutdown (function operator())"
)
# name -> what C++ calls it, and whether all that a rank gives, or takes, counts
_KINDS = {
    "all_reduce": ("ALLREDUCE", False, False), "send": ("SEND", False, False),
    "broadcast": ("BROADCAST", False, False), "reduce": ("REDUCE", False, False),
    "all_gather": ("_ALLGATHER_BASE", False, True),
    "reduce_scatter": ("_REDUCE_SCATTER_BASE", True, False),
    "all_to_all": ("ALLTOALL_BASE", True, True),
    "gather": ("GATHER", False, True), "scatter": ("SCATTER", True, False),
    "barrier": ("ALLREDUCE", False, False),
}  # fmt: skip


def has_seen(collective, error, limit: float) -> None:
    """A collective of this rank cannot end.

    Args:
        collective: of NCCL.
        error: that is raised; it has `waited` if the time limit is over.
        limit: seconds.
    """
    recorder = state.current().flight_recorder
    if recorder:
        recorder.late = True
    late = hasattr(error, "waited")
    if late and os.environ.get("TORCH_NCCL_BLOCKING_WAIT") != "1":
        _say_late(collective, limit)
    flight_recorder.leave_dump(state.current(), late)


def _say_late(collective, limit: float) -> None:
    """The lines of the watchdog about a collective whose time is over."""
    entry, rank = collective.entry, collective.channel.member
    if collective.channel.is_pair and entry is None:
        rank = collective.channel.cluster.rank
    number, kind, given, taken = _described(collective)
    ms = round(limit * 1e3)
    lines = [_LATE.format(rank, number, kind, given, taken, ms, ms)]
    if entry is None:
        lines.append(_NO_STACK)
    else:
        group = entry.group
        last = group.status(state.current().flight_recorder.timed, True)
        started = f", last started work: {last['last_started_collective']}"
        started = started if torch.__version__ >= "2.14" else ""
        lines.append(
            _STATUS.format(group.number, group.name, group.desc, rank, number,
                           last["last_enqueued_collective"], started,
                           last["last_completed_collective"])
        )  # fmt: skip
        lines.append(_STACK.format(flight_entries.stack_of(entry)))
    _print("E", collective.channel.cluster.rank,
           *lines, _CORRUPT.format(rank), _DOWN.format(rank))  # fmt: skip


def was_told(recorder: flight_recorder.Recorder, by: int) -> None:
    """Another rank's time is over: the line of a rank that has not failed itself.

    Args:
        recorder: of this rank.
        by: the other one.
    """
    group = recorder.groups[0]  # the job's, whose thread listens
    last = group.status(recorder.timed, True)
    enqueued, done = (last[f"last_{w}_collective"] for w in ("enqueued", "completed"))
    _print("E", recorder.rank,
           _TOLD.format(group.number, group.name, group.desc, recorder.rank, by,
                        enqueued, done))  # fmt: skip


def _described(collective) -> tuple:
    """Number, kind and elements of a collective."""
    entry, header = collective.entry, collective.header
    if entry is not None:
        return entry.number, entry.kind, *entry.numel
    kind, all_given, all_taken = _KINDS.get(header.name, ("UNKNOWN", False, False))
    most = max([0, *header.gives, *header.takes])
    if header.name == "send" and collective.channel.member == 1:
        kind = "RECV"
    given = sum(header.gives) if all_given else most
    taken = sum(header.takes) if all_taken else most
    return collective.number + 1, kind, given, taken


def warn_of_leak(rank: int, member: int, gpus: int) -> None:
    """This process ends without `destroy_process_group`: one rank of a node says so.

    Args:
        rank: of this process in the job.
        member: its number in the group.
        gpus: of this machine.
    """
    if member % max(gpus, 1) == 0:
        _print("W", rank, _NOT_DESTROYED)


def _print(kind: str, rank: int, *lines: str) -> None:
    """As C++ logs it: kind, date, time, file."""
    now = time.time_ns()
    when = time.localtime(now // 10**9)
    date = f"{kind}{when.tm_mon}{when.tm_mday:02}"
    clock = f"{time.strftime('%H:%M:%S', when)}.{now % 10**9:09}"
    for line in lines:
        write_line(f"[rank{rank}]:[{date} {clock} ProcessGroupNCCL.cpp] {line}")
