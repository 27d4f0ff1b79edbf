"""NCCL's flight recorder: the last collectives of this process, for a post-mortem.

Models: the entries of PyTorch's `FlightRecorder` under its own keys, so that its tools
read them (`torchfrtrace`); a dump per rank when a wait for others fails, and on demand,
by a call or through a pipe. Times are simulated, behind the moment at which recording
began. As in PyTorch, nobody looks at when a collective begins, nor how long it takes,
unless TORCH_NCCL_ENABLE_TIMING=1. Leaves out: frames of C++, and the state of NCCL's
own communicators.
"""

import contextlib
import json
import math
import os
import pickle
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch

from simgpu import _runtime as state
from simgpu._compat import thread_name, tree_leaves
from simgpu._distributed.profiling import NAMES as PROFILED

VERSION = "2.10"  # of the format, in PyTorch 2.11 to 2.15
_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DUMPS = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_LOOK = 0.2  # seconds after which one looks whether a dump is wanted
_PATIENCE = 3.0  # seconds that a rank that has failed gives the others for theirs
_SIGNAL = "flight recorder"  # in the job's store: somebody has failed
_OURS = str(Path(__file__).parents[1]) + os.sep
_OVERRIDES = os.sep + os.path.join("torch", "overrides.py")
# operation of c10d -> how C++ calls its kind
_KINDS = {
    "allreduce_": "ALLREDUCE", "barrier": "ALLREDUCE", "broadcast_": "BROADCAST",
    "reduce_": "REDUCE", "allgather_": "ALLGATHER", "gather_": "GATHER",
    "_allgather_base_": "_ALLGATHER_BASE", "reduce_scatter_": "REDUCE_SCATTER",
    "_reduce_scatter_base_": "_REDUCE_SCATTER_BASE", "scatter_": "SCATTER",
    "alltoall_": "ALLTOALL", "alltoall_base_": "ALLTOALL_BASE", "send": "SEND",
    "recv_": "RECV",
}  # fmt: skip

_DTYPES = {
    "float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16",
    "uint8": "Byte", "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long",
    "complex64": "ComplexFloat", "complex128": "ComplexDouble", "uint16": "UInt16",
    "complex32": "ComplexHalf", "uint32": "UInt32", "uint64": "UInt64",
}  # fmt: skip


# of each tensor: sizes and dtype
Side = list[tuple[list[int], torch.dtype]]
Sides = tuple[Side, Side]
# lists of unequal tensors go one by one, by the root of each
_UNEVEN = {"allgather_": ("_broadcast_oop", "BROADCAST"),
           "reduce_scatter_": ("_reduce_oop", "REDUCE")}  # fmt: skip
_IN_PLACE = ("allreduce_", "broadcast_", "reduce_", "allreduce_coalesced_")
BARRIER: Sides = ([([1], torch.float32)],) * 2


class Group:
    """A process group as the recorder counts it.

    Args:
        number: groups over NCCL that this process had before.
        name, desc: of the group.
        ranks: of its members in the job.
    """

    def __init__(self, number: int, name: str, desc: str, ranks: list[int]):
        self.number, self.name, self.desc, self.ranks = number, name, desc, ranks
        self.collectives = self.messages = self.operations = 0
        self.batch = 0  # what the collectives between start and end have as number
        self.entries: deque[Entry] = deque()  # those that may not have ended yet
        self.last = {"enqueued": -1, "started": -1, "completed": -1}

    def status(self, timed: bool, late: bool = False) -> dict[str, int]:
        """The numbers of the last collectives that were launched, begun and done."""
        while self.entries and self.entries[0].state(late) == "completed":
            done = self.entries.popleft()
            self.last["completed"] = max(self.last["completed"], done.number)
            if timed:
                self.last["started"] = max(self.last["started"], done.number)
        return {f"last_{what}_collective": self.last[what] for what in
                ("enqueued", "started", "completed")}  # fmt: skip


