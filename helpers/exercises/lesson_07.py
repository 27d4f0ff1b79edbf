"""The exercises of lesson 07: stopwatches, and what binds a program."""

import time

import torch

import simgpu
from helpers import host_seconds
from helpers.exercises.counted import is_near, listed, name_mistake, number, word
from helpers.exercises.exercise import Later, Wrong, call, exercise, solution
from helpers.exercises.results import a
from simgpu.device.cards import CARDS
from simgpu.timing.cost import COPY_LATENCY, HOST_COPY, LAUNCH, START
from simgpu.timing.kernel_cost import OF_BANDWIDTH, PRODUCT_FLOOR

FLOPS = CARDS["A100"].reached["float32"] * CARDS["A100"].flops["float32"]
BYTES = OF_BANDWIDTH * CARDS["A100"].memory_bandwidth


def _steps(sizes, run: list):
    """A step that makes a product of another size each time it is called."""
    matrices = [torch.ones(size, size, device="cuda") for size in sizes]

    def step():
        run.append(len(run))
        matrix = matrices[(len(run) - 1) % len(matrices)]
        matrix @ matrix

    return step


@exercise(
    "07.1",
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
    sizes = (1600, 1280, 1472, 1344)
    for n in (4, 1):
        run: list[int] = []
        torch.cuda.synchronize()
        right = one_mark_a_step(_steps(sizes, []), n)
        step = _steps(sizes, run)
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


@solution("07.1")
def solution_1():
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


_LIMITS = ("launches", "memory", "arithmetic")


def _limit(answer) -> str | None:
    name = word(answer)
    name = "launches" if name == "launch" else name
    return name if name in _LIMITS else None


@exercise(
    "07.2",
    hints=(
        "`bound` compares three times, those of the launches, the bytes and the "
        "FLOPs. What are the three numbers for each of these programs, if every "
        "input and every result is moved once?",
        "The name of an operation does not decide. How many FLOPs does a product do "
        "for each byte of the matrix if the other factor has one row, or 8 rows, and "
        "how long does the host take to launch a thousand operations?",
    ),
)
def five_bounds(*answers) -> None:
    """What binds five programs on an A100 in float32, as `bound` computes it."""
    n = 4096
    programs = (  # launches, bytes, FLOPs
        (1, 3 * 4 * n * n, 2 * n**3),
        (1, 3 * 4 * n * n, n * n),
        (1, 4 * (n * n + 2 * n), 2 * n * n),
        (1000, 1000 * 2 * 4 * 10_000, 1000 * 10_000),
        (1, 4 * (n * n + 2 * 8 * n), 2 * 8 * n * n),
    )
    expected = []
    for launches, nbytes, flops in programs:
        seconds = (launches * LAUNCH, nbytes / BYTES, flops / FLOPS)
        limits = dict(zip(_LIMITS, seconds, strict=True))
        right = max(limits, key=lambda limit: limits[limit])
        expected.append(
            (
                right,
                lambda said, limits=limits: (
                    f"that would take {1e6 * limits[said]:,.1f} µs, and something else "
                    "takes longer"
                ),
            )
        )
    say = "say launches, memory or arithmetic"
    listed(answers, expected, what="answers", read=_limit, say=say)


@solution("07.2")
def solution_2():
    """Compute all three times; the longest one is the bound.

    A product of two large matrices reads each element once and uses it 4096 times, so
    arithmetic takes longest. A sum does one FLOP for 12 bytes and is bound by memory.

    A product with one row or with 8 rows has to read the whole matrix, too, and does
    only 2 FLOPs for each element and row. For 8 rows that is 4 FLOPs a byte, which is
    below the A100's ridge point, so memory binds both.

    A thousand operations are a thousand launches of 10 µs each. The ten thousand
    numbers of one operation take far less than that, so the host is the bound.
    """
    n = 4096
    programs = [  # launches, bytes, FLOPs
        (1, 4 * 3 * n * n, 2 * n**3),  # a @ b: two matrices in, one out
        (1, 4 * 3 * n * n, n * n),  # a + b
        (1, 4 * (n * n + 2 * n), 2 * n * n),  # v @ a: a matrix, a row in, a row out
        (1000, 1000 * 4 * 2 * 10_000, 1000 * 10_000),  # s * 2, a thousand times
        (1, 4 * (n * n + 2 * 8 * n), 2 * 8 * n * n),  # u @ a: 8 rows in, 8 rows out
    ]
    answers = []
    for launches, nbytes, flops in programs:
        seconds = {
            "launches": launches * 10e-6,
            "memory": nbytes / (0.86 * 2039e9),
            "arithmetic": flops / (0.89 * 19.5e12),
        }
        answers.append(max(seconds, key=seconds.get))
    return (*answers,)


def _first_win(fixed: float, each_byte: float) -> int:
    """The first n for which a GPU with these costs beats a CPU of 50 GFLOP/s."""
    n = 1
    while 2 * n**3 / 50e9 < fixed + 4 * n * n * each_byte + 2 * n**3 / FLOPS:
        n += 1
    return n


@exercise(
    "07.3",
    hints=(
        "Write down what the CPU takes for `n`, and what `there_and_back` takes. "
        "Which parts of the second are the same for every `n`, which grow with n², "
        "and which with n³?",
        "The fixed costs decide at this size. What do a copy and the product pay "
        "besides their bytes and FLOPs, which launch happens while the GPU is busy, "
        "and how many matrices travel if `a` is both factors and the result comes "
        "back?",
    ),
)
def break_even(answer) -> None:
    """The n from which copying, multiplying and copying back beats the CPU."""
    answer, link = number(answer), 1 / HOST_COPY
    product = LAUNCH + START + PRODUCT_FLOOR
    there = LAUNCH + COPY_LATENCY  # the way back is launched while the product runs
    right = _first_win(there + product + COPY_LATENCY, 2 * link)
    if is_near(answer, right, 0.05):
        return
    mistakes = {
        _first_win(product, 0): "count the copies too",
        _first_win(there + product, link): "the result travels back as well, and the "
        "product starts 15 µs after its launch",
        _first_win(product, 2 * link): "each copy also has its fixed 10 µs",
        _first_win(2 * COPY_LATENCY + product - LAUNCH, 2 * link): "the copy and the "
        "product are launched",
        _first_win(2 * there + product + COPY_LATENCY, 3 * link): "`a` travels once; "
        "it is both factors",
    }
    nearest = min(mistakes, key=lambda mistake: abs(answer - mistake))
    name_mistake(answer, {nearest: mistakes[nearest]}, 0.04)
    way = "smaller" if answer > right else "larger"
    raise Wrong(
        f"it is {way}; write down what each side takes for n, with all its copies and "
        "launches, and set the two equal"
    )


@solution("07.3")
def solution_3():
    """Write both times as functions of n, and go up until the GPU wins.

    The CPU has only the product, 2 n³ FLOPs. The GPU has a copy there, a product and a
    copy back. `a` travels once, although it is both factors. The copy there and the
    product each wait for their launch of 10 µs. The copy back is launched while the
    product starts and runs, so its launch costs nothing. (With a third launch the
    answer is 128, which the check accepts.)

        copy there:  10 µs + 10 µs + 4 n² / 10e9
        product:     10 µs + 15 µs + 5 µs + 2 n³ / 17.36e12
        copy back:   10 µs + 4 n² / 10e9
        CPU:         2 n³ / 50e9

    where 4 n² are the bytes of a matrix, and 17.36e12 FLOP/s are 89 % of the A100's
    peak. For small n the fixed 60 µs are more than all that the CPU needs. The CPU's
    time grows with n³, so from some n on the GPU is faster.
    """
    launch = 10e-6
    before_each_copy = 10e-6
    until_the_start = 15e-6
    of_each_product = 5e-6
    link = 10e9  # bytes a second
    cpu_rate = 50e9  # FLOPs a second
    gpu_rate = 0.89 * 19.5e12

    def seconds_on_cpu(n):
        return 2 * n**3 / cpu_rate

    def seconds_on_gpu(n):
        copy = before_each_copy + 4 * n**2 / link
        product = until_the_start + of_each_product + 2 * n**3 / gpu_rate
        return launch + copy + launch + product + copy

    answer = 1
    while seconds_on_cpu(answer) < seconds_on_gpu(answer):
        answer += 1
    return answer


# -- answers ---------------------------------------------------------------------------


def _event():
    return torch.cuda.Event(enable_timing=True)


def one_mark_a_step(step, n):
    marks = [_event() for _ in range(n + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    marks[-1].synchronize()
    return [a.elapsed_time(b) for a, b in zip(marks[:-1], marks[1:], strict=True)]


def two_marks_a_step(step, n):
    begins, ends = [_event() for _ in range(n)], [_event() for _ in range(n)]
    for begin, end in zip(begins, ends, strict=True):
        begin.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(begins, ends, strict=True)]


def as_given(step, n):
    times = []
    for _ in range(n):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def host_clock(step, n):
    times = []
    for _ in range(n):
        start = host_seconds()
        step()
        times.append(1e3 * (host_seconds() - start))
    return times


def waits_each_time(step, n):
    times = []
    torch.cuda.synchronize()
    for _ in range(n):
        start = host_seconds()
        step()
        torch.cuda.synchronize()
        times.append(1e3 * (host_seconds() - start))
    return times


def event_waits_each_time(step, n):
    times = []
    for _ in range(n):
        begin, end = _event(), _event()
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def never_waits(step, n):
    marks = [_event() for _ in range(n + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    return [a.elapsed_time(b) for a, b in zip(marks[:-1], marks[1:], strict=True)]


def no_timing(step, n):
    begin, end = torch.cuda.Event(), torch.cuda.Event()
    begin.record()
    step()
    end.record()
    end.synchronize()
    return [begin.elapsed_time(end)]


def from_the_first(step, n):
    marks = [_event() for _ in range(n + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    marks[-1].synchronize()
    return [marks[0].elapsed_time(mark) for mark in marks[1:]]


def mean(step, n):
    total = sum(one_mark_a_step(step, n))
    return [total / n] * n


def warm_up(step, n):
    step()
    return one_mark_a_step(step, n)


RIGHT = {
    "step_times": [one_mark_a_step, two_marks_a_step],
    "five_bounds": [
        ("arithmetic", "memory", "memory", "launches", "memory"),
        ("Arithmetic", "memory", "memory", "launch", "memory"),
    ],
    "break_even": [122, 117, 128],
}
WRONG = {
    "step_times": [
        (as_given, "you say"),
        (host_clock, "is the launch"),
        (waits_each_time, "the host waits 4 times"),
        (event_waits_each_time, "the host waits 4 times"),
        (never_waits, "must be completed"),
        (no_timing, "enable_timing=True"),
        (from_the_first, "begins at the first step"),
        (mean, "you say"),
        (warm_up, "it runs 5 steps"),
        (lambda s, n: [t / 1e3 for t in one_mark_a_step(s, n)], "seconds"),
        (lambda s, n: [1e3 * t for t in one_mark_a_step(s, n)], "too much"),
        (lambda s, n: sum(one_mark_a_step(s, n)), "not a float"),
        (lambda s, n: one_mark_a_step(s, n)[1:], "4 steps gave 3 times"),
    ],
    "five_bounds": [
        (("memory", "memory", "memory", "launches", "memory"), "number 1"),
        (Later(lambda: ("arithmetic",) * 5), "number 2"),
        (("arithmetic", "memory", "arithmetic", "memory", "memory"), "mber 3"),
        (("arithmetic", "memory", "memory", "memory", "memory"), "number 4"),
        (
            ("arithmetic", "memory", "memory", "launches", "arithmetic"),
            "number 5",
        ),
        (("compute", "memory", "memory", "launches", "memory"), "say launches"),
        (("arithmetic", "memory"), "5 answers are asked for, not 2"),
    ],
    "break_even": [
        (91, "count the copies"),
        (112, "travels back"),
        (99, "fixed 10"),
        (108, "are launched"),
        (139, "travels once"),
        (500, "it is smaller"),
        (10, "it is larger"),
        ("a hundred", "give a number"),
    ],
}
