"""The exercises of lesson 08: how dense a matmul is, what binds, CPU against GPU."""

from exercises.counted import is_near, listed, name_mistake, number, word
from exercises.exercise import Wrong, call, exercise, solution
from simgpu import CARDS
from simgpu.costs import (
    COPY_LATENCY,
    HOST_COPY,
    LAUNCH,
    OF_BANDWIDTH,
    PRODUCT_CLOCKS,
    START,
)

FLOPS = CARDS["A100"].reached["float32"] * CARDS["A100"].flops["float32"]
BYTES = OF_BANDWIDTH * CARDS["A100"].memory_bandwidth


@exercise(
    "08.1",
    hints=(
        "Count both for one matmul. How many multiplications and additions does one "
        "element of the result take, and how many elements does the result have?",
        "Three matrices move: both factors and the result, and an element of float32 "
        "has 4 bytes. Divide the FLOPs by all these bytes.",
    ),
)
def intensity(function) -> None:
    """A function (rows, inner, columns) -> FLOPs a byte of a float32 matmul."""
    for rows, inner, columns in ((64, 64, 64), (1, 512, 2048), (4096, 64, 10)):
        found = number(call(function, rows, inner, columns))
        flops = 2 * rows * inner * columns
        left, right, result = rows * inner, inner * columns, rows * columns
        wanted = flops / (4 * (left + right + result))
        if is_near(found, wanted, 1e-6):
            continue
        mistakes = {
            wanted / 2: "a multiplication and an addition are two FLOPs",
            4 * wanted: "an element of float32 has 4 bytes, and you divide by elements",
            2 * wanted: "4 bytes for each element of float32, not 2",
            flops / (4 * (left + right)): "the result is written, too",
            flops / (4 * result): "both factors are read, too",
            1 / wanted: "FLOPs for each byte, not bytes for each FLOP",
        }
        when = f"({rows}, {inner}) by ({inner}, {columns}): "
        name_mistake(found, mistakes, 1e-6, when)
        raise Wrong(f"{when}you say {found:g} FLOPs a byte; count both once more")


@solution("08.1")
def solution_1():
    """Divide the FLOPs by the bytes of all three matrices.

    Each of the `rows * columns` results takes `inner` multiplications and as many
    additions. Both factors are read once, and the result is written once.
    """

    def intensity(rows, inner, columns):
        flops = 2 * rows * inner * columns
        elements = rows * inner + inner * columns + rows * columns
        return flops / (4 * elements)

    return intensity


_LIMITS = ("launches", "memory", "compute")
_MEANT = {"launch": "launches", "arithmetic": "compute"}


def _limit(answer) -> str | None:
    name = word(answer)
    name = _MEANT.get(name, name)
    return name if name in _LIMITS else None


@exercise(
    "08.2",
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


@solution("08.2")
def solution_2():
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


def _first_win(fixed: float, each_byte: float) -> int:
    """The first n for which a GPU with these costs beats a CPU of 50 GFLOP/s."""
    n = 1
    while 2 * n**3 / 50e9 < fixed + 4 * n * n * each_byte + 2 * n**3 / FLOPS:
        n += 1
    return n


@exercise(
    "08.3",
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
    product = LAUNCH + START + PRODUCT_CLOCKS / (1e3 * CARDS["A100"].clock)
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


@solution("08.3")
def solution_3():
    """Write both times as functions of n, and go up until the GPU wins.

    The CPU has only the product, 2 n³ FLOPs. The GPU has a copy there, a product and a
    copy back. `a` travels once, although it is both factors. The copy there and the
    product each wait for their launch of 10 µs. The copy back is launched while the
    product starts and runs, so its launch costs nothing. (With a third launch the
    answer is 127, which the check accepts.)

        copy there:  10 µs + 10 µs + 4 n² / 10e9
        product:     10 µs + 15 µs + 3.5 µs + 2 n³ / 17.36e12
        copy back:   10 µs + 4 n² / 10e9
        CPU:         2 n³ / 50e9

    where 4 n² are the bytes of a matrix, and 17.36e12 FLOP/s are 89 % of the A100's
    peak. For small n the fixed 58.5 µs are more than all that the CPU needs. The CPU's
    time grows with n³, so from some n on the GPU is faster.
    """
    launch = 10e-6
    before_each_copy = 10e-6
    until_the_start = 15e-6
    of_each_product = 3.5e-6
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
