"""The exercises of lesson 07: a clock that waits, a report, a time of each part."""

import statistics

import torch

import simgpu
from exercises.counted import is_near, number
from exercises.exercise import Wrong, call, exercise, solution
from exercises.results import a, sequence
from helpers import host_seconds
from simgpu.costs import LAUNCH

SIDE = 1024  # of the matrices that keep the GPU busy
SIDES = ((1280, 1792, 1344), (1472, 1280, 1600))  # of each part, round by round


@exercise(
    "07.1",
    hints=(
        "A clock that does not wait times the launches. Which call makes the host wait "
        "until the GPU is done, and before which of the two readings of the clock do "
        "you need it?",
        "What would your first reading count if the GPU still had work of somebody "
        "else? Wait before both readings; the result is their difference.",
    ),
)
def seconds_alone(function) -> None:
    """A function (work) -> the seconds that the work takes on an idle GPU."""
    x = torch.ones(SIDE, SIDE, device="cuda")

    def work():
        for _ in range(5):
            x @ x

    work()  # warms up
    right = solution_1.function()(work)
    start = host_seconds()
    for _ in range(25):
        x @ x  # what the GPU still has to do
    found = number(call(function, work))
    torch.cuda.synchronize()
    total = host_seconds() - start
    near = 0.05 if simgpu.is_running() else 2.0  # real GPUs vary
    if right / (1 + near) <= found <= right * (1 + near):
        return
    if is_near(found, 1e3 * right, near):
        raise Wrong("these are milliseconds; host_seconds() gives seconds")
    if found > total:
        raise Wrong("this is another clock; read host_seconds()")
    if found > right:
        raise Wrong(
            "the GPU was still busy with earlier work when your clock began; wait "
            "before the first reading, too"
        )
    raise Wrong(
        f"{1e6 * found:.0f} µs is the launch, the GPU needs {1e6 * right:.0f}; wait "
        "before the last reading"
    )


@solution("07.1")
def solution_1():
    """Wait, then read, at both ends.

    The host goes on after a launch, so its clock says little about the GPU.
    `torch.cuda.synchronize()` stops the host until the GPU has done all its work. The
    first wait makes the GPU idle, and the second one makes the work complete.
    """

    def seconds_alone(work):
        torch.cuda.synchronize()
        start = host_seconds()
        work()
        torch.cuda.synchronize()
        return host_seconds() - start

    return seconds_alone


_TIMES = (  # ms of two ranks; two to warm up
    [9.0, 3.0, 1.25, 1.0, 1.5, 1.125, 4.0],
    [9.5, 3.5, 1.5, 1.375, 1.5, 1.625, 4.5],
)
_RUNS = ((_TIMES, [64, 128], 2), (_TIMES[::-1], [32, 96], 1), (_TIMES[:1], [8], 0))


@exercise(
    "07.2",
    hints=(
        "One of the two numbers must ignore a slow step, and the other must not: a "
        "training waits for its slow steps. Which kind of average belongs to which?",
        "A rank has trained when all its steps are over. Which rank ends last, and how "
        "many samples have all ranks together had by then? The times are milliseconds.",
    ),
)
def report(function) -> None:
    """A function (times, samples, warm-up) -> a usual step, and the throughput."""
    for times, samples, warm_up in _RUNS:
        given = [list(of_rank) for of_rank in times]
        found = sequence(call(function, given, list(samples), warm_up), "it returns")
        if len(found) != 2:
            raise Wrong(f"return two numbers, not {len(found)}")
        step, rate = (number(each, "each") for each in found)
        left = [of_rank[warm_up:] for of_rank in times]
        usual = statistics.median(left[0])
        if not is_near(step, usual, 1e-6):
            if is_near(step, statistics.mean(left[0]), 1e-6):
                raise Wrong(f"{step:g} ms is the mean, which one slow step moves")
            raise Wrong(
                f"a usual step of rank 0 takes {usual:g} ms, not {step:g}; leave out "
                f"the first {warm_up} of {given[0]}"
            )
        _check_rate(rate, times, left, samples)


def _check_rate(rate: float, times, left, samples: list[int]) -> None:
    """All samples, divided by the time of the slowest rank; or which mistake it is."""
    steps, total = len(left[0]), sum(samples)
    slowest = max(sum(of_rank) for of_rank in left)
    right = 1e3 * total * steps / slowest
    if is_near(rate, right, 1e-6):
        return
    medians = [statistics.median(of_rank) for of_rank in left]
    mistakes = {
        "counts the samples of rank 0 only": samples[0] * steps / slowest,
        "has the time of rank 0; the slowest rank decides": total
        * steps
        / sum(left[0]),
        "has the mean time of the ranks; the slowest one decides": total
        * steps
        / statistics.mean(sum(of_rank) for of_rank in left),
        "is what usual steps would give; slow steps take time, too": total
        / max(medians),
        "counts the steps that only warm up": total
        * len(times[0])
        / max(sum(of_rank) for of_rank in times),
    }
    for words, value in mistakes.items():
        if is_near(rate, 1e3 * value, 1e-6):
            raise Wrong(f"{rate:,.0f} samples a second {words}")
    if is_near(1e3 * rate, right, 1e-6):
        raise Wrong("these are samples a millisecond")
    raise Wrong(f"{rate:,.0f} samples a second, and it is {right:,.0f}")


