"""A timeline in the format that Perfetto and chrome://tracing open.

A process for the host and one for each GPU; in it, a thread for each stream. Of a job,
a process for each rank and GPU, with a thread for the rank's host, too.
"""

from simgpu._timing.cost import LAUNCH

MOST_GPUS = 64  # of a rank


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


def of_job(job) -> dict:
    """The trace of a `JobTimeline`; times are in µs."""
    rows = []
    for log in job.logs:
        process = log.rank * MOST_GPUS  # of the host, and of the rank's first GPU
        lanes = job.lanes(log.rank)
        devices = list(dict.fromkeys(lane.device for lane in lanes))
        for number, device in enumerate(devices or [""]):
            title = f"rank {log.rank} {device} simulated".replace("  ", " ")
            rows.append(_name(process + number, "process_name", title))
            order = {"sort_index": process + number}
            rows.append(_meta(process + number, "process_sort_index", order))
        rows.append(_name(process, "thread_name", "host"))
        for event in log.events:
            about = {"on": event.device}
            rows.append(_row(event.name, "launch", process, 0, event.launched, LAUNCH,
                             about))  # fmt: skip
        for wait in log.waits:
            seconds = wait.end - wait.start
            rows.append(_row(wait.name, "wait", process, 0, wait.start, seconds, {}))
        for lane, events in lanes.items():
            of_gpu, thread = process + devices.index(lane.device), 1 + lane.stream
            rows.append(_name(of_gpu, "thread_name", lane.title, thread))
            rows.append(_meta(of_gpu, "thread_sort_index", {"sort_index": thread},
                              thread))  # fmt: skip
            rows += [row for e in events for row in _in_stream(e, of_gpu, thread)]
    left_out = {f"rank {rank}": why for rank, why in job.missing.items()}
    return {"traceEvents": rows, "displayTimeUnit": "ns", "otherData": left_out}


def _in_stream(event, process: int, thread: int) -> list[dict]:
    """An event of a job: of a collective, the waiting apart."""
    about = {"bytes": event.nbytes, "flops": event.flops}
    rows, start = [], event.start
    if event.waited:
        words = f"{event.name} waits for rank {event.waited_for}"
        rows.append(_row(words, "wait", process, thread, start, event.waited, {}))
        start += event.waited
    if event.group:
        about["group"] = event.group
    rows.append(_row(event.name, event.kind, process, thread, start, event.end - start,
                     about))  # fmt: skip
    return rows


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
    return _meta(process, kind, {"name": name}, thread)


def _meta(process: int, kind: str, about: dict, thread: int = 0) -> dict:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": about}
