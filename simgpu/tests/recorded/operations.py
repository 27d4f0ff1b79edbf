"""Recorded operations: products, convolutions, passes, launches, copies, collectives.

Each operation is run without values (`simgpu.estimate`) as it was recorded: the kernel
alone, or on an idle GPU between two events, with what the host takes inside. On a real
GPU `simgpu measure` runs the same.
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import simgpu
from recorded.cards import card_named
from recorded.comparison import Comparison, Omission, compare_rows
from recorded.files import Recording
from simgpu._timing.collective_cost import choose
from simgpu._timing.cost import copy_seconds
from simgpu._timing.kernel_cost import Attention, attention_seconds
from simgpu._timing.topology import Topology

US = 1e-6
LARGE = 2**30  # bytes of a copy whose size was not recorded
HALF = torch.float16


class Program(NamedTuple):
    """An operation as it was called."""

    what: str
    run: Callable
    tensors: tuple[torch.Tensor, ...]  # on "meta"


class Kind(NamedTuple):
    """How the rows of a file were recorded: [card, ..., microseconds]."""

    title: str
    program: Callable[..., Program]  # from the columns between card and time
    alone: bool = False  # the kernel alone was timed, not what is between two events


def compare(recording: Recording) -> tuple[list[Comparison], list[Omission]]:
    """The rows of a recording of one of `PREDICT` beside what is predicted."""
    predict = PREDICT[recording.kind]
    kind = KINDS.get(recording.kind)
    if kind is not None and kind.alone:
        predict = _operation(
            recording.kind, seconds_alone(kind, recording.data["rows"])
        )
    return compare_rows(recording, lambda row: [predict(row)])


def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without values."""
    return torch.empty(size, dtype=dtype, device="meta")


# -- programs --------------------------------------------------------------------------


def product_fp16(m: int, n: int, k: int) -> Program:
    """(M, K) by (K, N) in half precision."""
    tensors = meta(m, k, dtype=HALF), meta(k, n, dtype=HALF)
    return Program(f"{m} x {n} x {k}", torch.mm, tensors)


def product_bf16(m: int, n: int, k: int) -> Program:
    """A Linear(K, N) without bias, of (M, K) in bfloat16."""
    x, weight = (meta(*size, dtype=torch.bfloat16) for size in ((m, k), (n, k)))
    return Program(f"{m} x {n} x {k}", F.linear, (x, weight))


def product_fp32(op: str, b: int, m: int, n: int, k: int) -> Program:
    """(B, M, N) by (B, N, K), or a Linear(N, K) of (B, M, N)."""
    what = f"{op} {b} {m} {n} {k}"
    if op == "bmm":
        return Program(what, torch.bmm, (meta(b, m, n), meta(b, n, k)))
    if op == "linear":
        return Program(what, F.linear, (meta(b, m, n), meta(k, n), meta(k)))
    raise KeyError(op)


def product_of(dtype: torch.dtype, precision: str = "highest") -> Callable:
    """(M, K) by (K, N) in a type; "high" is TF32."""

    def program(m: int, n: int, k: int) -> Program:
        def run(a, b):
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(precision)
            try:
                return torch.mm(a, b)
            finally:
                torch.set_float32_matmul_precision(before)

        tensors = meta(m, k, dtype=dtype), meta(k, n, dtype=dtype)
        return Program(f"{m} x {n} x {k}", run, tensors)

    return program