class Entry:
    """One collective or message, or what holds several of them together."""

    def __init__(self, record_id: int, group: Group, name: str, kind: str,
                 sides: Sides, collectives: list, clock, limit: float,
                 is_message: bool):  # fmt: skip
        self.record_id, self.group, self.name, self.kind = record_id, group, name, kind
        self.collective_seq, self.message_seq = group.collectives, group.messages
        self.operation, self.is_message = group.operations, is_message
        self.sizes = [[sizes for sizes, _ in side] for side in sides]
        self.dtypes = [[_named(dtype) for _, dtype in side] for side in sides]
        self.collectives = collectives
        self.meetings = [collective.meeting for collective in collectives]
        self.clock, self.created, self.limit = clock, clock.host, limit
        self.thread = threading.get_ident()
        self.thread_name = thread_name()
        self.frames = _frames()

    @property
    def number(self) -> int:
        return self.message_seq if self.is_message else self.collective_seq

    @property
    def numel(self) -> list[int]:
        """Elements that the rank gives and takes."""
        return [sum(map(_product, side)) for side in self.sizes]

    def state(self, late: bool = False) -> str:
        """As the host knows it: at its present time, or after a wait for others."""
        if not self.meetings:
            return "scheduled"
        if any(m.end is None for m in self.meetings):  # nobody has needed its result
            ends = late and all(one.is_agreed() for one in self.collectives)
            return "completed" if ends else "scheduled"
        now = math.inf if late else self.clock.latest
        if max(m.end for m in self.meetings) <= now:
            return "completed"
        return "started" if min(m.start for m in self.meetings) <= now else "scheduled"

    def described(self, recorder: "Recorder", state_now: str, frames: bool) -> dict:
        """Under PyTorch's keys."""
        found, group = {}, self.group
        known = all(m.end is not None for m in self.meetings)
        if frames:
            found["frames"] = [
                {"name": code.co_name, "filename": code.co_filename, "line": line}
                for code, line in self.frames
            ]
        done = state_now == "completed"
        began = recorder.timed and state_now != "scheduled" and known
        start = recorder.ns(min(m.start for m in self.meetings)) if began else None
        ends = [m.end if known else self.clock.latest for m in self.meetings]
        end = recorder.ns(max(ends)) if done else None
        if state_now == "started" and not recorder.timed:
            state_now = "scheduled"  # nobody has asked when it began
        found |= {
            "record_id": self.record_id,
            "pg_id": group.number,
            "process_group": (group.name, group.desc),
            "thread_name": self.thread_name,
            "thread_id": str(self.thread),
            "collective_seq_id": self.collective_seq,
            "p2p_seq_id": self.message_seq,
            "op_id": self.operation,
            "profiling_name": self.name,
            "time_created_ns": recorder.ns(self.created),
        }
        if done and began:
            found["duration_ms"] = (end - start) / 1e6
        for side, sizes, dtypes in zip(
            ("input", "output"), self.sizes, self.dtypes, strict=True
        ):
            found |= {f"{side}_sizes": sizes, f"{side}_dtypes": dtypes}
        return found | {
            "state": state_now,
            "time_discovered_started_ns": start,
            "time_discovered_completed_ns": end,
            "retired": done,
            "timeout_ms": round(self.limit * 1e3),
            "is_p2p": self.is_message,
        }


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
            print(f"flight recorder: cannot write {path}: {error}", file=sys.stderr)

    # -- dumps that others ask for -----------------------------------------------------

    def listen(self, board) -> None:
        """Dump when somebody writes to the pipe, or when another rank has failed.

        Only where a file or a pipe is named: it takes a thread, as in PyTorch.

        Args:
            board: of the job.
        """
        pipe = os.environ.get(_PIPE) if hasattr(os, "mkfifo") else None
        if self._thread is None and (pipe or (_setting(_FILE) and _flag(_DUMPS, True))):
            file = self._open_pipe(f"{pipe}{self.rank}.pipe") if pipe else None
            self._thread = threading.Thread(
                target=self._serve, args=(file, board), daemon=True
            )
            self._thread.start()

    @staticmethod
    def _open_pipe(name: str) -> int:
        Path(name).unlink(missing_ok=True)
        os.mkfifo(name, 0o666)
        return os.open(name, os.O_RDWR | os.O_NONBLOCK)  # open at both ends: no EOF

    def _serve(self, pipe: int | None, board) -> None:
        wanted = _flag(_DUMPS, True)
        with contextlib.suppress(RuntimeError):  # the store is gone
            while True:
                asked = select.select([] if pipe is None else [pipe], [], [], _LOOK)[0]
                if asked and os.read(pipe, 4096):
                    self.write()
                if wanted and board.store.check([_SIGNAL]):
                    break
            if not self.late:
                self.late = True
                self.write()
            board.store.set(f"{_SIGNAL}/{self.rank}", "done")

    def tell_others(self, board) -> None:
        """This rank has failed: the others dump, too, before it ends them."""
        board.store.set(_SIGNAL, "dump")
        end = time.monotonic() + _PATIENCE
        left = [rank for rank in range(board.size) if rank != self.rank]
        while left and time.monotonic() < end:
            left = [rank for rank in left if board.is_alive(rank)
                    and not board.store.check([f"{_SIGNAL}/{rank}"])]  # fmt: skip
            time.sleep(0.02)


