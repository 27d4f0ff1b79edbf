"""PyTorch's profiler: `torch.profiler.profile`, and what `torch.autograd.profiler` has.

Models: the host's part is PyTorch's own, in real time. Work of the GPUs is the
simulated clock's: each kernel and copy becomes an event of the profile and is booked to
the operation that launched it, so that tables and traces have device times. Ranges for
NVTX and `torch.cuda.profiler.start()` go nowhere, as where no profiler is attached.
Memory of the GPUs is in `profiler_memory.py`. Leaves out: the memory timeline, CUDA's
own calls such as `cudaLaunchKernel`, and that the two times fit together: a trace shows
the GPUs from the start of the profile on, in simulated time.

A profile of CUDA in a build without CUDA would print an error for every operation, so
PyTorch's C++ is asked for the host alone.
"""

import json
import time

import torch
from torch.autograd import DeviceType, ProfilerActivity, ProfilerState
from torch.autograd.profiler import emit_nvtx, profile
from torch.autograd.profiler_util import EventList, FunctionEvent

from simgpu import _runtime as state
from simgpu._api.patch import Patch, patches
from simgpu._api.profiler_memory import MemoryRecording, Result
from simgpu._compat import raw_parse_kineto_results, raw_start_trace
from simgpu._errors import NotSimulated

ACTIVITIES = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
_MODE = "PythonDispatchMode"  # a row for each operation that our mode sees
_NOTE = (
    "CUDA times are simulated (simgpu.timeline() has them, too); CPU times are this "
    "machine's.\n"
)
_PROCESS = 1_000_000  # of the first GPU in a trace; real processes have smaller numbers
_raw_init = profile.__init__
_raw_exit = profile.__exit__
_raw_export = profile.export_chrome_trace
_raw_table = EventList.table
_raw_export_memory_timeline = torch.profiler.profile.export_memory_timeline


class _Recording:
    """What the clock logs during a profile, with the real time at which it does."""

    def __init__(self, clock):
        self.clock = clock
        self.started = clock.host  # simulated seconds
        self.events: list[tuple[int, object]] = []  # real ns, event
        self.memory: MemoryRecording | None = None  # if that is profiled, too

    def append(self, event) -> None:
        self.events.append((time.time_ns(), event))

    def finish(self) -> None:
        others = [r for r in self.clock.recordings if r is not self]
        self.clock.recordings[:] = others
        if self.memory is not None:
            self.memory.finish()


# -- the profile -----------------------------------------------------------------------


def init(self, *args, use_cpu=True, **kwargs):
    """`profile(...)`: C++ is asked for the host only."""
    _raw_init(self, *args, use_cpu=True, **kwargs)
    if self.enabled and self.use_device == "cuda":
        self.use_cpu = use_cpu
        self.profiler_kind = ProfilerState.KINETO
        self.kineto_activities = {ProfilerActivity.CPU}


def start_trace(self):
    raw_start_trace(self)
    if self.use_device == "cuda":
        clock = state.current().clock
        self._simgpu = _Recording(clock)
        clock.recordings.append(self._simgpu)
        if self.profile_memory:
            self._simgpu.memory = MemoryRecording(state.current().gpus)


def exit_profile(self, *exception):
    recording = getattr(self, "_simgpu", None)
    try:
        return _raw_exit(self, *exception)  # waits for the GPU
    finally:
        if recording is not None:
            recording.finish()


def parse_results(self, result, *args, **kwargs):
    """The host's events without ours, and the GPUs'."""
    recording = getattr(self, "_simgpu", None)
    if recording is not None and recording.memory is not None:
        result = Result(result, recording.memory)
    events = raw_parse_kineto_results(self, result, *args, **kwargs)
    if recording is None:
        return events
    events = _without_modes(events)
    on_gpu = _device_events(recording)
    _book(recording, events, result.trace_start_ns())
    if not self.use_cpu:
        events = []
    return sorted([*events, *on_gpu], key=lambda e: (e.time_range.start,))


def _without_modes(events: list) -> list:
    """Without rows of modes, and what ours runs again under the same name."""
    kept, stacks = [], {}  # thread -> [(event, name that it runs again)]
    for event in events:
        stack = stacks.setdefault(event.thread, [])
        while stack and stack[-1][0].time_range.end < event.time_range.end:
            stack.pop()
        parent, again = stack[-1] if stack else (None, None)
        if event.name == _MODE:
            again = parent and parent.name
        elif event.name != again:
            again = None
            kept.append(event)
        stack.append((event, again))
    return kept


def _device_events(recording: _Recording) -> list[FunctionEvent]:
    """The work of the GPUs as events of a profile; times are in µs."""
    found = []
    for number, (_, event) in enumerate(recording.events, 1):
        start = (event.start - recording.started) * 1e6
        found.append(
            FunctionEvent(
                id=-number, name=_kernel_name(event), thread=event.stream,
                start_us=start, end_us=start + (event.end - event.start) * 1e6,
                use_device="cuda", device_type=DeviceType.CUDA,
                device_index=int(event.device.removeprefix("cuda:")),
                device_resource_id=event.stream, stack=[], input_shapes=[],
            )
        )  # fmt: skip
    return found


