"""What a profile recorded of the GPUs, and how a trace shows it.

Models: the rows that readers of traces look up, as kineto writes them (output_json.cpp,
CuptiActivity.cpp): kernels and copies with device, stream and correlation; the calls
`cudaLaunchKernel` and `cudaMemcpyAsync` that launched them, with arrows between the two
(`ac2g`), one `cudaGraphLaunch` for all of a CUDA graph; ranges of the program on the
GPUs (`gpu_user_annotation`); of collectives what `record_param_comms` tells;
`deviceProperties`. Leaves out: grids, registers, occupancy.
Times of GPUs are simulated, from the start of the profile on; those of the host are
real, so that a kernel may begin before its launch.
"""

import bisect
import os
import threading
import time
from typing import Any, NamedTuple

import torch

from simgpu._compat import current_graph_task_id
from simgpu._dispatch.own_work import RANGE

MODE = "PythonDispatchMode"  # a row for each operation that our mode sees
_COMMS = "record_param_comms"
_LAUNCH = 5.0  # µs of a call that launches; the host's own time is not simulated
_HOST = ("cpu_op", "user_annotation", "python_function")


class Launch(NamedTuple):
    """Work of a GPU, and where and when the host launched it."""

    real_ns: int
    thread: int  # as the operating system numbers it
    in_backward: bool
    event: Any  # of the clock
    span: tuple[float, float]  # µs since the profile began, simulated


class Range(NamedTuple):
    """A range of the program on a stream, from its first work there to its last."""

    name: str
    device: str
    stream: int
    start: float
    end: float


class Recording:
    """What the clock logs during a profile, with the real time at which it does."""

    def __init__(self, clock):
        self.clock = clock
        self.started = clock.host  # simulated seconds
        self.events: list[tuple[int, int, bool, Any]] = []
        self.memory = None  # if that is profiled, too

    def append(self, event) -> None:
        backward = current_graph_task_id() != -1
        here = time.time_ns(), threading.get_native_id(), backward
        if event.about is not None:  # logged when its end is known, launched before
            here = event.about["launch"]
        self.events.append((*here, event))

    def finish(self) -> None:
        others = [r for r in self.clock.recordings if r is not self]
        self.clock.recordings[:] = others
        if self.memory is not None:
            self.memory.finish()

    def launches(self) -> list[Launch]:
        """In the order in which the host launched them."""
        found = []
        for *here, event in self.events:
            # a collective's kernel waits on the GPU for the other ranks
            span = [(t - self.started) * 1e6 for t in (event.start, event.end)]
            found.append(Launch(*here, event, tuple(span)))
        return sorted(found, key=lambda launch: launch.real_ns)


def index_of(device: str) -> int:
    return int(device.removeprefix("cuda:"))


def kernel_name(launch: Launch) -> str:
    """As a profile names it: a copy by its ends, a collective by NCCL's kernel."""
    event = launch.event
    if event.kind == "copy":
        ends = ["H" if end == "cpu" else "D" for end in (event.source, event.target)]
        return f"Memcpy {ends[0]}to{ends[1]}"
    return event.name if event.about is None else event.about["kernel"]


def of_the_program(spans: list[tuple[int, float, float, str]]) -> list[int]:
    """Which rows of the host are the program's, in order of time.

    Left out are rows of modes, what ours runs again under the same name, and what the
    simulator runs itself.

    Args:
        spans: (thread, start, end, name) of each row.
    """
    kept, stacks = [], {}  # thread -> [(end, name, name that it runs again, is ours)]
    order = sorted(range(len(spans)), key=lambda i: (spans[i][1], -spans[i][2]))
    for i in order:
        thread, _, end, name = spans[i]
        stack = stacks.setdefault(thread, [])
        while stack and stack[-1][0] < end:
            stack.pop()
        _, parent, again, ours = stack[-1] if stack else (0.0, None, None, False)
        ours = ours or name == RANGE
        if name == MODE:
            again = parent
        elif name != again:
            again = None
            if not ours:
                kept.append(i)
        stack.append((end, name, again, ours))
    return kept


