"""The exercises of lesson 08: what binds, how to find it, and a graph of one's own."""

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import simgpu
from exercises.counted import listed, word
from exercises.exercise import Wrong, call, exercise, solution
from exercises.results import a, near, tensor
from simgpu import CARDS
from simgpu.costs import LAUNCH, OF_BANDWIDTH

FLOPS = CARDS["A100"].reached["float32"] * CARDS["A100"].flops["float32"]
BYTES = OF_BANDWIDTH * CARDS["A100"].memory_bandwidth


_LIMITS = ("launches", "memory", "compute")
_MEANT = {"launch": "launches", "arithmetic": "compute"}


def _limit(answer) -> str | None:
    name = word(answer)
    name = _MEANT.get(name, name)
    return name if name in _LIMITS else None


@exercise(
    "08.1",
    hints=(
        "The longest of three times binds: those of the launches, the bytes and the "
        "FLOPs. What are the three numbers for each of these programs, if every "
        "input and every result is moved once?",
        "The name of an operation does not decide. How many FLOPs does a product do "
        "for each byte of the matrix if the other factor has one row, or 8 rows, and "
        "how long does the host take to launch a thousand operations?",
    ),
)
def five_bounds(*answers) -> None:
    """What binds five programs on an A100 in float32."""
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
    say = "say launches, memory or compute"
    listed(answers, expected, what="answers", read=_limit, say=say)