def _kernel_name(event) -> str:
    if event.kind != "copy":
        return event.name
    ends = ["H" if end == "cpu" else "D" for end in (event.source, event.target)]
    return f"Memcpy {ends[0]}to{ends[1]}"


def _book(recording: _Recording, events: list, trace_start_ns: int) -> None:
    """Add each kernel and copy to the innermost operation in which it was launched."""
    operations = iter([e for e in events if e.device_type == DeviceType.CPU])
    following, stack = next(operations, None), []
    for real_ns, event in recording.events:
        if event.kind == "collective":  # logged when its end is known, not launched
            continue
        runtime = (real_ns - trace_start_ns) / 1000
        while following is not None and following.time_range.start <= runtime:
            while stack and stack[-1].time_range.end < following.time_range.end:
                stack.pop()
            stack.append(following)
            following = next(operations, None)
        while stack and stack[-1].time_range.end < runtime:
            stack.pop()
        if stack:
            index = int(event.device.removeprefix("cuda:"))
            seconds = event.end - event.start
            stack[-1].append_kernel(_kernel_name(event), index, seconds * 1e6)


# -- tables, traces --------------------------------------------------------------------


def table(self, *args, **kwargs):
    text = _raw_table(self, *args, **kwargs)
    return text + _NOTE if self._use_device == "cuda" else text


def export_chrome_trace(self, path, *args, **kwargs):
    """Also has the GPUs' events; it says of them that they are simulated."""
    _raw_export(self, path, *args, **kwargs)
    recording = getattr(self, "_simgpu", None)
    if recording is None:
        return
    with open(path, encoding="utf-8") as file:
        trace = json.load(file)
    rows = [row for row in trace["traceEvents"] if row.get("name") != _MODE]
    starts = [row["ts"] for row in rows if row.get("ph") == "X"]
    trace["traceEvents"] = rows + _rows(recording, min(starts, default=0.0))
    with open(path, "w", encoding="utf-8") as file:
        json.dump(trace, file)


def _rows(recording: _Recording, start: float) -> list[dict]:
    """The GPUs' events as a trace has them, `start` being that of the profile."""
    rows, named = [], set()
    for _, event in recording.events:
        index = int(event.device.removeprefix("cuda:"))
        if index not in named:
            named.add(index)
            about = {"name": f"{event.device} (simulated time)"}
            rows.append({"ph": "M", "name": "process_name", "pid": _PROCESS + index,
                         "tid": 0, "args": about})  # fmt: skip
        about = {"device": index, "stream": event.stream, "bytes": event.nbytes,
                 "simulated": True}  # fmt: skip
        rows.append({
            "ph": "X", "cat": "gpu_memcpy" if event.kind == "copy" else "kernel",
            "name": _kernel_name(event), "pid": _PROCESS + index, "tid": event.stream,
            "ts": start + (event.start - recording.started) * 1e6,
            "dur": (event.end - event.start) * 1e6, "args": about,
        })  # fmt: skip
    return rows


def export_memory_timeline(self, path, device=None):
    """It would be drawn of the host's memory, where the values are."""
    if self.use_device == "cuda":
        raise NotSimulated(
            "torch.profiler.profile.export_memory_timeline",
            "torch.cuda.memory._record_memory_history() and _dump_snapshot(), which "
            "PyTorch advises in its place, have the memory of simulated GPUs.",
        )
    return _raw_export_memory_timeline(self, path, device)


def supported_activities() -> set:
    return set(ACTIVITIES)


# -- NVTX, torch.cuda.profiler ---------------------------------------------------------


def enter_nvtx(self: emit_nvtx):
    """`with emit_nvtx():`, whose ranges nobody collects."""
    if not self.enabled:
        return None
    if self.entered:
        raise RuntimeError("NVTX annotation context manager is not reentrant")
    self.entered = True
    torch.cuda.synchronize()
    return self


def exit_nvtx(self: emit_nvtx, *exception):
    if self.enabled:
        torch.cuda.synchronize()
    return False


def start() -> None:
    """`torch.cuda.profiler.start()`, with no profiler attached."""


def stop() -> None:
    """`torch.cuda.profiler.stop()`."""


def rows() -> list[Patch]:
    """The profiler's part of the table of replacements."""
    clock = "the simulated clock has the GPUs' times"
    return [
        *patches(profile, clock, __init__=init, _start_trace=start_trace,
                 __exit__=exit_profile, _parse_kineto_results=parse_results,
                 export_chrome_trace=export_chrome_trace),
        *patches(torch.profiler.profile, "C++ knows the host's memory alone",
                 export_memory_timeline=export_memory_timeline),
        *patches(EventList, "it says what is simulated", table=table),
        *patches(emit_nvtx, "there is no profiler",
                 __enter__=enter_nvtx, __exit__=exit_nvtx),
        *patches(torch.profiler, clock, supported_activities=supported_activities),
        *patches(torch.profiler.profiler, clock,
                 supported_activities=supported_activities),
        *patches(torch.cuda.profiler, "there is no profiler", start=start, stop=stop),
    ]  # fmt: skip
