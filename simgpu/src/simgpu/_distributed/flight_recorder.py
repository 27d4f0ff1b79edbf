"""NCCL's flight recorder: the last collectives of this process, for a post-mortem.

Models: the entries of PyTorch's `FlightRecorder` under its own keys, so that its tools
read them (`torchfrtrace`); a dump per rank when a wait for others fails, and on demand,
by a call or through a pipe. Unlike PyTorch, no file is written where nothing is said
of dumps. Times are simulated, behind the moment at which recording
began. As in PyTorch, nobody looks at when a collective begins, nor how long it takes,
unless TORCH_NCCL_ENABLE_TIMING=1. Leaves out: frames of C++, and the state of NCCL's
own communicators.
"""

import contextlib
import json
import os
import pickle
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from simgpu import _runtime as state
from simgpu._distributed.flight_entries import Entry, Group, Sides, told
from simgpu._distributed.profiling import NAMES as PROFILED
from simgpu._lines import write_line

VERSION = "2.10"  # of the format, in PyTorch 2.11 to 2.15
_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DUMPS = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_LOOK = 0.2  # seconds after which one looks whether a dump is wanted
_PATIENCE = 4.0  # seconds that a rank that has failed gives the others for theirs
_OWN = 1.5, 3.0  # seconds for a rank that is told to be late itself, and if it waits
_SIGNAL = "flight recorder"  # in the job's store: somebody has failed
# operation of c10d -> how C++ calls its kind
_KINDS = {
    "allreduce_": "ALLREDUCE", "barrier": "ALLREDUCE", "broadcast_": "BROADCAST",
    "reduce_": "REDUCE", "allgather_": "ALLGATHER", "gather_": "GATHER",
    "_allgather_base_": "_ALLGATHER_BASE", "reduce_scatter_": "REDUCE_SCATTER",
    "_reduce_scatter_base_": "_REDUCE_SCATTER_BASE", "scatter_": "SCATTER",
    "alltoall_": "ALLTOALL", "alltoall_base_": "ALLTOALL_BASE", "send": "SEND",
    "recv_": "RECV",
}  # fmt: skip

# lists of unequal tensors go one by one, by the root of each
_UNEVEN = {"allgather_": ("_broadcast_oop", "BROADCAST"),
           "reduce_scatter_": ("_reduce_oop", "REDUCE")}  # fmt: skip
BARRIER: Sides = ([([1], torch.float32)],) * 2