@solution("07.2")
def solution_2():
    """The median for a step, all the time for the training.

    One slow step does not move the median. But a training waits for its slow steps,
    and its ranks wait for the slowest of them: all samples are divided by the sum of
    its times. The factor 1000 makes seconds of milliseconds.
    """

    def report(times, samples, warm_up):
        counted = [of_rank[warm_up:] for of_rank in times]
        slowest = max(sum(of_rank) for of_rank in counted)
        all_samples = sum(samples) * len(counted[0])
        return statistics.median(counted[0]), 1000 * all_samples / slowest

    return report


def _parts(run: list) -> list:
    """Two parts of a step; each makes a product of another size in each round."""
    matrices = {
        side: torch.ones(side, side, device="cuda")
        for of_part in SIDES
        for side in of_part
    }

    def make(index: int):
        def part():
            of_part = SIDES[index]
            matrix = matrices[of_part[run.count(index) % len(of_part)]]
            run.append(index)
            matrix @ matrix

        return part

    return [make(index) for index in range(len(SIDES))]


def _passed(parts: list, n: int) -> list[float]:
    """The milliseconds from the beginning to the end of each part, in their order."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(n * len(parts) + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for index, mark in enumerate(marks[1:]):
        parts[index % len(parts)]()
        mark.record()
    marks[-1].synchronize()
    return [marks[0].elapsed_time(mark) for mark in marks]


@exercise(
    "07.3",
    hints=(
        "A clock of the host tells when the host is done, and the GPU is still at "
        "work by then. What notes a time in the stream itself, without making the "
        "host wait?",
        "The end of a part is the beginning of the next one. How many events do `n` "
        "rounds need, and for which of them must the host wait? In the list of all "
        "times, those of a part are `len(parts)` apart.",
    ),
)
def part_times(function) -> None:
    """A function (parts, n) -> the median milliseconds of each part, with one wait."""
    for n in (3, 1):
        passed = _passed(_parts([]), n)
        run: list[int] = []
        parts = _parts(run)
        torch.cuda.synchronize()
        log = simgpu.timeline() if simgpu.is_running() else None
        waits = len(log.waits) if log else 0
        times = call(function, list(parts), n, when=f"with n = {n}")
        waits = len(log.waits) - waits if log else 0
        torch.cuda.synchronize()
        if run != list(range(len(parts))) * n:
            raise Wrong(
                f"with n = {n}, it calls the parts {run}; call them in turn, {n} "
                "rounds, and leave the warm-up to the caller"
            )
        _check_times(times, passed, len(parts), exact=log is not None)
        if waits > 1:
            raise Wrong(
                f"right times, but the host waits {waits} times for {len(run)} parts, "
                "and the GPU is idle after each; record events, and wait once at the "
                "end"
            )


@solution("07.3")
def solution_3():
    """Let the GPU note the times, and read them at the end.

    The host launches a part and goes on, so its clock times the launch. An event is
    recorded in the stream instead, and the GPU notes the time when it gets there.

    One event before the first part and one after each part are enough, because the end
    of a part is the beginning of the next. The GPU passes them in order, so the host
    waits for the last event only, and all others are then complete as well. No part is
    slowed, since the host does not wait between two parts.
    """

    def part_times(parts, n):
        marks = [torch.cuda.Event(enable_timing=True)]
        marks[0].record()
        for _ in range(n):
            for part in parts:
                part()
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
        marks[-1].synchronize()
        times = []
        for begin, end in zip(marks[:-1], marks[1:], strict=True):
            times.append(begin.elapsed_time(end))
        count = len(parts)
        return [statistics.median(times[index::count]) for index in range(count)]

    return part_times


def _check_times(times, passed: list[float], count: int, exact: bool) -> None:
    """The times are a list of `count` milliseconds, near the right ones."""
    if not isinstance(times, (list, tuple)):
        raise Wrong(f"return a list of times, not {a(type(times).__name__)}")
    if len(times) != count:
        raise Wrong(f"{count} parts gave {len(times)} times")
    times = [number(time, "each time") for time in times]
    near = 0.15 if exact else 3.0  # real GPUs vary
    low, high = 1 / (1 + near), 1 + near

    def of_parts(average, numbers) -> list[float]:
        return [average(numbers[index::count]) for index in range(count)]

    def all_near(wanted, unit=1.0) -> bool:
        ratios = (time / one for time, one in zip(times, wanted, strict=True))
        return all(low < ratio * unit < high for ratio in ratios)

    each = [end - begin for begin, end in zip(passed[:-1], passed[1:], strict=True)]
    right = of_parts(statistics.median, each)
    if all_near(right):
        return
    if all_near(right, 1e3):
        raise Wrong("these are seconds; elapsed_time gives milliseconds already")
    if all_near(right, 1e-3):
        raise Wrong(
            f"you say {times[-1]:.1f} ms for the last part, a thousand times too much; "
            "elapsed_time gives milliseconds already"
        )
    if all_near(of_parts(statistics.mean, each)):
        raise Wrong("these are means, which one slow round moves; return medians")
    if all_near(of_parts(statistics.median, passed[1:])):
        raise Wrong("every time begins at the first part; begin each at its own part")
    if exact and all(time < 2e3 * LAUNCH for time in times):
        raise Wrong(
            f"{1e3 * max(times):.0f} µs for a part is the launch; the GPU needs "
            f"{1e3 * max(right):.0f}"
        )
    raise Wrong(
        f"the last part took {right[-1]:.3f} ms on the GPU, you say {times[-1]:.3f}; "
        "record an event before and after each part"
        + (" (time.perf_counter() times your own CPU)" if exact else "")
    )