def ranges(launches: list[Launch], marks: list[tuple[str, int, int]]) -> list[Range]:
    """Where the ranges of a program are on the GPUs.

    Backward runs in a thread of its own on a card, where no range of the program is
    open; NCCL's collectives have their own ranges.

    Args:
        launches: in order of time.
        marks: (name, start, end) of ranges of the program, in real ns.
    """
    found = []
    times = [launch.real_ns for launch in launches]
    for name, start, end in marks:
        inside = launches[bisect.bisect_left(times, start) : bisect.bisect(times, end)]
        lanes: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for launch in inside:
            if not launch.in_backward:
                lane = launch.event.device, launch.event.stream
                lanes.setdefault(lane, []).append(launch.span)
        for lane, spans in lanes.items():
            first, last = min(s for s, _ in spans), max(e for _, e in spans)
            found.append(Range(name, *lane, first, last))
    for launch in launches:
        event = launch.event
        if event.about is not None:
            lane = event.about["range"], event.device, event.stream
            found.append(Range(*lane, *launch.span))
    return found


# -- the trace -------------------------------------------------------------------------


def complete(trace: dict, recording: Recording, with_host: bool) -> None:
    """Add the GPUs to a trace of the host, and take out what is the simulator's."""
    launches = recording.launches()
    host = _host_rows(trace["traceEvents"], launches, trace["baseTimeNanoseconds"])
    begin = min((row["ts"] for row in host if row.get("ph") == "X"), default=0.0)
    base = trace["baseTimeNanoseconds"]
    added = [row for index in _indices(launches) for row in _process(index)]
    outer = [row for row in host if row.get("cat") in _HOST]
    ids = _external_ids(launches, outer, base)
    graphs: dict[int, int] = {}  # number of a graph's launch -> of its first row
    for number, (launch, ident) in enumerate(zip(launches, ids, strict=True), 1):
        graph = launch.event.graph
        first = graphs.setdefault(graph, number) if graph else number
        rows = _rows(launch, first, ident, begin, base)
        added += rows if first == number else rows[:1]
    marks = [
        (row["name"], base + int(row["ts"] * 1e3),
         base + int((row["ts"] + row["dur"]) * 1e3))
        for row in outer
        if row["cat"] == "user_annotation" and not row["name"].startswith("nccl:")
    ]  # fmt: skip
    if with_host:  # it tells of ranges
        added += [_range_row(found, begin) for found in ranges(launches, marks)]
    else:
        host = [row for row in host if row.get("cat") not in _HOST]
    trace["traceEvents"] = host + added
    trace["deviceProperties"] = [
        _properties(index) for index in range(torch.cuda.device_count())
    ]


def _host_rows(rows: list[dict], launches: list[Launch], base: int) -> list[dict]:
    """Rows of the program; those of collectives with what PyTorch tells of them."""
    spans = [row for row in rows if row.get("cat") in _HOST and row["ph"] == "X"]
    kept = of_the_program(
        [(row["tid"], row["ts"], row["ts"] + row["dur"], row["name"]) for row in spans]
    )
    left_out = {id(row) for row in spans} - {id(spans[i]) for i in kept}
    rows = [row for row in rows if id(row) not in left_out]
    told = [launch for launch in launches if launch.event.about is not None]
    return rows + [row for its in spans for row in _told(its, told, base)]


def _told(row: dict, launches: list[Launch], base: int) -> list[dict]:
    """What PyTorch tells of a collective, in a row of its own around that of NCCL."""
    if not row["name"].startswith("nccl:"):
        return []
    row["cat"] = "user_annotation"
    first, last = (base + t * 1e3 for t in (row["ts"], row["ts"] + row["dur"]))
    return [
        {**row, "cat": "cpu_op", "name": _COMMS,
         "args": {**row["args"], **launch.event.about["args"]}}
        for launch in launches if first <= launch.real_ns <= last
    ][:1]  # fmt: skip