class Recorder:
    """The entries of this process, of which it keeps the last.

    Args:
        most: entries that are kept.
        nccl: its version, as text.
    """

    def __init__(self, most: int, nccl: str):
        self.nccl = nccl
        self.entries: deque[Entry] = deque(maxlen=most)
        self.groups: list[Group] = []
        self.recorded = 0  # since the last reset
        self.rank = -1
        self.late = False  # a wait for others has failed, and time has passed
        self.timed = _flag(("TORCH_NCCL_ENABLE_TIMING",), False)
        self._origin = time.time_ns()
        self._thread: threading.Thread | None = None

    def ns(self, seconds: float) -> int:
        """Simulated seconds as a time of day in nanoseconds."""
        return self._origin + round(seconds * 1e9)

    def group(self, name: str, desc: str, ranks: list[int], rank: int) -> Group:
        """A process group over NCCL has been made."""
        self.groups.append(Group(len(self.groups), name, desc, ranks))
        self.rank = rank
        return self.groups[-1]

    def record(self, communicator, name: str, kind: str, sides: Sides,
               collectives: list, clock, is_message: bool = False) -> None:  # fmt: skip
        """An operation has been launched, or told between start and end.

        Args:
            communicator: of its group.
            name: as PyTorch's profiler has it, behind "nccl:".
            kind: as C++ calls it: "ALLREDUCE".
            sides: what it reads, and what it writes.
            collectives: that it has launched; none for a part of a batch.
            clock: of this process.
            is_message: whether it goes to or comes from one rank.
        """
        group: Group = communicator.record
        entry = Entry(self.recorded, group, f"nccl:{name}", kind, sides, collectives,
                      clock, communicator.limit, is_message)  # fmt: skip
        self.recorded += 1
        self.entries.append(entry)
        if collectives:
            collectives[-1].entry = entry
            group.entries.append(entry)
            group.last["enqueued"] = entry.number
            if len(group.entries) > 64:
                group.status(self.timed)

    @property
    def listens(self) -> bool:
        """Whether others may ask for a dump."""
        return self._thread is not None

    def reset(self) -> None:
        self.entries.clear()
        self.recorded = 0

    def described(self, collectives: bool = True, frames: bool = True,
                  only_active: bool = False) -> dict:  # fmt: skip
        """The trace as PyTorch dumps it."""
        used = [group for group in self.groups if group.last["enqueued"] >= 0]
        found = {
            "version": VERSION,
            "pg_config": {
                group.name: {"name": group.name, "desc": group.desc,
                             "ranks": str(group.ranks)}
                for group in used
            },
            "comm_lib_version": self.nccl,
            "pg_status": {str(g.number): g.status(self.timed, self.late) for g in used},
        }  # fmt: skip
        if collectives:
            found["entries"] = [
                entry.described(self, state_now, frames)
                for entry, state_now in self._states()
                if not only_active or state_now != "completed"
            ]
        return found

    def _states(self) -> Iterator[tuple[Entry, str]]:
        """Each entry, and how far it is: no farther than one before on its stream."""
        stuck = set()
        for entry in list(self.entries):
            keys = {meeting.key for meeting in entry.meetings}
            found = "scheduled" if keys & stuck else entry.state(self.late)
            if found != "completed":
                stuck |= keys
            yield entry, found

    def write(self, frames: bool = True) -> None:
        """Leave the trace in the file of this rank, for `torchfrtrace`."""
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        prefix = _setting(_FILE) or os.path.join(cache, "torch", "comm_lib_trace_rank_")
        only_active = _flag(("TORCH_INCLUDE_ONLY_ACTIVE",), False)
        path = Path(f"{prefix}{self.rank}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pickle.dumps(self.described(True, frames, only_active), 2))
        except OSError as error:
            write_line(f"flight recorder: cannot write {path}: {error}")

    # -- dumps that others ask for -----------------------------------------------------

    def listen(self, board, was_told: Callable) -> None:
        """Dump when somebody writes to the pipe, or when another rank has failed.

        Only where a file or a pipe is named: it takes a thread, as in PyTorch.

        Args:
            board: of the job.
            was_told: says in the log that another rank's time is over.
        """
        pipe = os.environ.get(_PIPE) if hasattr(os, "mkfifo") else None
        if self._thread is None and (pipe or (_setting(_FILE) and _flag(_DUMPS, True))):
            file = self._open_pipe(f"{pipe}{self.rank}.pipe") if pipe else None
            self._thread = threading.Thread(
                target=self._serve, args=(file, board, was_told), daemon=True
            )
            self._thread.start()

    @staticmethod
    def _open_pipe(name: str) -> int:
        Path(name).unlink(missing_ok=True)
        os.mkfifo(name, 0o666)
        return os.open(name, os.O_RDWR | os.O_NONBLOCK)  # open at both ends: no EOF

    def _serve(self, pipe: int | None, board, was_told: Callable) -> None:
        wanted = _flag(_DUMPS, True)
        with contextlib.suppress(RuntimeError):  # the store is gone
            while True:
                asked = select.select([] if pipe is None else [pipe], [], [], _LOOK)[0]
                if asked and os.read(pipe, 4096):
                    self.write()
                if wanted and board.store.check([_SIGNAL]):
                    break
            by = board.store.get(_SIGNAL)
            if by:
                self._come_to_own_limit(board)
            if not self.late:
                self.late = True
                if by:
                    was_told(self, int(by))
                self.write()
            board.store.set(f"{_SIGNAL}/{self.rank}", "done")

    def _come_to_own_limit(self, board) -> None:
        """Another rank's time is over; a rank that waits as well speaks for itself.

        PyTorch is as late with it: it looks for such a signal once a second.
        """
        least, most = (time.monotonic() + seconds for seconds in _OWN)
        while not self.late and time.monotonic() < most:
            if time.monotonic() > least and not board.waits():
                break
            time.sleep(0.02)

    def tell_others(self, board, late: bool) -> None:
        """This rank has failed: the others dump, too, before it ends them.

        Args:
            board: of the job.
            late: whether its time is over.
        """
        board.store.set(_SIGNAL, str(self.rank) if late else "")
        end = time.monotonic() + _PATIENCE
        left = [rank for rank in range(board.size) if rank != self.rank]
        while left and time.monotonic() < end:
            left = [rank for rank in left if board.is_alive(rank)
                    and not board.store.check([f"{_SIGNAL}/{rank}"])]  # fmt: skip
            time.sleep(0.02)


# -- of this process -------------------------------------------------------------------


def begin(runtime, group, ranks: list[int], nccl: str,
          was_told: Callable) -> Group | None:  # fmt: skip
    """A group over NCCL is made; None if nothing is to be recorded.

    Args:
        runtime: of the simulator.
        group: of PyTorch.
        ranks: of its members in the job.
        nccl: its version.
        was_told: see `Recorder.listen`.
    """
    if runtime.flight_recorder is None:
        most = int(_setting(_SIZE) or 2000)
        runtime.flight_recorder = Recorder(most, nccl) if most > 0 else False
    if not runtime.flight_recorder:
        return None
    found = runtime.flight_recorder.group(
        group.group_name, group.group_desc, ranks, runtime.cluster.rank
    )
    runtime.flight_recorder.listen(runtime.cluster.board, was_told)
    return found


def note(runtime, communicator, operation: str, sides: Sides,
         collectives: list) -> None:  # fmt: skip
    """An operation of c10d has been launched as collectives, or told in a batch.

    Args:
        runtime: of the simulator.
        communicator: of the group.
        operation: its name, such as "allreduce_".
        sides: what the rank gives, and where it takes what comes.
        collectives: that were launched.
    """
    group, recorder = communicator.record, runtime.flight_recorder
    if communicator.batch is None or not group.batch:
        group.collectives += 1
    group.operations += 1
    kind, clock = _KINDS.get(operation, "COALESCED"), runtime.clock
    given, taken = sides
    if operation in _UNEVEN and len(given) * len(taken) > 1:
        name, part = _UNEVEN[operation]
        for one in given if len(given) > 1 else taken:
            pair = ([one], taken) if len(given) > 1 else (given, [one])
            recorder.record(communicator, name, part, pair, [], clock)
        recorder.record(communicator, "coalesced", kind, ([], []), collectives, clock)
        return
    if communicator.batch is not None:
        group.batch, collectives = group.collectives, []
    name = PROFILED.get(operation, operation)
    recorder.record(communicator, name, kind, sides, collectives, clock)


def note_message(runtime, communicator, arrow: str, tensor, collective) -> None:
    """A send or a receive has been launched, or told in a batch."""
    group, recorder = communicator.record, runtime.flight_recorder
    in_batch = communicator.batch is not None
    if not in_batch or not group.batch:
        group.messages += 1
    group.operations += 1
    if in_batch:
        group.batch = -1
    kind = "SEND" if arrow.startswith("send") else "RECV"
    side = told(tensor)
    recorder.record(communicator, arrow, kind, (side, side),
                    [] if in_batch else [collective], runtime.clock, True)  # fmt: skip


def note_batch(runtime, communicator, batch: list) -> None:
    """What was told since `start_coalescing` goes at once."""
    group = communicator.record
    if batch and group.batch:
        runtime.flight_recorder.record(
            communicator, "coalesced", "COALESCED", ([], []), batch, runtime.clock,
            group.batch < 0,
        )  # fmt: skip
    group.batch = 0


def dump(includeCollectives=None, includeStackTraces=None, onlyActive=None) -> bytes:  # noqa: N803
    """`torch._C._distributed_c10d._dump_nccl_trace`"""
    trace = _of_this_process(includeCollectives, includeStackTraces, onlyActive)
    return pickle.dumps(trace, 2)


def dump_json(includeCollectives=None, onlyActive=None) -> bytes:  # noqa: N803
    """`torch._C._distributed_c10d._dump_nccl_trace_json`: without frames."""
    trace = _of_this_process(includeCollectives, False, onlyActive)
    for group in trace["pg_status"].values():
        group.update({key: str(value) for key, value in group.items()})
    for entry in trace.get("entries", ()):
        for key in ("time_discovered_started_ns", "time_discovered_completed_ns"):
            entry[key] = entry[key] or 0
    if not trace.get("entries"):
        trace.pop("entries", None)
    return json.dumps(trace).encode()


def reset() -> None:
    """`torch._C._distributed_c10d._reset_fr_recording_nccl`"""
    if state.current().flight_recorder:
        state.current().flight_recorder.reset()


def write_file(rank: int, *args, **kwargs) -> None:
    """`torch._C._distributed_c10d._dump_fr_trace_file` of NCCL's"""
    recorder = state.current().flight_recorder
    if recorder:
        recorder.rank = rank
        recorder.write()


def _of_this_process(collectives, frames, only_active) -> dict:
    runtime = state.current()
    recorder = runtime.flight_recorder or Recorder(1, "")
    if runtime.cluster is not None:
        runtime.cluster.settle_what_is_there()
    return recorder.described(
        collectives is not False, frames is not False, bool(only_active)
    )


def leave_dump(runtime, late: bool) -> None:
    """A wait for others has failed: leave what was recorded, if that is wanted.

    Args:
        runtime: of the simulator.
        late: whether it has waited for its whole time limit.
    """
    recorder = runtime.flight_recorder
    if recorder:
        recorder.late = True
        # a program that has said nothing of dumps leaves no file in the user's home
        if _flag(_DUMPS, bool(_setting(_FILE))):
            recorder.write(_flag(("TORCH_INCLUDE_STACK_TRACE",), True))
            if recorder.listens and runtime.cluster is not None:
                with contextlib.suppress(RuntimeError):
                    recorder.tell_others(runtime.cluster.board, late)


def _setting(names: tuple[str, ...]) -> str:
    """The first of these variables that is set."""
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _flag(names: tuple[str, ...], default: bool) -> bool:
    value = _setting(names).lower()
    return value in ("1", "y", "yes", "t", "true") if value else default
