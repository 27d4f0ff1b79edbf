"""What the clock counts: copies, kernels, and how long they take."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import simgpu
from simgpu import _runtime as runtime
from simgpu import costs
from simgpu._device.cards import CARDS
from simgpu._timing.engine import Engine, book_together


@pytest.fixture(autouse=True)
def log():
    simgpu.start(4)
    yield simgpu.timeline()
    simgpu.stop()


X = torch.arange(4.0)
UP, DOWN = ("cpu", "cuda:1"), ("cuda:1", "cpu")
COPIES = [
    (lambda y: X.to(1), [(*UP, 16)]),
    (lambda y: X.cuda(1), [(*UP, 16)]),
    (lambda y: y.to(2), [("cuda:1", "cuda:2", 16)]),
    (lambda y: y.cpu(), [(*DOWN, 16)]),
    (lambda y: y.to(1), []),
    (lambda y: y[0].item(), [(*DOWN, 4)]),
    (lambda y: float(y[0]), [(*DOWN, 4)]),
    (lambda y: bool(y[0] > 0), [(*DOWN, 1)]),
    (lambda y: y.tolist(), [(*DOWN, 16)]),
    (lambda y: torch.equal(y, y), [(*DOWN, 1)]),
    (lambda y: torch.tensor([1.0, 2.0], device=1), [(*UP, 8)]),
    (lambda y: torch.as_tensor([1.0], device=1), [(*UP, 4)]),
    (lambda y: torch.from_numpy(np.ones(2)).cuda(1), [(*UP, 16)]),
    (lambda y: torch.zeros(4, device=1), []),
    (lambda y: y.copy_(X), [(*UP, 16)]),
    (lambda y: torch.empty(4).copy_(y), [(*DOWN, 16)]),
    (lambda y: y[torch.tensor([0, 2])], [(*UP, 16)]),
    (lambda y: y[1:], []),
    (lambda y: y + torch.tensor(2.0), []),
    (lambda y: nn.Linear(2, 3).to(1), [(*UP, 24), (*UP, 12)]),
    (lambda y: repr(y) + str(y[:0]) + f"{y}", []),
    (lambda y: print(y), []),
]


@pytest.mark.parametrize("call, expected", COPIES)
def test_copies_are_counted(log, call, expected):
    y = X.to(1)
    log.clear()
    call(y)
    assert [(e.source, e.target, e.nbytes) for e in log.copies] == expected
    assert all(e.kind == "copy" and e.end > e.start for e in log.copies)


def test_kernels_are_counted_once(log):
    y = torch.ones(8, 8, device=1)
    log.clear()
    view = (y + y).T[1:]
    (view @ y).relu_()
    repr(view)
    assert {e.device for e in log.events} == {"cuda:1"}
    assert [(e.name, e.flops) for e in log.events] == [
        ("add", 0), ("mm", 2 * 7 * 8 * 8), ("relu_", 0)
    ]  # fmt: skip
    assert log.events[0].nbytes == 3 * 8 * 8 * 4


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_inference_mode_counts_the_same(log, grad):
    layer, x = nn.Linear(4, 4).to(1), torch.ones(2, 4, device=1)
    log.clear()
    with grad():
        layer(x).relu()
    assert [(e.name, e.flops) for e in log.events] == [("addmm", 64), ("relu", 0)]


def test_the_host_and_the_cpu_leave_no_trace(log):
    a = torch.ones(8, 8)
    a @ a + 1
    torch.ones(8, 8, device="meta").sum()
    assert log.events == []


def test_waiting_for_a_value_takes_until_the_gpu_is_done(log):
    big = torch.ones(512, 512, device=1)
    log.clear()
    for _ in range(4):
        out = big @ big
    busy = log.busy()["cuda:1"]
    out[0, 0].item()
    copy = log.copies[-1]
    assert copy.start >= busy and log.seconds == copy.end


# -- how long things take --------------------------------------------------------------
# Computed by hand from the constants of cost.py and kernel_cost.py, and from the cards'
# datasheets: a launch takes 10 µs and an idle GPU starts 15 µs later, a copy takes
# 10 µs to its first byte, and the host copies pageable memory at 10 GB/s.

US = 1e-6
MIB = 2**20


def spent(event) -> float:
    return event.end - event.start


def start(number: int, card: str):
    """The log of other GPUs."""
    simgpu.stop()
    simgpu.start(number, card)
    return simgpu.timeline()


@pytest.mark.parametrize("card, size, seconds", [
    # 2 * 4 MiB over 0.86 * 320 GB/s, ... 900 GB/s, ... 2039 GB/s
    ("T4", MIB, 8 * MIB / 275.2e9), ("V100", MIB, 8 * MIB / 774e9),
    ("A100", MIB, 8 * MIB / 1753.54e9), ("H100", MIB, 8 * MIB / 2881e9),
    ("H200", MIB, 8 * MIB / 4128e9), ("A100", 4, 0.0),
])  # fmt: skip
def test_an_element_wise_kernel_takes_its_traffic(card, size, seconds):
    log, x = start(1, card), torch.empty(size, device="cuda")
    log.clear()
    x.neg_()  # reads and writes each element
    (event,) = log.events
    assert event.nbytes == 2 * 4 * size
    assert spent(event) == pytest.approx(1.5 * US + seconds, rel=1e-4)
    assert event.launched == 0 and event.start == pytest.approx(25 * US)
    assert log.host == pytest.approx(10 * US) and log.seconds == event.end


def floor_of(name: str) -> float:
    """Seconds of a product besides its work: 4900 clocks."""
    return 4900 / (1e3 * CARDS[name].clock)


H100_PEAK = CARDS["H100"].reached["bfloat16"] * 989.4e12


@pytest.mark.parametrize("card, dtype, peak, waves, inner, shares", [
    # 64 tiles of 64 x 64: less than a wave, but on 40 multiprocessors 1.6 of them;
    # on tensor cores as if the inner dimension were longer by 100. Without them, 32
    # tiles of 64 x 128 whose inner dimension 4 blocks share are faster
    ("T4", torch.float32, 0.49 * 8.1e12, 1.6, 512, 1),
    ("A100", torch.float32, 0.89 * 19.5e12, 128 / 108, 512, 4),
    ("H100", torch.bfloat16, H100_PEAK, 1, 612, 1),
    ("L40S", torch.bfloat16, 0.655 * 362.05e12, 1, 612, 1),
    ("T4", torch.float16, 0.49 * 65e12, 1.6, 612, 1),
    ("A100", torch.bfloat16, 0.765 * 312e12, 1, 612, 1),
    ("B200", torch.bfloat16, 0.85 * 2250e12, 1, 612, 1),
    ("A100", torch.float64, 0.89 * 19.5e12, 128 / 108, 512, 4),
])  # fmt: skip
def test_a_matrix_product_takes_its_flops_and_its_traffic(
    card, dtype, peak, waves, inner, shares
):
    log, x = start(1, card), torch.zeros(512, 512, device="cuda", dtype=dtype)
    its = CARDS[card]
    log.clear()
    x @ x
    (event,) = log.events
    assert event.flops == 2 * 512**3
    wide = 64 if shares == 1 else 128
    block = 2 * 64 * wide * its.multi_processors / peak  # seconds for one of the inner
    loads = (64 + wide) * dtype.itemsize / 200 / (1e3 * its.clock)
    busy = waves * inner / shares * math.hypot(block, loads)
    busy += floor_of(card) * (shares > 1)  # another kernel adds the sums up
    traffic = 3 * 512 * 512 * dtype.itemsize / (0.87 * its.memory_bandwidth)
    if card in ("T4", "L40S"):  # the L2 cache is faster than the memory
        cache = 7 * its.multi_processors * 1e3 * its.clock
        traffic *= 1 / 3 + 2 / 3 * 0.87 * its.memory_bandwidth / cache
    expected = floor_of(card) + math.hypot(busy, traffic)
    assert spent(event) == pytest.approx(expected, rel=1e-6)


def seconds_of_product(rows: int, columns: int, inner: int, dtype=None) -> float:
    """On the A100 that runs, in float32, besides the floor."""
    one, other = (torch.empty(shape, device="cuda", dtype=dtype)
                  for shape in ((rows, inner), (inner, columns)))  # fmt: skip
    with simgpu.timeline().recording() as events:
        one @ other
    return spent(events[0]) - floor_of("A100")


def test_few_blocks_share_the_inner_dimension(log):
    one = seconds_of_product(64, 64, 1000, torch.bfloat16)
    # 13 parts of 615 each, and a kernel that adds them up
    many = seconds_of_product(64, 64, 8000, torch.bfloat16)
    parts = (many - floor_of("A100")) * 1100 / (8000 / 13 + 100)
    assert parts == pytest.approx(one, rel=0.1)


def test_a_small_product_in_float32_has_small_tiles():
    a100, seconds = CARDS["A100"], {}
    for rows in (64, 1024, 16384):
        product, nbytes = costs.Product(1, rows, 128, 128), 4 * 128 * (2 * rows + 128)
        seconds[rows] = costs.product_seconds(a100, product, "float32", nbytes)
    # 64 rows: 32 tiles of 16 x 16, which reach a quarter of the arithmetic
    tile = 2 * 16 * 16 * 128 / (0.25 * 0.89 * 19.5e12 / 108)
    assert seconds[64] == pytest.approx(floor_of("A100") + tile, rel=0.05)
    assert seconds[1024] < 1.6 * seconds[64] and seconds[16384] > 3 * seconds[1024]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("card", ["T4", "A100", "H100"])
def test_a_longer_product_hardly_ever_takes_less_time(card, dtype):
    its, size = CARDS[card], 2 if dtype == "bfloat16" else 4
    for rows, columns in ((16, 64), (64, 64), (128, 128), (512, 512), (2048, 128)):
        longest = 0.0
        for inner in range(64, 8193, 64):
            nbytes = size * (rows * inner + inner * columns + rows * columns)
            product = costs.Product(1, rows, columns, inner)
            seconds = costs.product_seconds(its, product, dtype, nbytes)
            # where more multiprocessors begin to share it, it may take a little less
            assert seconds > 0.8 * longest
            longest = max(longest, seconds)


def test_a_product_computes_whole_tiles_in_waves(log):
    whole = seconds_of_product(768, 576, 256)  # 12 x 9 tiles: one of each of 108
    assert seconds_of_product(767, 575, 256) == pytest.approx(whole, rel=0.01)
    assert seconds_of_product(768, 520, 256) == pytest.approx(whole, rel=0.01)
    more = seconds_of_product(768, 640, 256)  # 120 tiles
    assert more == pytest.approx(whole * 120 / 108, rel=0.01)
    assert seconds_of_product(1536, 576, 256) == pytest.approx(2 * whole, rel=0.01)


def test_one_row_reads_its_matrix_and_that_takes_the_time(log):
    matrix = 4096 * 4096 * 4 / (0.87 * 2039e9)
    assert seconds_of_product(1, 4096, 4096) == pytest.approx(matrix, rel=0.1)
    assert seconds_of_product(8, 4096, 4096) == pytest.approx(matrix, rel=0.1)
    assert seconds_of_product(64, 4096, 4096) > 2 * matrix


def test_attention_does_not_compute_what_is_hidden(log):
    q = torch.zeros(1, 16, 4096, 128, device="cuda", dtype=torch.bfloat16)
    seconds = {}
    for causal in (True, False):
        with log.recording() as events:
            nn.functional.scaled_dot_product_attention(q, q, q, is_causal=causal)
        (event,) = events
        assert event.flops == 4 * 16 * 4096**2 * 128  # as PyTorch's formula counts
        seconds[causal] = spent(event) - 5 * US
    all_keys = 4 * 16 * 4096**2 * 128 / (0.70 * 312e12)
    assert seconds[False] == pytest.approx(all_keys * (1 + 450 / 4096), rel=0.01)
    assert seconds[True] == pytest.approx(all_keys * (1 / 2 + 450 / 4096), rel=0.01)


def convolution_seconds(channels: int, groups: int = 1, **options) -> float:
    x = torch.zeros(2, channels, 16, 16, device="cuda")
    layer = nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=False)
    layer = layer.cuda()
    with simgpu.timeline().recording() as events, torch.backends.cudnn.flags(**options):
        layer(x)
    (event,) = events
    assert event.name == "convolution"
    return spent(event) - 5 * US


def test_a_convolution_is_the_product_of_its_windows(log):
    # 512 places in 4 rows of tiles, and two columns of them: 8 of 108 multiprocessors,
    # but as if a fifth were busy
    flops = 2 * 512 * 64 * 64 * 9
    traffic = (2 * 2 * 64 * 256 + 64 * 64 * 9) * 4 / (0.87 * 2039e9)
    busy = flops / (0.7 * 19.5e12) / 0.2
    seconds = convolution_seconds(64, allow_tf32=False)
    assert seconds == pytest.approx((busy**2 + traffic**2) ** 0.5)
    # each group computes its own tile of 32 channels, of which one is used
    depthwise = convolution_seconds(64, groups=64, allow_tf32=False)
    tiles = 64 * 4
    busy = tiles * 2 * 128 * 32 * 9 / (0.7 * 19.5e12)
    busy /= tiles / 108 / 3
    assert depthwise == pytest.approx(busy, rel=0.05)
    assert convolution_seconds(64, allow_tf32=True) < seconds / 2


def test_gradients_of_a_convolution_cost_as_much_each_as_it(log):
    x = torch.zeros(8, 64, 32, 32, device="cuda", requires_grad=True)
    layer = nn.Conv2d(64, 64, 3, padding=1, bias=False).cuda()
    with simgpu.timeline().recording() as events:
        layer(x).sum().backward()
    forward = next(e for e in events if e.name == "convolution")
    backward = next(e for e in events if e.name == "convolution_backward")
    assert backward.flops == 2 * forward.flops
    ratio = (spent(backward) - 5 * US) / (spent(forward) - 5 * US)
    assert ratio == pytest.approx(2, rel=0.1)


CONVOLUTIONS = {  # layer, shape of its input -> FLOPs: 2 a weight and place
    "1-D, dilated": (
        lambda: nn.Conv1d(6, 9, 5, stride=2, padding=1, dilation=2, groups=3),
        (4, 6, 33), 2 * 4 * 14 * (9 * 2 * 5),
    ),
    "2-D": (lambda: nn.Conv2d(8, 12, 3, padding=1), (2, 8, 10, 6), 2 * 2 * 60 * 864),
    "no batch": (lambda: nn.Conv2d(8, 12, 3, padding=1), (8, 10, 6), 2 * 60 * 864),
    "groups": (lambda: nn.Conv2d(8, 12, 3, groups=4), (2, 8, 10, 6), 2 * 2 * 32 * 216),
    "depthwise": (
        lambda: nn.Conv2d(8, 16, 3, groups=8, bias=False),
        (2, 8, 10, 6), 2 * 2 * 32 * (16 * 9),
    ),
    "3-D": (
        lambda: nn.Conv3d(4, 6, (1, 3, 3), groups=2),
        (2, 4, 3, 8, 8), 2 * 2 * (3 * 6 * 6) * (6 * 2 * 9),
    ),
    "transposed": (  # of these, a place is one of the input
        lambda: nn.ConvTranspose2d(8, 12, 4, stride=2, groups=4),
        (2, 8, 5, 5), 2 * 2 * 25 * (8 * 3 * 16),
    ),
    "transposed, 3-D": (
        lambda: nn.ConvTranspose3d(4, 6, 2, dilation=2, groups=2),
        (1, 4, 3, 3, 3), 2 * 27 * (4 * 3 * 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("of_input", [True, False])
def test_each_weight_of_a_convolution_counts_once_a_place(log, name, of_input):
    make, shape, flops = CONVOLUTIONS[name]
    x = torch.zeros(shape, device="cuda", requires_grad=of_input)
    layer = make().cuda()
    with simgpu.timeline().recording() as events:
        layer(x).sum().backward()
    found = {event.name: event.flops for event in events if event.flops}
    times = 2 if of_input else 1  # gradients
    assert found == {"convolution": flops, "convolution_backward": times * flops}


def test_cudnns_own_names_count_as_much(log):
    x, w = torch.zeros(2, 8, 5, 5, device="cuda"), torch.zeros(8, 2, 3, 3).cuda()
    more = [1, 1], [1, 1], [1, 1]
    with simgpu.timeline().recording() as events:
        torch.cudnn_convolution(x, w, *more, 4, False, False, True)
        back = torch.cudnn_convolution_transpose
        back(x, w, [1, 1], [0, 0], [1, 1], [1, 1], 4, False, False, True)
    assert [event.flops for event in events] == 2 * [2 * 2 * 25 * (8 * 2 * 9)]


@pytest.mark.parametrize("run, times", [
    (lambda x: nn.functional.layer_norm(x, (1024,)), 1.33),
    (lambda x: x.softmax(-1), 1.2),
    (lambda x: x.relu(), 1.0),
], ids=["layer norm", "softmax", "relu"])  # fmt: skip
def test_some_passes_move_more_than_their_tensors(log, run, times):
    x = torch.zeros(1024, 1024, device="cuda")
    with log.recording() as events:
        run(x)
    (event,) = events
    moved = times * 8 * MIB / (0.86 * 2039e9)
    assert spent(event) == pytest.approx(1.5 * US + moved, rel=0.01)


@pytest.mark.parametrize("card, faster", [("T4", 1), ("A100", 6.164), ("H100", 7.365)])
def test_tf32_is_faster_where_the_card_has_it(card, faster):
    log, seconds = start(1, card), {}
    x = torch.zeros(1024, 1024, device="cuda")
    double = torch.zeros(128, 128, device="cuda", dtype=torch.float64)
    assert torch.get_float32_matmul_precision() == "highest"
    try:
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            with log.recording() as events:
                product = x @ x
                double @ double
                x.neg()
            seconds[precision] = [spent(event) for event in events]
            assert torch.equal(product, x)  # the numbers stay those of the CPU
    finally:
        torch.set_float32_matmul_precision("highest")
    (slow, *others), (fast, *same) = seconds["highest"], seconds["high"]
    assert seconds["medium"] == pytest.approx(seconds["high"])
    assert others == pytest.approx(same)
    traffic = 12 * MIB / (0.87 * CARDS[card].memory_bandwidth)
    busy = [((s - floor_of(card)) ** 2 - traffic**2) ** 0.5 for s in (slow, fast)]
    # 1024 of the inner dimension seem 1124 on tensor cores, and loads take time
    assert busy[0] / busy[1] == pytest.approx(faster, rel=1e-3)


def test_the_host_runs_ahead_and_a_stream_is_in_order(log):
    x = torch.zeros(4 * MIB, device=1)
    log.clear()
    for _ in range(10):
        x.neg_()
    assert log.host == pytest.approx(100 * US)
    long = 1.5 * US + 32 * MIB / 1753.54e9
    assert log.seconds == pytest.approx(25 * US + 10 * long) and long > 10 * US
    for a, b in zip(log.events, log.events[1:], strict=False):
        assert b.start == a.end
    small = torch.zeros(4, device=2)
    log.clear()
    for _ in range(10):  # these end before the next is launched
        small.neg_()
    assert log.seconds == pytest.approx(116.5 * US)


@pytest.mark.parametrize("copy, rate, waits", [
    (lambda h, p, g: h.to(1), 10e9, True),  # pageable: the host's own copy
    (lambda h, p, g: h.to(1, non_blocking=True), 10e9, True),
    (lambda h, p, g: p.to(1), 25.6e9, True),  # 0.8 of 32 GB/s
    (lambda h, p, g: p.to(1, non_blocking=True), 25.6e9, False),
    (lambda h, p, g: p.cuda(1, non_blocking=True), 25.6e9, False),
    (lambda h, p, g: g.copy_(p, non_blocking=True), 25.6e9, False),
    (lambda h, p, g: g.copy_(h), 10e9, True),
    (lambda h, p, g: g.cpu(), 10e9, True),
    (lambda h, p, g: g.to("cpu", non_blocking=True), 25.6e9, False),
    (lambda h, p, g: p.copy_(g), 25.6e9, True),
    (lambda h, p, g: p.copy_(g, non_blocking=True), 25.6e9, False),
    (lambda h, p, g: h.copy_(g, non_blocking=True), 10e9, True),
    (lambda h, p, g: g.to(2), 240e9, False),  # 0.8 of NVLink's 300 GB/s
    (lambda h, p, g: g.to(2, non_blocking=True), 240e9, False),
])  # fmt: skip
def test_copies_take_the_slowest_link(log, copy, rate, waits):
    host, gpu = torch.zeros(MIB), torch.zeros(MIB, device=1)
    pinned = torch.zeros(MIB).pin_memory()
    torch.cuda.synchronize(1)
    log.clear()
    copy(host, pinned, gpu)
    (event,) = log.events
    assert spent(event) == pytest.approx(10 * US + 4 * MIB / rate)
    assert event.start == pytest.approx(10 * US)
    assert log.host == pytest.approx(event.end if waits else 10 * US)
    assert [wait.end for wait in log.waits] == ([event.end] if waits else [])


@pytest.mark.parametrize(
    "card, rate", [("T4", 0.8 * 16e9), ("A100", 0.8 * 300e9), ("H200", 0.8 * 450e9)]
)
def test_copies_between_gpus_use_nvlink_where_there_is_one(card, rate):
    log, x = start(2, card), torch.zeros(MIB, device=0)
    x.to(1)
    (copy,) = log.copies
    assert spent(copy) == pytest.approx(10 * US + 4 * MIB / rate)
    assert (copy.source, copy.target, copy.device) == ("cuda:0", "cuda:1", "cuda:1")


def test_pinning_costs_as_much_as_it_saves(log):
    x = torch.zeros(16 * MIB // 4)
    log.clear()
    pinned = x.pin_memory()
    (wait,) = log.waits
    assert wait.name == "pin" and log.events == []
    seconds = 20 * US + 16 * MIB * (1 / 16e9 + 1 / 10e9)
    assert log.host == wait.end - wait.start == pytest.approx(seconds)
    assert pinned.pin_memory() is pinned and log.host == wait.end  # it is pinned
    pinned.to(1)
    both = log.seconds
    log.clear()
    x.to(1)
    assert both / log.seconds == pytest.approx(2, rel=0.02)


def test_what_is_copied_to_the_host_without_waiting_is_pinned():
    x = torch.zeros(4, device=1)
    assert x.to("cpu", non_blocking=True).is_pinned()
    assert not x.cpu().is_pinned()


def on_streams(log, gpu: int, *calls):
    """The events of calls, each on a stream of its own, after all else is done."""
    streams = [torch.cuda.Stream(gpu) for _ in calls]
    torch.cuda.synchronize(gpu)
    log.clear()
    for stream, call in zip(streams, calls, strict=True):
        with torch.cuda.stream(stream):
            call()
    return log.events


def test_directions_do_not_disturb_each_other_and_one_queues(log):
    pinned = [torch.zeros(MIB).pin_memory() for _ in range(2)]
    x = torch.zeros(MIB, device=1)
    first, second, out, peer = on_streams(
        log, 1, *(functools.partial(host.to, 1, non_blocking=True) for host in pinned),
        lambda: x.to("cpu", non_blocking=True), lambda: x.to(2),
    )  # fmt: skip
    assert second.start == first.end  # one engine for what comes in
    assert out.start == pytest.approx(30 * US) and out.start < first.end
    assert peer.start == pytest.approx(40 * US)
    log.clear()
    pinned[0].to(1, non_blocking=True)
    pinned[1].to(2, non_blocking=True)  # each GPU has its own
    first, second = log.events
    assert second.start < first.end


def test_copies_and_kernels_of_two_streams_overlap(log):
    x, host = torch.zeros(MIB, device=1), torch.zeros(MIB).pin_memory()
    copy, kernel = on_streams(log, 1, lambda: host.to(1, non_blocking=True), x.neg_)
    assert kernel.start == pytest.approx(35 * US) and kernel.start < copy.end
    totals = log.totals()["cuda:1"]
    assert totals.overlap == pytest.approx(min(copy.end, kernel.end) - kernel.start)


def test_large_kernels_wait_for_each_other(log):
    xs = [torch.zeros(2 * MIB, device=1) for _ in range(2)]  # fill 108 multiprocessors
    one, other = on_streams(log, 1, *(x.neg_ for x in xs))
    assert other.start == one.end and log.totals()["cuda:1"].overlap == 0


def test_small_kernels_beside_each_other():
    """Reductions of much to a little last, and take one of 40 multiprocessors each."""
    log, x = start(1, "T4"), torch.zeros(64, 2**14, device="cuda")
    events = on_streams(log, 0, *[lambda: x.sum(1)] * 3)
    starts = [event.start for event in events]
    assert starts == [pytest.approx(n * US) for n in (25, 35, 45)]
    assert events[0].end > starts[1]
    assert log.totals()["cuda:0"].overlap > 0


def meet_on_gpu_1(log):
    """The clock, and an all-reduce of 300 us that GPU 1 has reached."""
    clock = runtime.current().clock
    (gpu,) = (gpu for gpu in clock.gpus if gpu.index == 1)
    torch.cuda.synchronize(1)
    log.clear()
    return clock, clock.meet(gpu, 40, 0, "all_reduce", 8, 300 * US)


def test_every_kernel_beside_a_collective_has_fewer_multiprocessors(log):
    """However late in it: 16 of an A100's 108 are the collective's."""
    x = torch.zeros(2 * MIB, device=1)
    clock, meeting = meet_on_gpu_1(log)
    for _ in range(5):
        simgpu.host_busy(60 * US)
        x.neg_()
    clock.settled(meeting, meeting.ready, meeting.ready + 300 * US)
    kernels = [event for event in log.events if event.kind == "kernel"]
    *beside, alone = (event.end - event.start for event in kernels)
    assert beside == pytest.approx([alone * 108 / (108 - 16)] * 4)


def test_a_stream_waits_for_an_event_behind_a_collective(log):
    """Also if it is not known yet when the collective ends."""
    torch.zeros(1, device=1)
    clock, meeting = meet_on_gpu_1(log)
    clock.stream_waits(1, 7, clock.record(1, 40))
    clock.settled(meeting, meeting.ready, meeting.ready + 300 * US)
    before = clock.host
    clock.wait_for_stream(1, 7)
    assert clock.host == meeting.end > before


SELECT = {
    "nonzero": lambda x, mask: x.nonzero(),
    "masked_select": lambda x, mask: torch.masked_select(x, mask),
    "method": lambda x, mask: x.masked_select(mask),
    "mask": lambda x, mask: x[mask],
    "set by mask": lambda x, mask: x.__setitem__(mask, torch.ones(4, device=1)),
    "unique": lambda x, mask: x.unique(),
    "where": lambda x, mask: torch.where(mask),
    "one_hot": lambda x, mask: nn.functional.one_hot(mask.long()),
}


@pytest.mark.parametrize("select", SELECT.values(), ids=SELECT)
def test_the_host_reads_how_large_a_result_is(log, select):
    x, mask = torch.arange(8.0, device=1), torch.tensor([True, False] * 4).to(1)
    log.clear()
    select(x, mask)
    assert {(e.target, e.nbytes) for e in log.copies} == {("cpu", 8)}
    assert log.host >= log.copies[-1].end
    assert log.waits[0].name == "wait for cuda:1 to cpu"


def test_what_has_a_known_size_is_not_waited_for(log):
    x, rows = torch.arange(8.0, device=1), torch.tensor([1, 2], device=1)
    log.clear()
    x[rows], x.index_select(0, rows), x.topk(2)
    x.masked_fill(x > 2, 0), torch.where(x > 2, x, 0), x.sort()
    nn.functional.one_hot(rows, 5)
    assert log.copies == []


def test_an_inverse_waits_for_its_verdict(log):
    x = torch.eye(8, device=1)
    log.clear()
    torch.linalg.inv(x)
    assert [e.source for e in log.copies] == ["cuda:1"]


def test_clear_starts_anew(log):
    x, side = torch.zeros(4 * MIB, device=1), torch.cuda.Stream(1)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(side)
    torch.cuda.current_stream(1).wait_stream(side)
    for _ in range(100):
        x.neg_()
    end.record(torch.cuda.current_stream(1))
    assert not end.query() and log.seconds > 1000 * US
    log.clear()
    assert end.query() and log.host == pytest.approx(1 * US)
    end.synchronize()
    side.wait_event(end)
    assert side.query() and log.waits == []
    took = start.elapsed_time(end)  # between old events it is what it was
    assert took == pytest.approx(
        100 * (1.5 * US + 32 * MIB / 1753.54e9) * 1e3, rel=0.05
    )
    later = torch.cuda.Event(enable_timing=True)
    later.record(side)
    assert 0 <= end.elapsed_time(later) < 0.1
    log.clear()
    with torch.cuda.stream(side):
        torch.zeros(4, device=1)
    assert log.events[0].start == pytest.approx(25 * US)


def test_memory_that_waits_is_free_after_clear(log):
    side = torch.cuda.Stream(1)
    for _ in range(5):
        x = torch.zeros(MIB, device=1)
        side.wait_stream(torch.cuda.current_stream(1))
        with torch.cuda.stream(side):
            x.neg_()
        x.record_stream(side)
        del x
        log.clear()
    torch.cuda.synchronize(1)
    torch.zeros(1, device=1)
    assert torch.cuda.memory_stats(1)["active_bytes.all.current"] <= 512


def seconds(low: float, high: int):
    """Times, of which many are whole numbers, so that work fits a gap exactly."""
    return st.integers(1, 5) | st.floats(low, high, allow_subnormal=False)


WORK = st.tuples(
    seconds(0, 20),  # when it is ready, after the host's time
    seconds(1e-3, 10),  # how long it takes
    st.sampled_from([1.0, 1.0, 0.25, 1 / 3, 0.5]) | st.floats(0.01, 1.0),
    st.just(0) | st.floats(0, 3),  # by how much the host is later then
)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(WORK, max_size=30))
def test_work_starts_as_early_as_an_engine_has_room(work):
    engine, host, booked = Engine(), 0.0, []

    def used(time: float) -> float:
        return sum(share for a, b, share in booked if a <= time < b)

    for later, seconds, share, passes in work:
        host += passes
        ready = host + later
        start = engine.book(ready, seconds, share)
        engine.forget(host)
        assert start >= ready
        # nothing else would fit earlier: at once, or where something ends
        for sooner in [ready, *(end for _, end, _ in booked if ready <= end)]:
            if sooner < start:
                end = sooner + seconds
                times = [sooner, *(a for a, _, _ in booked if sooner < a < end)]
                assert max(map(used, times)) + share > 1
        assert start == ready or start in [end for _, end, _ in booked]
        booked.append((start, start + seconds, share))
    assert all(used(start) <= 1.001 for start, _, _ in booked)


def test_an_engine_forgets_what_is_over():
    engine = Engine()
    for i in range(10_000):
        engine.book(float(i), 0.5)
        engine.forget(float(i))
    assert len(engine.times) < 5000  # of 20,000


def test_what_needs_two_engines_starts_when_both_have_room():
    out, into = Engine(), Engine()
    out.book(1.0, 2.0)
    into.book(3.0, 2.0)  # where the other one has room first
    assert book_together([out, into], 0.0, 2.0) == 5.0
    assert book_together([out, into], 0.0, 1.0) == 0.0


def test_bytes_that_are_not_moved_are_not_counted(log):
    table, rows = torch.ones(1000, 64, device=1), torch.tensor([1, 2, 3], device=1)
    log.clear()
    nn.functional.embedding(rows, table)
    table.index_select(0, rows)
    torch.ones(1, device=1).expand(1000) + 0  # no more than its storage has
    moved = 2 * 3 * 64 * 4 + 3 * 8
    assert [e.nbytes for e in log.events] == [moved, moved, 4, 4 + 1000 * 4]


@pytest.mark.parametrize("passes, run", [
    (3, lambda a, b, half: a.add_(b)),
    (2, lambda a, b, half: a.mul_(2)),
    (2, lambda a, b, half: a.copy_(b)),
    (1.5, lambda a, b, half: half.copy_(b)),
    (1, lambda a, b, half: a.zero_()),
    (1, lambda a, b, half: a.normal_()),
    (3, lambda a, b, half: torch.add(b, b.T, out=a)),
    (3, lambda a, b, half: torch.add(a, b, out=a)),
    (3, lambda a, b, half: torch.mm(b, b.T, out=a)),
    (2, lambda a, b, half: torch.split_with_sizes_copy(b, [8, 24], out=[a[:8], a[8:]])),
    (6, lambda a, b, half: torch._foreach_add_([a, a.T], [b, b])),
    (4, lambda a, b, half: torch._foreach_copy_([a, a.T], [b, b])),
    (2, lambda a, b, half: torch._foreach_zero_([a, a.T])),
    ((3 + 4) / 32, lambda a, b, half: a.scatter_(0, b[:1].long(), b[:1])),
])  # fmt: skip
def test_what_an_operation_in_place_reads_and_writes(log, passes, run):
    a, b = torch.ones(2, 32, 32, device="cuda").unbind()
    half = b.half()
    log.clear()
    run(a, b, half)
    assert sum(e.nbytes for e in log.events) == passes * a.nbytes


def test_a_fused_optimizer_reads_four_and_writes_three(log):
    weight = nn.Parameter(torch.ones(1000, device="cuda"))
    weight.grad = torch.ones(1000, device="cuda")
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    log.clear()
    optimizer.step()
    steps = 4 + 2 * 4  # of the optimizer: read in one kernel, added to in another
    assert sum(e.nbytes for e in log.events) == 7 * weight.nbytes + steps


def test_the_cards_agree_with_pytorchs_own_datasheets():
    from torch._inductor.analysis.device_info import lookup_device_info

    for name in ("A100", "H100"):
        card, sheet = CARDS[name], lookup_device_info(f"NVIDIA {name}")
        assert card.memory_bandwidth == sheet.dram_bw_gbs * 1e9
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            rate = card.flops[str(dtype).removeprefix("torch.")]
            times = sheet.tops[dtype] * 1e12 / rate
            # its rates of halves may be those with sparsity, which are twice as high
            assert round(times, 1) in ((1, 2) if dtype.itemsize == 2 else (1,))