def _indices(launches: list[Launch]) -> list[int]:
    return sorted({index_of(launch.event.device) for launch in launches})


def _process(index: int) -> list[dict]:
    """A process is named by the number of its GPU, as kineto does it."""
    about = {
        "process_name": {"name": f"cuda:{index} (simulated time)"},
        "process_labels": {"labels": f"GPU {index}"},
        "process_sort_index": {"sort_index": 5_000_000 + index},
    }
    return [
        {"ph": "M", "name": name, "pid": index, "tid": 0, "args": args}
        for name, args in about.items()
    ]


def _external_ids(launches: list[Launch], outer: list[dict], base: int) -> list[int]:
    """Of each launch, the number of the innermost operation around it; 0 for none."""
    found, stack = [], []
    following = iter(sorted(outer, key=lambda row: (row["ts"], -row["dur"])))
    row = next(following, None)
    for launch in launches:
        now = (launch.real_ns - base) / 1e3
        while row is not None and row["ts"] <= now:
            if row["cat"] == "cpu_op":
                stack.append(row)
            row = next(following, None)
        stack = [its for its in stack if its["ts"] + its["dur"] >= now]
        mine = [its for its in stack if its["tid"] == launch.thread]
        found.append(mine[-1]["args"].get("External id", 0) if mine else 0)
    return found


def _rows(launch: Launch, number: int, ident: int, begin: float, base: int) -> list:
    """Work of a GPU, the call that launched it, and the arrow from one to the other."""
    event, (start, end) = launch.event, launch.span
    is_copy = event.kind == "copy"
    index = index_of(event.device)
    about = {
        "External id": ident, "device": index, "context": 1, "stream": event.stream,
        "correlation": number, "bytes": event.nbytes, "simulated": True,
    }  # fmt: skip
    if event.about is not None:
        about.update(event.about["args"])
    gpu = {"pid": index, "tid": event.stream, "ts": begin + start}
    host = {"pid": os.getpid(), "tid": launch.thread,
            "ts": (launch.real_ns - base) / 1e3}  # fmt: skip
    call = "cudaMemcpyAsync" if is_copy else "cudaLaunchKernel"
    call = "cudaGraphLaunch" if event.graph else call
    arrow = {"cat": "ac2g", "name": "ac2g", "id": number}
    return [
        {"ph": "X", "cat": "gpu_memcpy" if is_copy else "kernel",
         "name": kernel_name(launch), **gpu, "dur": end - start, "args": about},
        {"ph": "X", "cat": "cuda_runtime", "name": call, **host, "dur": _LAUNCH,
         "args": {"External id": ident, "correlation": number}},
        {"ph": "s", **arrow, **host},
        {"ph": "f", **arrow, **gpu, "bp": "e"},
    ]  # fmt: skip


def _range_row(found: Range, begin: float) -> dict:
    """Without arguments: with a stream readers would take it for a kernel."""
    return {
        "ph": "X", "cat": "gpu_user_annotation", "name": found.name,
        "pid": index_of(found.device), "tid": found.stream,
        "ts": begin + found.start, "dur": found.end - found.start, "args": {},
    }  # fmt: skip


def _properties(index: int) -> dict:
    """A card, as kineto describes it (DeviceProperties.cpp)."""
    of = torch.cuda.get_device_properties(index)
    return {
        "id": index, "name": of.name, "totalGlobalMem": of.total_memory,
        "computeMajor": of.major, "computeMinor": of.minor,
        "maxThreadsPerMultiprocessor": of.max_threads_per_multi_processor,
        "warpSize": of.warp_size, "numSms": of.multi_processor_count,
    }  # fmt: skip
