"""PyTorch's profiler: `torch.profiler.profile`, and what `torch.autograd.profiler` has.

Models: the host's part is PyTorch's own, in real time. Work of the GPUs is the
simulated clock's: each kernel, copy and collective becomes an event of the profile and
is booked to the operation that launched it, so that tables and traces have device
times; a range of the program has one on each stream for which it launched work. A
trace has what `profiler_trace.py` adds. NVTX's ranges and `torch.cuda.profiler.start()`
go nowhere, as where no profiler is attached. Memory of the GPUs is in
`profiler_memory.py`. Leaves out: the memory timeline, names of kernels other than
NCCL's, rows of CUDA's own calls in tables, and that the two times fit together: a trace
shows the GPUs from the start of the profile on, in simulated time.

A profile of CUDA in a build without CUDA would print an error for every operation, so
PyTorch's C++ is asked for the host alone.
"""

import json

import torch
from torch.autograd import DeviceType, ProfilerActivity, ProfilerState
from torch.autograd.profiler import emit_nvtx, profile
from torch.autograd.profiler_util import EventList, FunctionEvent

from simgpu import _runtime as state
from simgpu._api import profiler_trace
from simgpu._api.patch import Patch, patches
from simgpu._api.profiler_memory import MemoryRecording, Result
from simgpu._api.profiler_trace import Launch, Recording, index_of, kernel_name
from simgpu._compat import raw_parse_kineto_results, raw_start_trace
from simgpu._errors import NotSimulated

ACTIVITIES = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
_NOTE = (
    "CUDA times are simulated (simgpu.timeline() has them, too); CPU times are this "
    "machine's.\n"
)
_raw_init = profile.__init__
_raw_exit = profile.__exit__
_raw_export = profile.export_chrome_trace
_raw_table = EventList.table
_raw_export_memory_timeline = torch.profiler.profile.export_memory_timeline


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
        self._simgpu = Recording(clock)
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
    events = _of_the_program(events)
    started = result.trace_start_ns()
    launches = recording.launches()
    marks = [
        (e.name, started + int(e.time_range.start * 1e3),
         started + int(e.time_range.end * 1e3))
        for e in events if e.is_user_annotation
    ]  # fmt: skip
    on_gpu = [*map(_kernel, launches)]
    if self.use_cpu:  # it is the host that tells of ranges
        on_gpu += map(_range, profiler_trace.ranges(launches, marks))
    for number, event in enumerate(on_gpu, 1):
        event.id = -number
    _book(launches, events, started)
    if not self.use_cpu:
        events = []
    return sorted([*events, *on_gpu], key=lambda e: (e.time_range.start,))


def _of_the_program(events: list) -> list:
    """Without rows of modes, what ours runs again, and what the simulator runs."""
    spans = [(e.thread, e.time_range.start, e.time_range.end, e.name) for e in events]
    return [events[i] for i in profiler_trace.of_the_program(spans)]


def _kernel(launch: Launch) -> FunctionEvent:
    event = launch.event
    return _on_gpu(kernel_name(launch), event.device, event.stream, *launch.span)


def _range(found: profiler_trace.Range) -> FunctionEvent:
    return _on_gpu(*found, is_user_annotation=True)


def _on_gpu(name: str, device: str, stream: int, start: float, end: float,
            **more) -> FunctionEvent:  # fmt: skip
    """Work of a GPU as an event of a profile; times are in µs."""
    return FunctionEvent(
        id=0, name=name, thread=stream, start_us=start, end_us=end, use_device="cuda",
        device_type=DeviceType.CUDA, device_index=index_of(device),
        device_resource_id=stream, stack=[], input_shapes=[], **more,
    )  # fmt: skip


def _book(launches: list[Launch], events: list, trace_start_ns: int) -> None:
    """Add each kernel and copy to the innermost operation in which it was launched."""
    operations = iter([e for e in events if e.device_type == DeviceType.CPU])
    following, stack = next(operations, None), []
    for launch in launches:
        runtime = (launch.real_ns - trace_start_ns) / 1000
        while following is not None and following.time_range.start <= runtime:
            while stack and stack[-1].time_range.end < following.time_range.end:
                stack.pop()
            stack.append(following)
            following = next(operations, None)
        while stack and stack[-1].time_range.end < runtime:
            stack.pop()
        if stack:
            start, end = launch.span
            index = index_of(launch.event.device)
            stack[-1].append_kernel(kernel_name(launch), index, end - start)


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
    profiler_trace.complete(trace, recording, with_host=self.use_cpu)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(trace, file)


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
