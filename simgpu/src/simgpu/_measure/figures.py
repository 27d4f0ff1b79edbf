"""What is measured of one card: products, passes, attention, convolutions, copies.

The rows have the formats of `tests/recordings`: [card, ..., microseconds].
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from simgpu._measure.timing import (
    RUNS,
    Budget,
    OutOfTime,
    Run,
    Stopwatch,
    Times,
    between_events,
    launch,
)

MIB = 2**20
_AMPERE = (8, 0)  # compute capability of the first cards with bfloat16
_SHAPES = [
    (8192, 8192, 8192), (4096, 4096, 4096), (2048, 11008, 4096), (4096, 4096, 11008),
    *((m, n, k) for m in (1, 64, 512, 2048)
      for n, k in ((1024, 1024), (4096, 4096), (4096, 11008))),
]  # fmt: skip
# kind -> the columns between card and time; what constants are fitted to comes first
COLUMNS: dict[str, list[tuple]] = {
    "add_fp16": [("add", 6 * 2**power) for power in (28, 26, 24, 20, 16, 12)],
    "gemm_bf16": _SHAPES,
    "gemm_fp16": _SHAPES,
    "gemm_tf32": _SHAPES[:4],
    "gemm_fp32": [
        ("linear", 1, 4096, 4096, 4096), ("linear", 1, 2048, 4096, 4096),
        *(("linear", 1, m, n, n) for m in (128, 1024) for n in (512, 2048)),
        *(("bmm", b, 512, 512, 512) for b in (4, 64)),
    ],
    "gemm_fp64": [(2048, 2048, 2048), (1024, 2048, 4096)],
    "attention_sdpa": [
        (4, 2048, 32, 32, 128), (1, 8192, 32, 32, 128), (8, 4096, 16, 16, 64),
        (8, 512, 16, 16, 64),
    ],
    "host_floor": [(op, RUNS) for op in ("add", "relu", "softmax", "ln", "bmm")],
    "copies": [
        (way, memory, nbytes)
        for way in ("host to device", "device to host")
        for memory in ("pinned", "pageable")
        for nbytes in (512 * MIB, 64 * MIB, 4096)
    ],
    "vector_fp32": [
        (op, rows, width)
        for op in ("add", "relu", "gelu", "softmax", "ln")
        for rows, width in ((2048, 1024), (16384, 1024), (65536, 4096))
    ],
    "conv_fp32": [
        (32, 64, 64, 3, 56, 1, 1), (32, 256, 64, 1, 56, 1, 0),
        (32, 128, 128, 3, 28, 1, 1), (32, 512, 512, 3, 7, 1, 1),
        (32, 3, 64, 7, 224, 2, 3),
    ],
    "bmm_fp16": [("bmm", b, n) for b, n in ((64, 256), (64, 512), (32, 1024))],
}  # fmt: skip
BETWEEN_CARDS = [
    ("device to device", "peer", nbytes) for nbytes in (512 * MIB, 64 * MIB)
]
WHAT = {
    "add_fp16": "sum in float16, kernel alone, cold L2: [card, op, bytes, us]",
    "gemm_bf16": "linear in bfloat16, kernel alone: [card, M, N, K, us]",
    "gemm_fp16": "mm in float16, kernel alone: [card, M, N, K, us]",
    "gemm_tf32": "mm of float32 in TF32, kernel alone: [card, M, N, K, us]",
    "gemm_fp32": "without TF32, between two events: [card, op, B, M, N, K, us]",
    "gemm_fp64": "mm in float64, kernel alone: [card, M, N, K, us]",
    "attention_sdpa": "causal flash attention of PyTorch in bfloat16, forward: "
    "[card, sequences, tokens, heads, kv heads, head dim, us]",
    "host_floor": "a small operation between two events on an idle GPU: "
    "[card, op, samples, median us, least us]",
    "copies": "[card, way, memory, bytes, GB/s]",
    "vector_fp32": "between two events: [card, op, rows, width, us]",
    "conv_fp32": "without TF32, between two events: "
    "[card, batch, channels, out, kernel, size, stride, padding, us]",
    "bmm_fp16": "between two events: [card, op, B, N, us]",
}


class Recorded(NamedTuple):
    """The rows of one kind, and for each how far its runs are apart."""

    rows: list[list]
    spread: list[float]


class Figures(NamedTuple):
    """What was measured of a card."""

    recordings: dict[str, Recorded]
    launch: float  # seconds of the host
    left_out: int  # rows for which there was no time or no memory


def measure(card: str, budget: Budget) -> Figures:
    """Measure the current GPU, for as long as there is time.

    Args:
        card: what the rows call it.
        budget: the time that is left.
    """
    watch = Stopwatch()
    x = torch.ones(1, device="cuda")
    launched = launch(lambda: torch.add(x, x)).seconds
    wanted = _wanted()
    found, left_out = {}, 0
    for kind, all_columns in wanted.items():
        recorded = found[kind] = Recorded([], [])
        for columns in all_columns:
            try:
                budget.check()
                last, times = _MEASURES[kind](watch, *columns)
            except (OutOfTime, torch.OutOfMemoryError):
                left_out += 1
                continue
            recorded.rows.append([card, *columns, *last])
            recorded.spread.append(round(times.spread, 3))
    return Figures({k: r for k, r in found.items() if r.rows}, launched, left_out)


def _wanted() -> dict[str, list[tuple]]:
    """What this machine can run."""
    wanted = dict(COLUMNS)
    capability = torch.cuda.get_device_capability()
    if capability < _AMPERE:
        for kind in ("gemm_bf16", "gemm_tf32", "attention_sdpa"):
            del wanted[kind]
    if torch.cuda.device_count() > 1:
        wanted["copies"] = [*wanted["copies"][:3], *BETWEEN_CARDS,
                            *wanted["copies"][3:]]  # fmt: skip
    return wanted


# -- operations ------------------------------------------------------------------------

Measure = Callable[..., tuple[list, Times]]


def _randn(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, dtype=dtype, device="cuda")


def _us(times: Times) -> tuple[list, Times]:
    return [round(1e6 * times.seconds, 3)], times


def _product(dtype: torch.dtype, product: Callable, precision: str = "highest"):
    def measure(watch: Stopwatch, m: int, n: int, k: int) -> tuple[list, Times]:
        a, b = _randn(m, k, dtype=dtype), _randn(n, k, dtype=dtype)
        b = b if product is F.linear else b.t().contiguous()
        with _float32(precision), torch.no_grad():
            return _us(watch.alone(lambda: product(a, b)))

    return measure


@contextlib.contextmanager
def _float32(precision: str) -> Iterator[None]:
    """How products of float32 are computed for a while: "high" is TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _product_fp32(watch, op: str, b: int, m: int, n: int, k: int):
    if op == "bmm":
        x, y = _randn(b, m, n), _randn(b, n, k)
        run: Run = lambda: torch.bmm(x, y)  # noqa: E731
    else:
        x, weight, bias = _randn(b, m, n), _randn(k, n), _randn(k)
        run = lambda: F.linear(x, weight, bias)  # noqa: E731
    with _float32("highest"), torch.no_grad():
        return _us(between_events(run))


