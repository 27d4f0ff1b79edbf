"""A timeline in the format that Perfetto and chrome://tracing open.

A process for the host and one for each GPU; in it, a thread for each stream.
"""

from simgpu.timing.cost import LAUNCH


def of(timeline) -> dict:
    """The trace of a `Timeline`; times are in µs."""
    rows = [_name(0, "process_name", "host"), _name(0, "thread_name", "launches")]
    for event in timeline.events:
        about = {"on": event.device}
        rows.append(_row(event.name, "launch", 0, 0, event.launched, LAUNCH, about))
    for wait in timeline.waits:
        seconds = wait.end - wait.start
        rows.append(_row(wait.name, "wait", 0, 0, wait.start, seconds, {}))
    for device in timeline.devices:
        rows.append(_name(_process(device), "process_name", f"{device} simulated"))
    for (device, stream), events in timeline.lanes().items():
        process = _process(device)
        rows.append(_name(process, "thread_name", f"stream {stream}", stream))
        for event in events:
            about = {"bytes": event.nbytes, "flops": event.flops}
            seconds = event.end - event.start
            rows.append(
                _row(event.name, event.kind, process, stream, event.start, seconds,
                     about)
            )  # fmt: skip
    return {"traceEvents": rows, "displayTimeUnit": "ns"}


def _process(device: str) -> int:
    """The number of a GPU's process; the host is number 0."""
    return 1 + int(device.removeprefix("cuda:"))


def _row(name, category, process, thread, start, seconds, about) -> dict:
    return {
        "name": name, "cat": category, "ph": "X", "pid": process, "tid": thread,
        "ts": start * 1e6, "dur": seconds * 1e6, "args": about,
    }  # fmt: skip


def _name(process: int, kind: str, name: str, thread: int = 0) -> dict:
    """Names a process or thread."""
    return {
        "name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name},
    }  # fmt: skip
