"""The exercises of lesson 07: a clock that waits, a report, a time of each step."""

import statistics

import torch

import simgpu
from exercises.counted import is_near, number
from exercises.exercise import Wrong, call, exercise, solution
from exercises.results import a, sequence
from helpers import host_seconds
from simgpu.costs import LAUNCH

SOON = 50e-6  # seconds between the GPU's end and a reading that comes at once
SIDE = 1024  # of the matrices that keep the GPU busy
SIDES = (1600, 1280, 1472, 1344)


@exercise(
    "07.1",
    hints=(
        "The function has two lines. Which of them makes the host wait, and must it be "
        "the first or the second?",
        "`torch.cuda.synchronize()` waits, and returns nothing. What must the function "
        "return once the wait is over?",
    ),
)
def clock_after_the_gpu(function) -> None:
    """A function -> what the host's clock says once the GPU has done its work."""
    x = torch.ones(SIDE, SIDE, device="cuda")
    torch.cuda.synchronize()
    before = host_seconds()
    for _ in range(5):
        x @ x
    busy = host_seconds()
    found = number(call(function))
    torch.cuda.synchronize()
    after = host_seconds()
    if abs(found - after) <= SOON:
        return
    if not before <= found <= after:
        raise Wrong("this is another clock; read host_seconds()")
    if found - busy <= SOON:
        raise Wrong("it reads the clock while the GPU is still busy; wait first")
    raise Wrong(f"the GPU was done {1e6 * abs(after - found):.0f} µs from your reading")


@solution("07.1")
def solution_1():
    """Wait first, then read.

    The host goes on after a launch, so its clock says little about the GPU.
    `torch.cuda.synchronize()` stops the host until the GPU has done all its work.
    """

    def clock_after_the_gpu():
        torch.cuda.synchronize()
        return host_seconds()

    return clock_after_the_gpu


_TIMES = [9.0, 3.0, 1.25, 1.0, 1.5, 1.125, 4.0]  # ms; two to warm up


@exercise(
    "07.2",
    hints=(
        "Which part of the list is left after the warm-up? `times[2:]` has all but the "
        "first two.",
        "The module `statistics` has a function for the median, and Python itself has "
        "two for the smallest and the largest. Sort nothing before the first runs are "
        "gone.",
    ),
)
def report(function) -> None:
    """A function (times, runs to warm up) -> median, least and most."""
    for times, warm_up in ((_TIMES, 2), (_TIMES[:6], 1), ([2.0, 1.0], 0)):
        found = sequence(call(function, list(times), warm_up), "it returns")
        if len(found) != 3:
            raise Wrong(f"return three numbers, not {len(found)}")
        found = [number(each, "each") for each in found]
        left = times[warm_up:]
        right = [statistics.median(left), min(left), max(left)]
        if all(is_near(x, y, 1e-6) for x, y in zip(found, right, strict=True)):
            continue
        about = f"of {times} with {warm_up} to warm up, "
        if is_near(found[0], statistics.mean(left), 1e-6):
            raise Wrong(f"{about}{found[0]:g} is the mean, which one slow run moves")
        if is_near(found[2], max(times), 1e-6) and warm_up:
            raise Wrong(f"{about}{found[2]:g} ms is a run that does not count")
        if warm_up and is_near(found[1], min(sorted(times)[warm_up:]), 1e-6):
            raise Wrong(f"{about}you drop the fastest runs; drop the first ones")
        raise Wrong(f"{about}it is {tuple(right)}, not {tuple(found)}")


@solution("07.2")
def solution_2():
    """Drop the first runs, then look at the others.

    The median does not move when one run is slow. The smallest and the largest say how
    far the runs lie apart.
    """

    def report(times, warm_up):
        counted = times[warm_up:]
        return statistics.median(counted), min(counted), max(counted)

    return report