def _products_fp16(watch, op: str, b: int, n: int):
    x, y = (_randn(b, n, n, dtype=torch.float16) for _ in range(2))
    return _us(between_events(lambda: torch.bmm(x, y)))


def _sum(watch: Stopwatch, op: str, nbytes: int):
    x, y = (_randn(nbytes // 6, dtype=torch.float16) for _ in range(2))
    return _us(watch.alone(lambda: torch.add(x, y)))


def _attention(watch: Stopwatch, sequences, tokens, heads, kv_heads, width):
    shape = sequences, heads, tokens, width
    q, k, v = (_randn(*shape, dtype=torch.bfloat16) for _ in range(3))
    attend = F.scaled_dot_product_attention
    # what `reached` is of; on Hopper and Blackwell PyTorch would take cuDNN's
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _us(watch.alone(lambda: attend(q, k, v, is_causal=True)))


def _convolution(watch, batch, channels, out, kernel, size, stride, pad):
    x = _randn(batch, channels, size, size)
    weight = _randn(out, channels, kernel, kernel)
    with torch.backends.cudnn.flags(allow_tf32=False), torch.no_grad():
        run: Run = lambda: F.conv2d(x, weight, stride=stride, padding=pad)  # noqa: E731
        return _us(between_events(run))


_OF_ONE = {"relu": torch.relu, "gelu": F.gelu, "softmax": lambda x: F.softmax(x, -1)}


def _one_pass(op: str, rows: int, width: int) -> Run:
    x = _randn(rows, width)
    if op == "add":
        y = _randn(rows, width)
        return lambda: torch.add(x, y)
    if op == "ln":
        weight, bias = _randn(width), _randn(width)
        return lambda: F.layer_norm(x, (width,), weight, bias)
    return lambda: _OF_ONE[op](x)


def _vector(watch, op: str, rows: int, width: int):
    with torch.no_grad():
        return _us(between_events(_one_pass(op, rows, width)))


def _small(watch, op: str, samples: int):
    if op == "bmm":
        x, y = _randn(4, 32, 32), _randn(4, 32, 32)
        run: Run = lambda: torch.bmm(x, y)  # noqa: E731
    else:
        run = _one_pass(op, 64, 128)
    with torch.no_grad():
        times = between_events(run)
    return [round(1e6 * times.seconds, 3), round(1e6 * times.least, 3)], times


def _copy(watch: Stopwatch, way: str, memory: str, nbytes: int):
    card = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    if memory == "peer":
        other = torch.cuda.current_device() + 1
        other %= torch.cuda.device_count()
        ends = card, torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{other}")
    else:
        pinned = memory == "pinned"
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        host.zero_()  # so that the system has given it memory
        ends = (host, card) if way == "host to device" else (card, host)
    source, target = ends
    times = watch.alone(lambda: target.copy_(source, non_blocking=memory != "pageable"))
    return [float(f"{nbytes / times.seconds / 1e9:.5g}")], times


_MEASURES: dict[str, Measure] = {
    "add_fp16": _sum,
    "gemm_bf16": _product(torch.bfloat16, F.linear),
    "gemm_fp16": _product(torch.float16, torch.mm),
    "gemm_tf32": _product(torch.float32, torch.mm, "high"),
    "gemm_fp32": _product_fp32,
    "gemm_fp64": _product(torch.float64, torch.mm),
    "attention_sdpa": _attention,
    "host_floor": _small,
    "copies": _copy,
    "vector_fp32": _vector,
    "conv_fp32": _convolution,
    "bmm_fp16": _products_fp16,
}