@solution("08.1")
def solution_1():
    """Compute all three times; the longest one is the bound.

    A product of two large matrices reads each element once and uses it 4096 times, so
    computing takes longest. A sum does one FLOP for 12 bytes and is bound by memory.

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
            "compute": flops / (0.89 * 19.5e12),
        }
        answers.append(max(seconds, key=seconds.get))
    return (*answers,)


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="cuda")


def _repeated(operation, count: int = 1, set_up: int = 0):
    """A step of this operation; its first call also launches small kernels."""
    small, calls = _ones(10_000), []

    def step() -> None:
        for _ in range(0 if calls else set_up):
            small * 2
        calls.append(1)
        for _ in range(count):
            operation()

    return step


def _steps() -> list:
    """What each step does, what binds it, the step, and why other answers are wrong."""
    small, tile, large = _ones(10_000), _ones(64, 64), _ones(2**24)
    row, matrix, square = _ones(1, 4096), _ones(4096, 4096), _ones(2048, 2048)
    idle = (
        "its kernels run for a small part of the time; add them up, in the unit of the "
        "time of the step, before you look at FLOPs"
    )
    units = (
        "its kernels run nearly all the time; an event's times are in milliseconds, "
        "and the profiler's in microseconds"
    )
    return [
        (
            "a hundred products of 10,000 numbers",
            "launches",
            _repeated(lambda: small * 2, 100),
            {"memory": idle, "compute": idle},
        ),
        (
            "a hundred matmuls of 64 by 64",
            "launches",
            _repeated(lambda: tile @ tile, 100),
            {"memory": idle, "compute": idle},
        ),
        (
            "four ReLUs of 16 million numbers",
            "memory",
            _repeated(lambda: large.relu_(), 4),
            {"launches": units, "compute": "there is no matmul, so no FLOP is counted"},
        ),
        (
            "eight matmuls of one row",
            "memory",
            _repeated(lambda: row @ matrix, 8),
            {
                "launches": units,
                "compute": "a matmul, but far from the peak: its rate is FLOPs divided "
                "by the seconds of the kernels",
            },
        ),
        (
            "a matmul of 2048 by 2048, with a slow first call",
            "compute",
            _repeated(lambda: square @ square, set_up=500),
            {
                "launches": "the first call sets something up: run the step once "
                "before you measure",
                "memory": "its rate is above half of the peak; FLOPs a second need the "
                "kernels' time in seconds",
            },
        ),
    ]


def _peak() -> float:
    """FLOPs a second of float32; of a real card, what a large matmul hints at.

    A real card that grows hot may stay far below its datasheet.
    """
    for card in CARDS.values():
        if simgpu.is_running() and card.name in torch.cuda.get_device_name():
            return card.flops["float32"]
    side = 4096
    factor = _ones(side, side)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    factor @ factor
    begin.record()
    factor @ factor
    end.record()
    end.synchronize()
    return 2 * side**3 / (1e-3 * begin.elapsed_time(end)) / 0.89


@exercise(
    "08.2",
    hints=(
        "Three measurements, which the lesson has in three cells: two events around a "
        "step, the profiler's sum, and the counter of FLOPs. Which of them are in µs "
        "and which in ms, and which two must not be on at the same time?",
        "Run `step()` once before you measure, and wait for the end before "
        "`elapsed_time`. The rate is FLOPs divided by the seconds of the kernels. Look "
        "at the busy share first: while the GPU waits for launches, neither memory nor "
        "compute matters.",
    ),
)
def what_binds(function) -> None:
    """A function (step, peak) -> "launches", "memory" or "compute"."""
    peak = _peak()
    for name, right, step, reasons in _steps():
        torch.cuda.synchronize()
        said = _limit(call(function, step, peak, when=f"{name}:"))
        if said is None:
            raise Wrong(f"{name}: say launches, memory or compute")
        if said != right:
            raise Wrong(f"{name}: you say {said}; {reasons[said]}")


@solution("08.2")
def solution_2():
    """Measure the time alone, then the kernels, then the FLOPs.

    The first call may set things up, so it is not measured. The time of the step comes
    from two events, without the profiler, which slows a real host.

    If the kernels run for a small part of that time, the GPU waits for launches, and no
    faster kernel helps. If they run nearly all the time, their rate decides: matmuls
    near the peak are compute-bound. A rate far below it means that the kernels wait for
    memory.
    """

    def what_binds(step, peak):
        step()  # sets up
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        took = 1e-3 * begin.elapsed_time(end)  # seconds
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        rows = profiler.key_averages()
        busy = 1e-6 * sum(row.self_device_time_total for row in rows)
        with FlopCounterMode(display=False) as counter:
            step()
        if busy < 0.8 * took:
            return "launches"
        rate = counter.get_total_flops() / busy
        return "compute" if rate > peak / 2 else "memory"

    return what_binds


@exercise(
    "08.3",
    hints=(
        "A graph always reads the memory with which it was captured, and writes its "
        "result into the same place. What must happen before a replay, and what after "
        "it?",
        "Capture `function` with a tensor that you keep, such as `x.clone()`. Before "
        "each replay, `copy_` the new numbers into it. After it, return a `clone()` of "
        "what `function` returned in the capture.",
    ),
)
def graphed(function) -> None:
    """A function (function, x) -> a function of other tensors, by replays."""
    called = []

    def step(x):
        called.append(x)
        for _ in range(8):
            x = (x + 1).sin()
        return x

    given = [torch.full((4,), fill, device="cuda") for fill in (0.1, 0.2, 0.3)]
    before = step(given[0])
    called.clear()
    replay = call(function, step, given[0].clone())
    if not callable(replay):
        raise Wrong(f"return a function, not {a(type(replay).__name__)}")
    if not called:
        raise Wrong("`function` is not called, so nothing is captured")
    captured = len(called)
    found = [tensor(call(replay, x), "your function returns") for x in given[1:]]
    if len(called) > captured:
        raise Wrong(
            "for each tensor, `function` is called again, with all its launches; only "
            "`replay()` is a single launch"
        )
    wanted = [step(x) for x in given[1:]]
    if near(found[1], before):
        raise Wrong(
            "it gives what `x` gives: the graph reads the memory of its capture, so "
            "copy each tensor there"
        )
    if near(found[0], wanted[1]):
        raise Wrong(
            "the second call writes over the result of the first: the graph has one "
            "place for it, so return a copy"
        )
    if not all(map(near, found, wanted)):
        raise Wrong("for another tensor, it does not give what `function` gives")


@solution("08.3")
def solution_3():
    """Keep one tensor for the input, and copy into it and out of the result.

    The graph knows two addresses: of what it reads, and of what it writes. So each new
    tensor is copied into the first, and the result is copied before the next replay
    writes over it. Both copies are launches, too: that is worth it where the function
    has many.
    """

    def graphed(function, x):
        read = x.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm up
            function(read)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            written = function(read)

        def replay(new):
            read.copy_(new)
            graph.replay()
            return written.clone()

        return replay

    return graphed
