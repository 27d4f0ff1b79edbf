"""Judges of the exercises of lesson 04."""

import torch
from torch.cuda._sanitizer import AccessType, CUDASanitizerErrors

from helpers import simgpu
from helpers.check import NotYet, Wrong, call, exercise


def _race(errors: CUDASanitizerErrors) -> Wrong:
    """What two streams did to the same memory, as a verdict."""
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


def _check_waits() -> None:
    """The host may wait only for values that it asked for."""
    for wait in simgpu.timeline().waits:
        if not wait.name.endswith(" to cpu"):
            raise Wrong(f"the host is held up ({wait.name}); let streams wait instead")


def _clear() -> None:
    if simgpu.count():
        torch.cuda.synchronize()
        simgpu.timeline().clear()


def _loop(function, batches: list[torch.Tensor], reads_loss: bool) -> None:
    """A loop over `function(batches)`; its values, and how far it reads ahead."""
    taken, sums = 0, []

    def source():
        nonlocal taken
        for batch in batches:
            taken += 1
            yield batch

    here = torch.cuda.current_stream()
    try:
        for number, x in enumerate(call(function, source()), 1):
            if torch.cuda.current_stream() != here:
                torch.cuda.set_stream(here)
                raise Wrong(
                    "the caller's current stream has changed: close "
                    "`with torch.cuda.stream(...)` before you `yield`"
                )
            if x is None:
                raise Wrong("it yields None; yield nothing where there is no batch")
            if not isinstance(x, torch.Tensor) or x.device.type != "cuda":
                raise Wrong("it yields something that is not a tensor on the GPU")
            if taken > number + 2:
                raise Wrong(
                    f"{taken} batches were taken when batch {number} was yielded; "
                    "take at most two ahead"
                )
            y = (x @ x).sum()
            sums.append(y.item() if reads_loss else y)
    except CUDASanitizerErrors as errors:
        raise _race(errors) from errors
    except RuntimeError as error:
        if "StopIteration" not in str(error):
            raise
        raise Wrong(f"`next` found no batch left; there were {len(batches)}") from error
    if len(sums) != len(batches):
        raise Wrong(f"{len(batches)} batches went in, {len(sums)} came out")
    for number, (y, batch) in enumerate(zip(sums, batches, strict=True), 1):
        if float(y) != float((batch @ batch).sum()):
            raise Wrong(f"batch {number} of {len(batches)} has wrong values")


def _check_overlap() -> None:
    """At least half of what could overlap does."""
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
            "µs; hand the next copy out before you yield this batch, and let the work "
            "wait for its own batch only"
        )


@exercise("04.1")
def prefetch(function) -> None:
    """A generator that copies the next batch while this one is worked on."""
    generator = torch.Generator().manual_seed(4)
    batches = [
        torch.randint(0, 3, (512, 512), generator=generator).float().pin_memory()
        for _ in range(6)
    ]
    for count in (6, 1, 0):
        _clear()
        _loop(function, batches[:count], reads_loss=False)
        if simgpu.count():
            _check_waits()
    _clear()
    _loop(function, batches, reads_loss=True)
    if simgpu.count():
        _check_waits()
        _check_overlap()


@exercise("04.2")
def variance(function) -> None:
    """The variance of a pinned tensor, from two means on two streams."""
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(0, 5, (2048, 1024), generator=generator).float().pin_memory()
        _clear()
        try:
            result = function(x)
        except CUDASanitizerErrors as errors:
            raise _race(errors) from errors
        if result is None:
            raise NotYet("your function returns nothing so far")
        if not isinstance(result, float):
            raise Wrong(f"it returns a {type(result).__name__}, not a number")
        expected = x.double().var(unbiased=False).item()
        if abs(result - expected) > 1e-3:
            raise Wrong(f"it returns {result:.3f}, the variance is {expected:.3f}")
        if not simgpu.count():
            continue
        _check_waits()
        work = [event for event in simgpu.timeline().events if event.kind == "kernel"]
        means = [event for event in work if event.name == "mean"]
        if len({event.stream for event in means}) < 2:
            raise Wrong("the two means are on one stream")
        one, two = sorted(means, key=lambda event: event.start)[:2]
        if two.start >= one.end:
            raise Wrong(
                "right numbers, but the second mean waits for the first; put the wait "
                "behind both"
            )


@exercise("04.3")
def best_parts(parts, microseconds) -> None:
    """16 MiB, 10 µs and 12,800 bytes a µs for a copy, 1000 µs of work in all."""

    def time(n: int) -> float:
        copy, work = 10 + 2**24 / n / 12_800, 1000 / n
        return copy + (n - 1) * max(copy, work) + work

    best = min(range(1, 100), key=time)
    if parts == 1:
        raise Wrong("in one part nothing overlaps")
    if not isinstance(parts, int) or not 1 < parts < 100:
        raise Wrong("a whole number, and less than 100: their latency is 1000 µs alone")
    if parts != best:
        why = (
            "more parts shorten the last part's work by more than the 10 µs of a copy"
            if parts < best
            else "each further copy costs 10 µs more"
        )
        raise Wrong(f"{parts} parts take {time(parts):.0f} µs; {why}")
    copies = 2**24 / 12_800
    reasons = {
        copies + 10 * best + 1000: "that is one after the other",
        copies + 10 * best: "each copy has its 10 µs, and the last part has its work",
        10 + copies / best + 1000: "the copies are the slower side, not the work",
    }
    for wrong, reason in reasons.items():
        if abs(microseconds - wrong) < 2:
            raise Wrong(reason)
    if abs(microseconds - time(best)) > 8:
        raise Wrong("the parts are right; the time is all copies and one part's work")