def _steps(sizes, run: list):
    """A step that makes a product of another size each time it is called."""
    matrices = [torch.ones(size, size, device="cuda") for size in sizes]

    def step():
        run.append(len(run))
        matrix = matrices[(len(run) - 1) % len(matrices)]
        matrix @ matrix

    return step


@exercise(
    "07.3",
    hints=(
        "A clock of the host tells when the host is done, and the GPU is still at "
        "work by then. What notes a time in the stream itself, without making the "
        "host wait?",
        "Each time begins at its own step, not at the first one, and `elapsed_time` "
        "gives milliseconds already. How many events do `n` steps need, and for "
        "which of them must the host wait before it asks for a time?",
    ),
)
def step_times(function) -> None:
    """A function (step, n) -> the milliseconds of each step, with one wait."""
    for n in (4, 1):
        run: list[int] = []
        torch.cuda.synchronize()
        right = solution_3.function()(_steps(SIDES, []), n)
        step = _steps(SIDES, run)
        torch.cuda.synchronize()
        log = simgpu.timeline() if simgpu.is_running() else None
        waits = len(log.waits) if log else 0
        times = call(function, step, n, when=f"with n = {n}")
        waits = len(log.waits) - waits if log else 0
        torch.cuda.synchronize()
        _check_times(times, right, run, n, exact=log is not None)
        if waits > 1:
            raise Wrong(
                f"right times, but the host waits {waits} times for {n} steps, and "
                "the GPU is idle after each; record events, and wait once at the end"
            )


@solution("07.3")
def solution_3():
    """Let the GPU note the times, and read them at the end.

    The host launches a step and goes on, so its clock times the launch. An event is
    recorded in the stream instead, and the GPU notes the time when it gets there.

    One event before the first step and one after each step are enough, because the end
    of a step is the beginning of the next. The GPU passes them in order, so the host
    waits for the last event only, and all others are then complete as well. No step is
    slowed, since the host does not wait between two steps.
    """

    def step_times(step, n):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        events[-1].synchronize()
        times = []
        for index in range(n):
            times.append(events[index].elapsed_time(events[index + 1]))
        return times

    return step_times


def _check_times(times, right, run: list, n: int, exact: bool) -> None:
    """The times are a list of `n` milliseconds, near the right ones."""
    if not isinstance(times, (list, tuple)):
        raise Wrong(f"return a list of times, not {a(type(times).__name__)}")
    if len(run) != n:
        raise Wrong(f"it runs {len(run)} steps, not {n}; a warm-up is the caller's")
    if len(times) != n:
        raise Wrong(f"{n} steps gave {len(times)} times")
    times = [number(time, "each time") for time in times]
    near = 0.15 if exact else 3.0  # real GPUs vary
    low, high = 1 / (1 + near), 1 + near

    def all_near(ratios) -> bool:
        return all(low < ratio < high for ratio in ratios)

    ratios = [time / good for time, good in zip(times, right, strict=True)]
    if all_near(ratios):
        return
    if all_near([1e3 * ratio for ratio in ratios]):
        raise Wrong("these are seconds; elapsed_time gives milliseconds already")
    if all_near([ratio / 1e3 for ratio in ratios]):
        raise Wrong(
            f"you say {times[-1]:.1f} ms for step {n - 1}, a thousand times too much; "
            "elapsed_time gives milliseconds already"
        )
    totals = [sum(right[: i + 1]) for i in range(n)]
    if all_near([time / total for time, total in zip(times, totals, strict=True)]):
        raise Wrong("every time begins at the first step; begin each at its own step")
    if exact and all(time < 2e3 * LAUNCH for time in times):
        raise Wrong(
            f"{1e3 * max(times):.0f} µs for a step is the launch; the GPU needs "
            f"{1e3 * max(right):.0f}"
        )
    raise Wrong(
        f"step {n - 1} took {right[-1]:.3f} ms on the GPU, you say {times[-1]:.3f}; "
        "record an event before and after each step"
        + (" (time.perf_counter() times your own CPU)" if exact else "")
    )
