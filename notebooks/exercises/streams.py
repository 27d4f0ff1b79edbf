"""Checks of code that uses streams: races, waits of the host, overlap."""

import torch
from torch.cuda._sanitizer import AccessType, CUDASanitizerErrors

import simgpu
from exercises.exercise import Wrong, call


def race(errors: CUDASanitizerErrors) -> Wrong:
    """What two streams did to the same memory, as a reason."""
    now, before = errors.errors[0].current_access, errors.errors[0].previous_access
    new, old = (
        access.operator.partition("(")[0].removeprefix("aten::").partition(".")[0]
        for access in (now, before)
    )
    if now.type is AccessType.WRITE:
        return Wrong(
            f"a race: `{new}` writes into memory that `{old}` on another stream still "
            "uses; it was given back or filled again too early"
        )
    return Wrong(
        f"a race: `{new}` reads what `{old}` on another stream writes, and nothing "
        "makes it wait"
    )


def called(function, *args):
    """What the learner's function returns; a race in it is a reason of its own."""
    try:
        return call(function, *args)
    except Wrong as wrong:
        if isinstance(wrong.__cause__, CUDASanitizerErrors):
            raise race(wrong.__cause__) from wrong
        raise


def check_waits() -> None:
    """The host may wait only for values that it asked for; noted by simulated GPUs."""
    if not simgpu.is_running():
        return
    for wait in simgpu.timeline().waits:
        if not wait.name.endswith(" to cpu"):
            raise Wrong(f"the host is held up ({wait.name}); let streams wait instead")


def clear() -> None:
    """Begin anew: `check_waits` and `check_overlap` look at what comes from here on."""
    if simgpu.is_running():
        torch.cuda.synchronize()
        simgpu.timeline().clear()


def check_overlap() -> None:
    """At least half of what could overlap does; noted by simulated GPUs."""
    if not simgpu.is_running():
        return
    log = simgpu.timeline()
    copies = [event for event in log.copies if event.source == "cpu"]
    work = [event for event in log.events if event.kind == "kernel"]
    if {event.stream for event in copies} <= {event.stream for event in work}:
        raise Wrong("the copies are on the stream of the work, so they take turns")
    possible = min(
        sum(event.end - event.start for event in es) for es in (copies, work)
    )
    overlap = log.totals()[copies[0].device].overlap
    if overlap < possible / 2:
        raise Wrong(
            f"copies and work overlap for {1e6 * overlap:.0f} of {1e6 * possible:.0f} "
            "µs; launch the next copy before you yield or use this batch, and let the "
            "work wait for its own batch only"
        )
