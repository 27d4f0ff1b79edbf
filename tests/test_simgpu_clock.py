"""What is counted: copies, kernels and simulated time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers import simgpu
from helpers.simgpu import placement
from helpers.simgpu.clock import Engine


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
    assert [(e.name, e.device) for e in log.events] == [
        ("add", "cuda:1"),
        ("mm", "cuda:1"),
        ("relu_", "cuda:1"),
    ]
    add, mm, _ = log.events
    assert add.nbytes == 3 * 8 * 8 * 4 and add.flops == 0
    assert mm.flops == 2 * 7 * 8 * 8
    log.clear()
    assert log.events == [] and log.seconds == 0


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
    for _ in range(50):
        out = big @ big
    busy = log.busy()["cuda:1"]
    out[0, 0].item()
    copy = log.copies[-1]
    assert copy.start >= busy and log.seconds == copy.end


def test_times_are_the_same_every_time(log):
    def work():
        log.clear()
        layer = nn.Linear(32, 32).to(1)
        layer(torch.ones(8, 32, device=1)).sum().backward()
        return [(e.name, e.start, e.end) for e in log.events]

    assert work() == work()


# -- how long things take --------------------------------------------------------------
# Computed by hand from the constants at the top of clock.py and the cards' datasheets:
# a launch takes 5 µs, the smallest kernel 2, the first byte of a copy 10; a product of
# matrices reaches 0.7 of the peak, traffic 0.8 of the bandwidth; the host copies
# pageable memory at 10 GB/s.

US = 1e-6
MIB = 2**20


def spent(event) -> float:
    return event.end - event.start


@pytest.mark.parametrize(
    "card, size, seconds",
    [
        # 2 * 4 MiB over 0.8 * 320 GB/s, ... 2039 GB/s, ... 3350 GB/s
        ("T4", MIB, 8 * MIB / 256e9),
        ("A100", MIB, 8 * MIB / 1631.2e9),
        ("H100", MIB, 8 * MIB / 2680e9),
        ("H200", MIB, 8 * MIB / 3840e9),
        ("A100", 4, 2 * US),  # nothing is faster than the smallest kernel
    ],
)
def test_an_element_wise_kernel_takes_its_traffic(card, size, seconds):
    simgpu.stop()
    simgpu.start(1, card)
    log, x = simgpu.timeline(), torch.empty(size, device="cuda")
    log.clear()
    x.neg_()  # reads and writes each element
    (event,) = log.events
    assert event.nbytes == 2 * 4 * size
    assert spent(event) == pytest.approx(seconds)
    assert event.launched == 0 and event.start == pytest.approx(5 * US)
    assert log.host == pytest.approx(5 * US) and log.seconds == event.end


PRODUCT = 2 * 512**3  # FLOPs of a product of two 512 x 512 matrices


@pytest.mark.parametrize(
    "card, dtype, peak",
    [
        ("T4", torch.float32, 8.1e12),
        ("A100", torch.float32, 19.5e12),
        ("H100", torch.float32, 67e12),
        ("T4", torch.float16, 65e12),
        ("A100", torch.bfloat16, 312e12),
        ("T4", torch.float64, 0.25e12),
        ("A100", torch.float64, 19.5e12),
    ],
)
def test_a_matrix_product_takes_its_flops_or_its_traffic(card, dtype, peak):
    simgpu.stop()
    simgpu.start(1, card)
    log, x = simgpu.timeline(), torch.zeros(512, 512, device="cuda", dtype=dtype)
    bandwidth = placement.current().gpus[0].card.memory_bandwidth
    log.clear()
    x @ x
    (event,) = log.events
    assert event.flops == PRODUCT
    traffic = 3 * 512 * 512 * dtype.itemsize / (0.8 * bandwidth)
    assert spent(event) == pytest.approx(max(PRODUCT / (0.7 * peak), traffic, 2 * US))


@pytest.mark.parametrize("card, faster", [("T4", 1), ("A100", 8), ("H100", 7.38)])
def test_tf32_is_faster_where_the_card_has_it(card, faster):
    simgpu.stop()
    simgpu.start(1, card)
    assert torch.get_float32_matmul_precision() == "highest"
    x, seconds = torch.zeros(512, 512, device="cuda"), []
    double = torch.zeros(128, 128, device="cuda", dtype=torch.float64)
    card = placement.current().gpus[0].card
    try:
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            with simgpu.timeline().recording() as events:
                x @ x
                double @ double
                x.neg()
            seconds.append([spent(event) for event in events])
            assert torch.equal(x @ x, x)  # the numbers stay those of the CPU
    finally:
        torch.set_float32_matmul_precision("highest")
    highest, high, medium = seconds
    assert high == pytest.approx(medium) and highest[1:] == pytest.approx(high[1:])
    traffic = 3 * 2**20 / (0.8 * card.memory_bandwidth)
    assert high[0] == pytest.approx(max(highest[0] / faster, traffic, 2 * US), rel=1e-3)


def test_the_host_runs_ahead_and_a_stream_is_in_order(log):
    x = torch.zeros(MIB, device=1)
    log.clear()
    for _ in range(10):
        x.neg_()
    assert log.host == pytest.approx(50 * US)
    long = 8 * MIB / 1631.2e9
    assert log.seconds == pytest.approx(5 * US + 10 * long) and long > 5 * US
    for a, b in zip(log.events, log.events[1:], strict=False):
        assert b.start == a.end
    small = torch.zeros(4, device=2)
    log.clear()
    for _ in range(10):  # these end before the next is launched
        small.neg_()
    assert log.seconds == pytest.approx(52 * US)


@pytest.mark.parametrize(
    "copy, rate, waits",
    [
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
    ],
)
def test_copies_take_the_slowest_link(log, copy, rate, waits):
    host, gpu = torch.zeros(MIB), torch.zeros(MIB, device=1)
    pinned = torch.zeros(MIB).pin_memory()
    torch.cuda.synchronize(1)
    log.clear()
    copy(host, pinned, gpu)
    (event,) = log.events
    assert spent(event) == pytest.approx(10 * US + 4 * MIB / rate)
    assert event.start == pytest.approx(5 * US)
    assert log.host == pytest.approx(event.end if waits else 5 * US)
    assert [wait.end for wait in log.waits] == ([event.end] if waits else [])


@pytest.mark.parametrize(
    "card, rate", [("T4", 0.8 * 16e9), ("A100", 0.8 * 300e9), ("H200", 0.8 * 450e9)]
)
def test_copies_between_gpus_use_nvlink_where_there_is_one(card, rate):
    simgpu.stop()
    simgpu.start(2, card)
    x = torch.zeros(MIB, device=0)
    x.to(1)
    (copy,) = simgpu.timeline().copies
    assert spent(copy) == pytest.approx(10 * US + 4 * MIB / rate)
    assert (copy.source, copy.target, copy.device) == ("cuda:0", "cuda:1", "cuda:1")


def test_pinning_costs_as_much_as_it_saves(log):
    x = torch.zeros(64 * MIB // 4)
    log.clear()
    pinned = x.pin_memory()
    (wait,) = log.waits
    assert wait.name == "pin" and log.events == []
    seconds = 20 * US + 64 * MIB * (1 / 16e9 + 1 / 10e9)
    assert log.host == wait.end - wait.start == pytest.approx(seconds)
    assert pinned.pin_memory() is pinned and log.host == wait.end  # it is pinned
    log.clear()
    x.pin_memory().to(1)
    both = log.seconds
    log.clear()
    x.to(1)
    assert both / log.seconds == pytest.approx(2, rel=0.02)


def test_directions_do_not_disturb_each_other_and_one_queues(log):
    pinned = [torch.zeros(MIB).pin_memory() for _ in range(2)]
    x = torch.zeros(MIB, device=1)
    streams = [torch.cuda.Stream(1) for _ in range(4)]
    torch.cuda.synchronize(1)
    log.clear()
    for stream, host in zip(streams[:2], pinned, strict=True):
        with torch.cuda.stream(stream):
            host.to(1, non_blocking=True)
    with torch.cuda.stream(streams[2]):
        x.to("cpu", non_blocking=True)
    with torch.cuda.stream(streams[3]):
        x.to(2)
    first, second, out, peer = log.events
    assert second.start == first.end  # one engine for what comes in
    assert out.start == pytest.approx(15 * US) and out.start < first.end
    assert peer.start == pytest.approx(20 * US)
    log.clear()
    pinned[0].to(1, non_blocking=True)
    pinned[1].to(2, non_blocking=True)  # each GPU has its own
    first, second = log.events
    assert second.start < first.end


def test_copies_and_kernels_of_two_streams_overlap(log):
    x, host = torch.zeros(MIB, device=1), torch.zeros(MIB).pin_memory()
    side = torch.cuda.Stream(1)
    torch.cuda.synchronize(1)
    log.clear()
    with torch.cuda.stream(side):
        host.to(1, non_blocking=True)
    x.neg_()
    copy, kernel = log.events
    assert kernel.start == pytest.approx(10 * US) and kernel.start < copy.end
    totals = log.totals()["cuda:1"]
    assert totals.overlap == pytest.approx(min(copy.end, kernel.end) - kernel.start)


def test_large_kernels_wait_for_each_other(log):
    streams = [torch.cuda.Stream(1) for _ in range(2)]
    xs = [torch.zeros(2 * MIB, device=1) for _ in streams]  # fills 108 multiprocessors
    torch.cuda.synchronize(1)
    log.clear()
    for stream, x in zip(streams, xs, strict=True):
        with torch.cuda.stream(stream):
            x.neg_()
    one, other = log.events
    assert other.start == one.end and log.totals()["cuda:1"].overlap == 0


def test_small_kernels_beside_each_other():
    """Reductions of much to a little: they last, and take one multiprocessor each."""
    simgpu.stop()
    simgpu.start(1, "T4")  # of 40 multiprocessors
    log, x = simgpu.timeline(), torch.zeros(64, 2**14, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    log.clear()
    for stream in streams:
        with torch.cuda.stream(stream):
            x.sum(1)
    starts = [event.start for event in log.events]
    assert starts == [pytest.approx(n * US) for n in (5, 10, 15)]
    assert log.events[0].end > starts[2]
    assert log.totals()["cuda:0"].overlap > 0


@pytest.mark.parametrize(
    "select",
    [
        lambda x, mask: x.nonzero(),
        lambda x, mask: torch.masked_select(x, mask),
        lambda x, mask: x[mask],
        lambda x, mask: x.masked_select(mask),
        lambda x, mask: x.__setitem__(mask, torch.ones(4, device=1)),
        lambda x, mask: x.unique(),
        lambda x, mask: torch.where(x > 2),
    ],
)
def test_the_host_reads_how_large_a_result_is(log, select):
    x, mask = torch.arange(8.0, device=1), torch.tensor([True, False] * 4).to(1)
    log.clear()
    select(x, mask)
    assert {(e.target, e.nbytes) for e in log.copies} == {("cpu", 8)}
    assert log.host >= log.copies[-1].end
    assert log.waits[0].name == "wait for cuda:1 to cpu"


@pytest.mark.parametrize(
    "select",
    [
        lambda x: x[torch.tensor([1, 2], device=1)],
        lambda x: x.index_select(0, torch.tensor([1, 2], device=1)),
        lambda x: x.masked_fill(x > 2, 0),
        lambda x: torch.where(x > 2, x, 0),
        lambda x: x.topk(2),
    ],
)
def test_what_has_a_known_size_is_not_waited_for(log, select):
    x = torch.arange(8.0, device=1)
    log.clear()
    select(x)
    assert all(copy.source == "cpu" for copy in log.copies)


def test_clear_starts_anew(log):
    x, side = torch.zeros(MIB, device=1), torch.cuda.Stream(1)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(side)
    torch.cuda.current_stream(1).wait_stream(side)
    for _ in range(100):
        x.neg_()
    end.record(torch.cuda.current_stream(1))
    assert not end.query() and log.seconds > 500 * US
    log.clear()
    assert end.query() and log.host == pytest.approx(1 * US)
    end.synchronize()
    side.wait_event(end)
    assert side.query() and log.waits == []
    took = start.elapsed_time(end)  # between old events it is what it was
    assert took == pytest.approx(100 * 8 * MIB / 1631.2e9 * 1e3, rel=0.05)
    later = torch.cuda.Event(enable_timing=True)
    later.record(side)
    assert 0 <= end.elapsed_time(later) < 0.1
    log.clear()
    with torch.cuda.stream(side):
        torch.zeros(4, device=1)
    assert log.events[0].start == pytest.approx(5 * US)


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


WORK = st.tuples(
    st.floats(0, 20, allow_subnormal=False),  # when it is ready, after the host's time
    st.floats(1e-3, 10, allow_subnormal=False),  # how long it takes
    st.one_of(st.just(1.0), st.floats(0.01, 1.0), st.sampled_from([0.25, 1 / 3, 0.5])),
    st.floats(0, 3, allow_subnormal=False),  # by how much the host is later then
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(WORK, max_size=40))
def test_an_engine_is_never_overbooked(work):
    engine, host, booked = Engine(), 0.0, []
    for later, seconds, share, passes in work:
        host += passes
        start = engine.book(host + later, seconds, share)
        engine.forget(host)
        assert start >= host + later
        # it starts at once, or where something else ends
        ends = {end for _, end, _ in booked}
        assert start == host + later or start in ends
        booked.append((start, start + seconds, share))
    for time in {start for start, _, _ in booked}:
        used = sum(share for a, b, share in booked if a <= time < b)
        assert used <= 1.001


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(WORK, min_size=1, max_size=40))
def test_work_starts_as_early_as_it_can(work):
    """Nothing that would fit earlier is put off."""
    engine, booked = Engine(), []
    for later, seconds, share, _ in work:
        start = engine.book(later, seconds, share)
        for sooner in [later, *(end for _, end, _ in booked if later <= end < start)]:
            if sooner == start:
                continue
            points = [
                sooner,
                *(a for a, _, _ in booked if sooner < a < sooner + seconds),
            ]
            used = max(sum(s for a, b, s in booked if a <= p < b) for p in points)
            assert used + share > 1
        booked.append((start, start + seconds, share))


def test_an_engine_forgets_what_is_over():
    engine = Engine()
    for i in range(10_000):
        engine.book(float(i), 0.5)
        engine.forget(float(i))
    assert len(engine.times) < 5000  # of 20,000


def test_streams_start_no_earlier_than_they_may(log):
    """Random programs: each stream in order, after its launch and what it waits for."""
    random = np.random.default_rng(0)
    for _ in range(5):
        log.clear()
        streams = [torch.cuda.Stream(i % 2) for i in range(4)]
        free = dict.fromkeys(streams, 0.0)
        xs = [torch.zeros(int(n), device=i % 2) for i, n in enumerate([4, MIB, 300, 9])]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        for _ in range(60):
            i, j = random.integers(4, size=2)
            stream = streams[i]
            with log.recording() as new, torch.cuda.stream(stream):
                if random.random() < 0.3:
                    stream.wait_stream(streams[j])
                    free[stream] = max(free[stream], free[streams[j]])
                else:
                    xs[i].neg_()
            for event in new:
                assert event.start >= event.launched + 5 * US - 1e-12
                assert event.start >= free[stream]
                free[stream] = event.end
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        assert log.host == log.seconds


def test_gathering_moves_what_it_returns(log):
    table = torch.ones(100_000, 64, device=1)
    rows = torch.tensor([1, 2, 3], device=1)
    log.clear()
    nn.functional.embedding(rows, table)
    table.index_select(0, rows)
    table[:1].expand(1000, -1) + 0
    assert [e.nbytes for e in log.events[:2]] == [
        2 * 3 * 64 * 4 + 3 * 8,
        2 * 3 * 64 * 4 + 3 * 8,
    ]
    assert log.events[-1].nbytes < 27 * 10**6  # the storage, not 1000 rows


def test_an_inverse_waits_for_its_verdict(log):
    x = torch.eye(8, device=1)
    log.clear()
    torch.linalg.inv(x)
    assert [e.source for e in log.copies] == ["cuda:1"]


def test_the_cards_agree_with_pytorchs_own_datasheets():
    from torch._inductor.analysis.device_info import lookup_device_info

    from helpers.simgpu.cards import CARDS

    for name in ("A100", "H100"):
        card, sheet = CARDS[name], lookup_device_info(f"NVIDIA {name}")
        assert card.memory_bandwidth == sheet.dram_bw_gbs * 1e9
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            rate = card.flops[str(dtype).removeprefix("torch.")]
            times = sheet.tops[dtype] * 1e12 / rate
            # its rates of halves may be those with sparsity, which are twice as high
            assert round(times, 1) in ((1, 2) if dtype.itemsize == 2 else (1,))
