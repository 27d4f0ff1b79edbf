"""Judges of the exercises of lesson 05."""

import torch

from helpers import simgpu
from helpers.check import Wrong, call, exercise

LAUNCH, KERNEL = 5e-6, 2e-6  # of the simulated A100: see helpers/simgpu/clock.py
FLOPS, BYTES = 0.7 * 19.5e12, 0.8 * 2039e9


def _steps(sizes, run: list, work):
    """A step that makes a product of another size each time it is called."""
    matrices = [torch.ones(size, size, device="cuda") for size in sizes]

    def step():
        run.append(len(run))
        work(matrices[(len(run) - 1) % len(matrices)])

    return step


def _event_times(step, n: int) -> list[float]:
    """The right milliseconds of each step."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    pairs = zip(marks[:-1], marks[1:], strict=True)
    return [first.elapsed_time(second) for first, second in pairs]


@exercise("05.1")
def step_times(function) -> None:
    """A function (step, n) -> the milliseconds of each step, with one wait."""
    sizes = (1024, 768, 896, 640)
    for n in (4, 1):
        run: list[int] = []
        torch.cuda.synchronize()
        right = _event_times(_steps(sizes, [], lambda m: m @ m), n)
        step = _steps(sizes, run, lambda m: m @ m)
        torch.cuda.synchronize()
        log = simgpu.timeline() if simgpu.count() else None
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


def _check_times(times, right, run: list, n: int, exact: bool) -> None:
    """The times are a list of `n` milliseconds, near the right ones."""
    if not isinstance(times, (list, tuple)):
        raise Wrong(f"return a list of times, not a {type(times).__name__}")
    if len(run) != n:
        raise Wrong(f"it runs {len(run)} steps, not {n}; a warm-up is the caller's")
    if len(times) != n:
        raise Wrong(f"{n} steps gave {len(times)} times")
    if not all(isinstance(time, (int, float)) for time in times):
        raise Wrong("each time must be a number")
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


@exercise("05.2")
def five_bounds(*answers) -> None:
    """What binds five programs on a simulated A100 in float32."""
    if len(answers) != 5:
        raise Wrong(f"five answers are asked for, not {len(answers)}")
    n = 4096
    programs = (  # launches, bytes, FLOPs
        (1, 3 * 4 * n * n, 2 * n**3),
        (1, 3 * 4 * n * n, n * n),
        (1, 4 * (n * n + 2 * n), 2 * n * n),
        (1000, 1000 * 2 * 4 * 10_000, 1000 * 10_000),
        (1, 4 * (n * n + 2 * 8 * n), 2 * 8 * n * n),
    )
    for number, (answer, counts) in enumerate(zip(answers, programs, strict=True), 1):
        limits = dict(
            zip(("launches", "memory", "arithmetic"), _limits(*counts), strict=True)
        )
        name = str(answer).strip().lower()
        name = "launches" if name == "launch" else name
        if name not in limits:
            raise Wrong(f"number {number}: say launches, memory or arithmetic")
        right = max(limits, key=lambda limit: limits[limit])
        if name != right:
            raise Wrong(
                f"number {number}: {name} would take {1e6 * limits[name]:,.1f} µs, "
                "and something else takes longer"
            )


def _limits(launches: int, nbytes: int, flops: int) -> tuple[float, float, float]:
    """Seconds that the launches, the bytes and the FLOPs take alone."""
    return launches * LAUNCH, nbytes / BYTES, flops / FLOPS


def _first_win(fixed: float, each_byte: float) -> int:
    """The first n for which a GPU with these costs beats a CPU of 50 GFLOP/s."""
    n = 1
    while 2 * n**3 / 50e9 < fixed + 4 * n * n * each_byte + 2 * n**3 / FLOPS:
        n += 1
    return n


@exercise("05.3")
def break_even(answer) -> None:
    """The n from which copying, multiplying and copying back beats the CPU."""
    if not isinstance(answer, (int, float)) or isinstance(answer, bool):
        raise Wrong("the answer is a number")
    link = 1 / 10e9
    one, delay = LAUNCH + 10e-6, 10e-6
    right = _first_win(2 * one + LAUNCH, 2 * link)
    mistakes = (
        (_first_win(LAUNCH + KERNEL, 0), "count the copies too"),
        (_first_win(one + LAUNCH, link), "the result travels back as well"),
        (_first_win(LAUNCH + KERNEL, 2 * link), "each copy also has its fixed 15 µs"),
        (_first_win(2 * delay, 2 * link), "every copy and the product are launched"),
        (
            _first_win(3 * one + LAUNCH, 3 * link),
            "`a` travels once; it is both factors",
        ),
    )
    if abs(answer - right) <= 0.05 * right:
        return
    nearest = min(mistakes, key=lambda mistake: abs(answer - mistake[0]))
    if abs(answer - nearest[0]) <= 0.04 * nearest[0]:
        raise Wrong(nearest[1])
    way = "smaller" if answer > right else "larger"
    raise Wrong(
        f"it is {way}; write down what each side takes for n, with all its copies and "
        "launches, and set the two equal"
    )