def attention(b: int, tokens: int, heads: int, kv_heads: int, width: int) -> Program:
    """PyTorch's own causal flash attention, in bfloat16."""
    sides = ((b, its, tokens, width) for its in (heads, kv_heads, kv_heads))
    tensors = tuple(meta(*side, dtype=torch.bfloat16) for side in sides)
    attend = F.scaled_dot_product_attention

    def run(q, k, v):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return attend(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

    return Program(f"{b} x {tokens} tokens, {heads} heads of {width}", run, tensors)


def products_fp16(op: str, b: int, n: int) -> Program:
    """(B, N, N) by (B, N, N)."""
    tensors = meta(b, n, n, dtype=HALF), meta(b, n, n, dtype=HALF)
    return Program(f"{op} {b} {n}", torch.bmm, tensors)


def convolution(
    batch: int, channels: int, out: int, kernel: int, size: int, stride: int, pad: int
) -> Program:
    """The forward pass of a square Conv2d without TF32."""
    tensors = meta(batch, channels, size, size), meta(out, channels, kernel, kernel)
    what = f"{batch} x {channels} to {out}, {kernel} x {kernel} of {size} x {size}"

    def run(x, weight):
        with torch.backends.cudnn.flags(allow_tf32=False):
            return F.conv2d(x, weight, stride=stride, padding=pad)

    return Program(what, run, tensors)


_OF_TWO = {"add": torch.add, "mul": torch.mul, "div": torch.div}
_OF_ONE = {
    "relu": torch.relu, "gelu": F.gelu, "tanh": torch.tanh, "pow": torch.square,
    "softmax": lambda x: F.softmax(x, -1),
}  # fmt: skip


def one_pass(op: str, rows: int, width: int) -> Program:
    """An element-wise operation, or one over the last dimension of (rows, width)."""
    what, x = f"{op} {rows} x {width}", meta(rows, width)
    if op in _OF_TWO:
        return Program(what, _OF_TWO[op], (x, meta(rows, width)))
    if op == "ln":
        norm = torch.nn.functional.layer_norm
        tensors = x, meta(width), meta(width)
        return Program(what, lambda x, w, b: norm(x, (width,), w, b), tensors)
    return Program(what, _OF_ONE[op], (x,))


def pass_fp16(op: str, nbytes: int) -> Program:
    """Of two tensors; the bytes are those read and written."""
    x, y = (meta(nbytes // 6, dtype=HALF) for _ in range(2))
    return Program(f"{op} of {nbytes} bytes", _OF_TWO[op], (x, y))


def small(op: str, *_) -> Program:
    """On few numbers."""
    if op == "bmm":
        return Program(op, torch.bmm, (meta(4, 32, 32), meta(4, 32, 32)))
    return one_pass(op, 64, 128)._replace(what=op)


KINDS = {
    "gemm_bf16": Kind("product, bfloat16", product_bf16, alone=True),
    "gemm_fp16": Kind("product, float16", product_fp16, alone=True),
    "gemm_fp32": Kind("product, float32", product_fp32),
    "gemm_tf32": Kind("product, TF32", product_of(torch.float32, "high"), alone=True),
    "gemm_fp64": Kind("product, float64", product_of(torch.float64), alone=True),
    "attention_sdpa": Kind("attention of PyTorch", attention, alone=True),
    "bmm_fp16": Kind("product, float16", products_fp16),
    "conv_fp32": Kind("convolution, float32", convolution),
    "vector_fp32": Kind("pass, float32", one_pass),
    "add_fp16": Kind("pass, float16", pass_fp16, alone=True),
    "host_floor": Kind("small operation", small),
}


# -- predictions -----------------------------------------------------------------------


def _operation(name: str, known: dict[int, float] | None = None) -> Callable:
    """What predicts a row.

    Args:
        name: one of `KINDS`.
        known: what `seconds_alone` says of rows.
    """
    kind = KINDS[name]

    def predict(row: list) -> tuple:
        card, *columns, recorded = row
        if name == "host_floor":  # [card, operation, samples, median, least]
            recorded = columns.pop()
        program = kind.program(*columns)
        seconds = (known or {}).get(id(row))
        if seconds is None:
            spend = kernel_seconds if kind.alone else seconds_between_events
            seconds = spend(card_named(card), program)
        return kind.title, card, program.what, seconds, recorded * US

    return predict


def kernel_seconds(card, program: Program) -> float:
    """Seconds of a program's kernels alone."""
    with torch.no_grad():
        cost = simgpu.estimate(program.run, *program.tensors, card=card)
    return cost.kernel_seconds


def seconds_alone(kind: Kind, rows: list) -> dict[int, float]:
    """`kernel_seconds` of rows, by their `id`, in one estimate for each card.

    To start and stop a simulated card takes longer than an operation without values. A
    row that fails is left out: it is to fail by itself.
    """
    found: dict[int, float] = {}

    def run(rows: list) -> None:
        timeline = simgpu.timeline()
        for row in rows:
            with contextlib.suppress(Exception):
                program = kind.program(*row[1:-1])
                on_card = [torch.empty_like(x, device="cuda") for x in program.tensors]
                timeline.clear()
                program.run(*on_card)
                kernels = [e for e in timeline.events if e.kind == "kernel"]
                found[id(row)] = sum(event.end - event.start for event in kernels)

    of_card = defaultdict(list)
    for row in rows:
        if isinstance(row, list) and row and isinstance(row[0], str):
            of_card[row[0]].append(row)
    for card, of_this in of_card.items():
        with contextlib.suppress(KeyError, ValueError), torch.no_grad():
            simgpu.estimate(run, of_this, card=card_named(card))
    return found


def seconds_between_events(card, program: Program) -> float:
    """Seconds from one event to another with a program between, on an idle GPU."""
    found = []

    def run(*tensors) -> None:
        found.append(between_events(program.run, *tensors))

    with torch.no_grad():
        simgpu.estimate(run, *program.tensors, card=card)
    return found[0]


def between_events(function: Callable, *tensors) -> float:
    """The same on the GPU that is there."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    function(*tensors)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def nccl_nvlink(row: list) -> tuple:
    """[card, collective, ranks, bytes, us]: in one node, with the wait for the last.

    Recorded as kernels, each from where its own rank launched it. So the constants are
    not fitted to it.
    """
    return _in_a_node("waiting collective", row)


def nccl_tests(row: list) -> tuple:
    """[card, collective, ranks, bytes, us]: in one node, launched back to back."""
    return _in_a_node("collective", row)


def _in_a_node(kind: str, row: list) -> tuple:
    name, collective, ranks, nbytes, recorded = row
    run = "send" if collective == "send_recv" else collective
    chosen = choose(run, nbytes, range(ranks), Topology(card_named(name), ranks))
    what = f"{collective} of {nbytes} bytes, {ranks} ranks"
    return kind, name, what, chosen.seconds, recorded * US


_ADAPTERS = re.compile(r"(\w+) (\d+) x (\d+) Gbit/s per node")


def nccl_nodes(row: list) -> tuple:
    """[card, collective, nodes, ranks, network, bytes, us]: "EFA 4 x 100 Gbit/s"."""
    name, collective, nodes, ranks, words, nbytes, recorded = row
    network = None
    if nodes > 1:
        found = _ADAPTERS.match(words)
        if not found:
            raise ValueError(f"cannot read the network {words!r}")
        kind, adapters, gbits = found.groups()
        network = f"{int(adapters) * int(gbits)} Gbit/s {kind}"
    topology = Topology(card_named(name), ranks // nodes, nodes, network)
    chosen = choose(collective, nbytes, range(ranks), topology)
    what = f"{collective} of {nbytes} bytes, {ranks} ranks, {nodes} nodes"
    kind = "collective" if nodes == 1 else "collective of nodes"
    return kind, name, what, chosen.seconds, recorded * US


def attention_bf16(row: list) -> tuple:
    """[card, sequences, tokens, heads, kv heads, width, us]: causal, version 3."""
    name, sequences, tokens, heads, groups, width, recorded = row
    shape = Attention(sequences * heads, tokens, tokens, width, causal=True)
    nbytes = 2 * sequences * tokens * width * 2 * (heads + groups)
    seconds = attention_seconds(card_named(name), shape, "bfloat16", nbytes)
    what = f"{sequences} x {tokens} tokens, {heads} heads of {width}, {groups} of keys"
    return "attention, bfloat16", name, what, seconds, recorded * US


class _Gpu(NamedTuple):
    """What a copy asks of a GPU."""

    card: object


def copies(row: list) -> tuple:
    """[card, way, memory, bytes or null, GB/s]: between the host and a GPU, or two."""
    name, way, memory, nbytes, recorded = row
    gpu = _Gpu(card_named(name))
    ends = {
        "host to device": (None, gpu), "device to host": (gpu, None),
        "device to device": (gpu, gpu),
    }[way]  # fmt: skip
    nbytes = nbytes or LARGE
    seconds = copy_seconds(*ends, nbytes, pinned=memory.startswith("pinned"))
    # as seconds, so that more than 1 is too slow here too
    return "copy", name, f"{way}, {memory}", seconds, nbytes / (recorded * 1e9)


PREDICT: dict[str, Callable[[list], tuple]] = {
    **{name: _operation(name) for name in KINDS},
    "attention_bf16": attention_bf16,
    "nccl_nodes": nccl_nodes,
    "nccl_nvlink": nccl_nvlink,
    "nccl_tests": nccl_tests,
    "copies": copies,
}