# -- of this process -------------------------------------------------------------------


def begin(runtime, group, ranks: list[int], nccl: str) -> Group | None:
    """A group over NCCL is made; None if nothing is to be recorded.

    Args:
        runtime: of the simulator.
        group: of PyTorch.
        ranks: of its members in the job.
        nccl: its version.
    """
    if runtime.flight_recorder is None:
        most = int(_setting(_SIZE) or 2000)
        runtime.flight_recorder = Recorder(most, nccl) if most > 0 else False
    if not runtime.flight_recorder:
        return None
    found = runtime.flight_recorder.group(
        group.group_name, group.group_desc, ranks, runtime.cluster.rank
    )
    runtime.flight_recorder.listen(runtime.cluster.board)
    return found


def told(values) -> Side:
    """Of tensors in lists of lists."""
    leaves = (x for x in tree_leaves(values) if isinstance(x, torch.Tensor))
    return [(list(tensor.shape), tensor.dtype) for tensor in leaves]


def sides_of(operation: str, args) -> Sides:
    """What an operation of c10d reads and writes, as NCCL's kernel sees it."""
    taken = told(args[0])
    if operation in _IN_PLACE:
        return taken, taken
    given = told(args[1])
    if operation == "allgather_":
        taken = _stacked(taken)
    if operation == "reduce_scatter_":
        given = _stacked(given)
    if operation == "gather_":
        taken = taken[:1]
    if operation == "scatter_":
        given = given[:1]
    return given, taken


def _stacked(side: Side) -> Side:
    """One tensor for equal ones."""
    sizes, dtype = side[0]
    alike = all(one == side[0] for one in side)
    return [([len(side), *sizes], dtype)] if alike else side


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


def leave_dump(runtime) -> None:
    """A wait for others has failed: leave what was recorded, if that is wanted."""
    recorder = runtime.flight_recorder
    if recorder:
        recorder.late = True
        if _flag(_DUMPS, True):
            recorder.write(_flag(("TORCH_INCLUDE_STACK_TRACE",), True))
            if recorder.listens and runtime.cluster is not None:
                with contextlib.suppress(RuntimeError):
                    recorder.tell_others(runtime.cluster.board)


def stack_of(entry: Entry) -> str:
    """The lines of the stack of a collective, as PyTorch's watchdog prints them."""
    return "".join(
        f"#{i} {code.co_name} from {code.co_filename}:{line}\n"
        for i, (code, line) in enumerate(entry.frames)
    )


def _frames() -> list[tuple]:
    """(code, line) of the frames that call, the innermost first, without our own."""
    found: dict[object, int] = {}  # those behind the last frame of the function mode
    before: list[tuple] = []
    frame, again = sys._getframe(3), False
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_OVERRIDES):
            again = True  # the mode calls again what has called it
        elif not code.co_filename.startswith(_OURS):
            if not (again and code in found):
                if again or code in found:
                    before, found, again = [*before, *found.items()], {}, False
                found[code] = frame.f_lineno
        frame = frame.f_back
    return [*before, *found.items()]


def _setting(names: tuple[str, ...]) -> str:
    """The first of these variables that is set."""
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _flag(names: tuple[str, ...], default: bool) -> bool:
    value = _setting(names).lower()
    return value in ("1", "y", "yes", "t", "true") if value else default


def _named(dtype: torch.dtype) -> str:
    """How C++ calls it: "Float"."""
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name, name[:1].upper() + name[1:])


def _product(sizes: list[int]) -> int:
    return torch.Size(sizes).numel()
