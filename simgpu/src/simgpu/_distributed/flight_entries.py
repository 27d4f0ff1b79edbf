"""What the flight recorder keeps of one collective, and of a group: PyTorch's entries.

Times are simulated, behind the moment at which recording began. As in PyTorch, nobody
looks at when a collective begins, nor how long it takes, unless
TORCH_NCCL_ENABLE_TIMING=1. Leaves out: frames of C++.
"""

import functools
import math
import os
import sys
import threading
from collections import deque
from pathlib import Path

import torch

from simgpu._compat import tree_leaves

_OURS = str(Path(__file__).parents[1]) + os.sep
_OVERRIDES = os.sep + os.path.join("torch", "overrides.py")
_DTYPES = {
    "float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16",
    "uint8": "Byte", "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long",
    "complex64": "ComplexFloat", "complex128": "ComplexDouble", "uint16": "UInt16",
    "complex32": "ComplexHalf", "uint32": "UInt32", "uint64": "UInt64",
}  # fmt: skip


# of each tensor: sizes and dtype
Side = list[tuple[list[int], torch.dtype]]
Sides = tuple[Side, Side]
_IN_PLACE = ("allreduce_", "broadcast_", "reduce_", "allreduce_coalesced_")


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
        self.thread_name = _thread_name(self.thread)
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

    def described(self, recorder, state_now: str, frames: bool) -> dict:
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


def stack_of(entry: Entry) -> str:
    """The lines of the stack of a collective, as PyTorch's watchdog prints them."""
    return "".join(
        f"#{i} {code.co_name} from {code.co_filename}:{line}\n"
        for i, (code, line) in enumerate(entry.frames)
    )


@functools.cache
def _thread_name(thread: int) -> str:
    """What the system calls this thread, which has that number."""
    try:
        return Path("/proc/thread-self/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


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


def _named(dtype: torch.dtype) -> str:
    """How C++ calls it: "Float"."""
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name, name[:1].upper() + name[1:])


def _product(sizes: list[int]) -> int:
    return torch.Size(sizes).numel()
