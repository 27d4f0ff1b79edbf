"""Recorded operations: products, convolutions, passes, launches, copies, collectives.

Each operation is run without values (`simgpu.estimate`) as it was recorded: kernels
alone, or on an idle GPU between two events, with what the host takes inside.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

import simgpu
from simgpu.timing.cost import copy_seconds
from simgpu.timing.topology import Topology
from simgpu.timing.collective_cost import choose
from tests.recorded.cards import card_named
from tests.recorded.comparison import Comparison, Omission, compare_rows
from tests.recorded.files import Recording

US = 1e-6
LARGE = 2**30  # bytes of a copy whose size was not recorded


def compare(recording: Recording) -> tuple[list[Comparison], list[Omission]]:
    """The rows of a recording of one of these kinds beside what is predicted."""
    return compare_rows(recording, PREDICT[recording.kind])


def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without values."""
    return torch.empty(size, dtype=dtype, device="meta")


def kernel_time(card, function: Callable, *tensors) -> float:
    """Seconds of an operation's kernels alone."""
    return simgpu.estimate(function, *tensors, card=card).kernel_seconds


def between_events(card, function: Callable, *tensors) -> float:
    """Seconds from one event to another with an operation between, on an idle GPU."""
    events = []

    def run(*tensors) -> None:
        events.extend(torch.cuda.Event(enable_timing=True) for _ in range(2))
        events[0].record()
        function(*tensors)
        events[1].record()
        torch.cuda.synchronize()
        events.append(events[0].elapsed_time(events[1]) / 1e3)

    with torch.no_grad():
        simgpu.estimate(run, *tensors, card=card)
    return events[-1]


def gemm_fp16(row: list):
    """[card, M, N, K, us]: (M, K) by (K, N) in half precision, the kernel alone."""
    name, m, n, k, recorded = row
    tensors = (meta(*size, dtype=torch.float16) for size in ((m, k), (k, n)))
    seconds = kernel_time(card_named(name), torch.mm, *tensors)
    return "product, float16", name, f"{m} x {n} x {k}", seconds, recorded * US


def gemm_fp32(row: list):
    """[card, op, B, M, N, K, us]: (B, M, N) by (B, N, K), or a Linear(N, K)."""
    name, op, b, m, n, k, recorded = row
    if op == "bmm":
        tensors, run = (meta(b, m, n), meta(b, n, k)), torch.bmm
    elif op == "linear":
        tensors, run = (meta(b, m, n), meta(k, n), meta(k)), F.linear
    else:
        raise KeyError(op)
    seconds = between_events(card_named(name), run, *tensors)
    return "product, float32", name, f"{op} {b} {m} {n} {k}", seconds, recorded * US


def bmm_fp16(row: list):
    """[card, op, B, N, us]: (B, N, N) by (B, N, N)."""
    name, op, b, n, recorded = row
    tensors = (meta(b, n, n, dtype=torch.float16) for _ in range(2))
    seconds = between_events(card_named(name), torch.bmm, *tensors)
    return "product, float16", name, f"{op} {b} {n}", seconds, recorded * US


def conv_fp32(row: list):
    """[card, batch, channels in, out, kernel, size, stride, padding, us]."""
    name, batch, channels, out, kernel, size, stride, padding, recorded = row
    tensors = meta(batch, channels, size, size), meta(out, channels, kernel, kernel)

    def run(x, weight):
        with torch.backends.cudnn.flags(allow_tf32=False):
            F.conv2d(x, weight, stride=stride, padding=padding)

    seconds = between_events(card_named(name), run, *tensors)
    what = f"{batch} x {channels} to {out}, {kernel} x {kernel} of {size} x {size}"
    return "convolution, float32", name, what, seconds, recorded * US


PASSES = {
    "add": lambda x: torch.add(x, x),
    "mul": lambda x: torch.mul(x, x),
    "div": lambda x: torch.div(x, x),
    "pow": lambda x: torch.pow(x, 2),
    "relu": torch.relu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "softmax": lambda x: F.softmax(x, -1),
    "ln": lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias),
}
TWO_TENSORS = {"add": torch.add, "mul": torch.mul, "div": torch.div}


def _pass(op: str, rows: int, width: int) -> tuple[Callable, tuple]:
    """What was called, and the tensors it was given."""
    tensors = (meta(rows, width),)
    if op in TWO_TENSORS:
        return TWO_TENSORS[op], (*tensors, meta(rows, width))
    if op == "ln":
        tensors += (meta(width), meta(width))
    return PASSES[op], tensors


def vector_fp32(row: list):
    """[card, op, B, H, us]: over the last dimension of (B, H)."""
    name, op, rows, width, recorded = row
    run, tensors = _pass(op, rows, width)
    seconds = between_events(card_named(name), run, *tensors)
    return "pass, float32", name, f"{op} {rows} x {width}", seconds, recorded * US


def add_fp16(row: list):
    """[card, op, bytes read and written, us]: the kernel alone."""
    name, op, nbytes, recorded = row
    numbers = nbytes // 6  # two tensors read and one written, 2 bytes each
    tensors = (meta(numbers, dtype=torch.float16) for _ in range(2))
    seconds = kernel_time(card_named(name), TWO_TENSORS[op], *tensors)
    return "pass, float16", name, f"{op} of {nbytes} bytes", seconds, recorded * US


def host_floor(row: list):
    """[card, op, samples, us, least us]: an operation on few numbers."""
    name, op, _, recorded, _ = row
    if op == "bmm":
        run, tensors = torch.bmm, (meta(4, 32, 32), meta(4, 32, 32))
    else:
        run, tensors = _pass(op, 64, 128)
    seconds = between_events(card_named(name), run, *tensors)
    return "small operation", name, op, seconds, recorded * US


def nccl_nvlink(row: list):
    """[card, collective, ranks, bytes, us]: in one node."""
    name, collective, ranks, nbytes, recorded = row
    run = "send" if collective == "send_recv" else collective
    chosen = choose(run, nbytes, range(ranks), Topology(card_named(name), ranks))
    what = f"{collective} of {nbytes} bytes, {ranks} ranks"
    return "collective", name, what, chosen.seconds, recorded * US


class _Gpu:
    """What a copy asks of a GPU."""

    def __init__(self, card):
        self.card = card


def copies(row: list):
    """[card, way, memory, bytes or null, GB/s]: between the host and a GPU."""
    name, way, memory, nbytes, recorded = row
    gpu = _Gpu(card_named(name))
    ends = {"host to device": (None, gpu), "device to host": (gpu, None)}[way]
    nbytes = nbytes or LARGE
    seconds = copy_seconds(*ends, nbytes, pinned=memory.startswith("pinned"))
    # as seconds, so that more than 1 is too slow here too
    return "copy", name, f"{way}, {memory}", seconds, nbytes / (recorded * 1e9)


PREDICT: dict[str, Callable] = {
    function.__name__: function
    for function in (
        add_fp16, bmm_fp16, conv_fp32, copies, gemm_fp16, gemm_fp32, host_floor,
        nccl_nvlink, vector_fp32,
    )
}  # fmt: skip
