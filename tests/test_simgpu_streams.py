"""Streams and events of simulated GPUs: the names, the words and the order of PyTorch.

What PyTorch does was read in torch/cuda/streams.py, torch/cuda/__init__.py and
torch/csrc; none of it was compared with a real GPU.
"""

import ctypes
import threading

import pytest
import torch

from helpers import simgpu
from helpers.simgpu.placement import NotSimulated

EVENT = 1e-6  # seconds of the host for a call on an event, see clock.py


@pytest.fixture(autouse=True)
def log():
    simgpu.start(4, "T4")
    yield simgpu.timeline()
    simgpu.stop()


def occupy(stream=None, times: int = 20) -> torch.Tensor:
    """Give a stream work for long: the host is far ahead of it afterwards."""
    with torch.cuda.stream(stream):
        big = torch.zeros(2**20, device="cuda")
        for _ in range(times):
            big.add_(1)
    return big


# -- streams ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device, index",
    [
        (None, 2),
        (-1, 2),
        ("cuda", 2),
        (0, 0),
        (3, 3),
        ("cuda:1", 1),
        (torch.device("cuda", 1), 1),
        (torch.device("cuda"), 2),
    ],
)
@pytest.mark.parametrize("kind", ["cuda", "any"])
def test_streams_of_every_device(device, index, kind):
    if device == -1 and kind == "any":
        return  # means something for torch.cuda alone
    torch.cuda.set_device(2)
    make = torch.cuda.Stream if kind == "cuda" else torch.Stream
    stream = make(device)
    assert stream.device == torch.device("cuda", index)
    assert (stream.device_index, stream.device_type) == (index, 1)
    assert torch.cuda.current_device() == 2
    assert torch.cuda.current_stream(index).stream_id == 0  # not yet entered


@pytest.mark.parametrize(
    "device, error, words",
    [
        ("cpu", ValueError, "Expected a cuda device, but got: cpu"),
        (4, torch.AcceleratorError, "invalid device ordinal"),
        ("cuda:9", torch.AcceleratorError, "invalid device ordinal"),
    ],
)
def test_streams_of_no_gpu_are_refused(device, error, words):
    with pytest.raises(error, match=words):
        torch.cuda.Stream(device)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize(
    "asked, got", [(0, 0), (-1, -1), (-3, -3), (-9, -3), (1, 0), (5, 0)]
)
def test_priorities_are_brought_into_their_range(asked, got):
    assert torch.cuda.Stream.priority_range() == (0, -3)
    assert torch.cuda.Stream(priority=asked).priority == got
    assert torch.Stream(priority=asked).priority == got


def test_streams_come_from_a_pool_of_32_in_turn():
    made = [torch.cuda.Stream() for _ in range(33)]
    assert len(set(made)) == len({s.cuda_stream for s in made}) == 32
    assert made[32] == made[0] and hash(made[32]) == hash(made[0])
    assert torch.cuda.Stream(priority=-1) not in made  # a pool for each priority ...
    others = [torch.cuda.Stream(1), torch.Stream(1)]
    assert others[0] not in made  # ... and GPU
    assert others[0].cuda_stream not in {s.cuda_stream for s in made}
    assert others[0].stream_id != others[1].stream_id  # of which both kinds take


def test_equality_as_in_pytorch():
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    same = torch.cuda.Stream(stream_id=a.stream_id, device_index=0, device_type=1)
    assert a == a == same and hash(a) == hash(same) and a != b
    assert a != torch.cuda.default_stream()
    assert a != 3 and a != "cuda" and a is not None and (a == None) is False  # noqa: E711
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.cuda.current_stream(1) != torch.cuda.current_stream(0)
    assert torch.Stream(stream_id=0, device_index=0, device_type=1) == (
        torch.accelerator.current_stream()
    )
    # torch.cuda.Stream.__eq__ knows its own kind only
    assert torch.accelerator.current_stream() != torch.cuda.current_stream()
    assert isinstance(a, torch.Stream) and isinstance(a, torch.cuda.Stream)
    assert not isinstance(torch.Stream(), torch.cuda.Stream)


def test_how_they_print():
    default, side = torch.cuda.default_stream(1), torch.cuda.Stream(1)
    assert repr(default) == "<torch.cuda.Stream device=cuda:1 cuda_stream=0x0>"
    handle = f"cuda_stream={side.cuda_stream:#x}>"
    assert repr(side) == f"<torch.cuda.Stream device=cuda:1 {handle}"
    assert repr(torch.accelerator.current_stream(1)) == (
        "torch.Stream device_type=cuda, device_index=1, stream_id=0"
    )
    event = torch.cuda.Event()
    assert repr(event) == "<torch.cuda.Event uninitialized>"
    event.record()
    assert repr(event) == f"<torch.cuda.Event {event.cuda_event:#x}>"
    assert repr(torch.Event()).startswith("torch.Event device")


def test_handles():
    default, side = torch.cuda.default_stream(), torch.cuda.Stream()
    assert default.cuda_stream == default.stream_id == default.priority == 0
    assert side.cuda_stream != 0
    assert isinstance(side._as_parameter_, ctypes.c_void_p)
    assert side._as_parameter_.value == side.cuda_stream
    assert side.native_handle == side.cuda_stream
    assert side.__cuda_stream__() == (0, side.cuda_stream)
    assert not side.is_capturing()
    assert not torch.cuda.is_current_stream_capturing()


@pytest.mark.parametrize("kind", ["cuda", "any"])
def test_query_and_synchronize(log, kind):
    stream = torch.cuda.Stream() if kind == "cuda" else torch.Stream()
    assert stream.query() is True
    occupy(stream)
    assert stream.query() is False
    assert torch.cuda.default_stream().query() is True
    before = len(log.waits)
    assert stream.synchronize() is None
    assert stream.query() is True and len(log.waits) == before + 1
    stream.synchronize()
    assert len(log.waits) == before + 1  # nothing left to wait for


def test_synchronize_waits_for_one_stream_device_or_all_of_it(log):
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.device(1):
        occupy(torch.cuda.Stream(), 200)
    occupy(first, 5)
    occupy(second, 50)
    first.synchronize()
    assert first.query() and not second.query()
    torch.cuda.synchronize()
    assert second.query()
    gpu1 = next(key for key in log.lanes() if key[0] == "cuda:1" and key[1])
    assert log.lanes()[gpu1][-1].end > log.waits[-1].end  # another GPU's goes on
    for wait in (torch.cuda.synchronize, torch.accelerator.synchronize):
        for device in (1, "cuda:1", torch.device("cuda", 1)):
            wait(device)
    assert log.waits[-1].end == log.lanes()[gpu1][-1].end
    with torch.cuda.device(1):
        torch.cuda.synchronize()


def test_wait_stream_and_wait_event_put_work_in_order(log):
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    occupy(a)
    b.wait_stream(a)
    occupy(b, 1)
    end = max(e.end for e in log.events if e.stream == a.stream_id)
    assert min(e.start for e in log.events if e.stream == b.stream_id) >= end
    event = b.record_event()
    c = torch.cuda.Stream(1)
    c.wait_event(event)
    occupy(b)  # given later: c need not wait for it
    occupy(c, 1)
    of_b = [e for e in log.events if e.device == "cuda:0" and e.stream == b.stream_id]
    first = min(e.start for e in log.events if e.device == "cuda:1")
    assert first == of_b[1].end < of_b[-1].end


def test_waiting_across_gpus(log):
    a, b = torch.cuda.Stream(0), torch.cuda.Stream(1)
    occupy(a)
    event = torch.cuda.Event()
    event.record(a)
    event.wait(b)
    with torch.cuda.stream(b):
        torch.ones(4, device="cuda")
    (kernel,) = [e for e in log.events if e.device == "cuda:1"]
    assert kernel.start >= max(e.end for e in log.events if e.device == "cuda:0")


# -- events ----------------------------------------------------------------------------

EVENTS = [lambda **how: torch.cuda.Event(**how), lambda **how: torch.Event(**how)]
both = pytest.mark.parametrize("make", EVENTS, ids=["torch.cuda.Event", "torch.Event"])


@both
def test_an_event_without_a_record_is_over(log, make):
    event = make()
    assert event.query() is True and event.synchronize() is None
    assert event.wait() is None and event.wait(torch.cuda.Stream()) is None
    assert torch.cuda.Event().cuda_event == 0 == event.event_id
    assert log.waits == []


@both
def test_events_follow_their_stream(log, make):
    side, event = torch.cuda.Stream(), make()
    occupy(side)
    event.record()  # in the current stream, the default one
    assert event.query()
    event.record(side)
    assert not event.query() and event.device == torch.device("cuda:0")
    occupy(side)
    event.synchronize()
    assert event.query() and not side.query()
    event.record(side)  # again: it now stands for the later work
    assert not event.query()


@both
def test_elapsed_time_is_what_the_clock_says(log, make):
    start, end = make(enable_timing=True), make(enable_timing=True)
    occupy(times=1)
    torch.cuda.synchronize()
    start.record()
    before = log.seconds
    occupy()
    end.record()
    torch.cuda.synchronize()
    kernels = [e for e in log.events if e.start >= before]
    assert start.elapsed_time(end) == pytest.approx((kernels[-1].end - before) * 1e3)
    assert end.elapsed_time(start) == pytest.approx(-start.elapsed_time(end))
    assert start.elapsed_time(start) == 0


@both
def test_elapsed_time_refuses_in_pytorchs_words(make):
    timed, other = make(enable_timing=True), make(enable_timing=True)
    for pair in ((timed, make()), (make(), timed)):
        with pytest.raises(ValueError, match="created with argument 'enable_timing=T"):
            pair[0].elapsed_time(pair[1])
    timed.record()
    for pair in ((timed, other), (other, timed)):
        with pytest.raises(ValueError, match="Both events must be recorded before"):
            pair[0].elapsed_time(pair[1])
    occupy()
    other.record()
    with pytest.raises(RuntimeError, match="Both events must be completed before"):
        timed.elapsed_time(other)
    other.synchronize()
    assert timed.elapsed_time(other) > 0
    elsewhere = make(enable_timing=True)
    elsewhere.record(torch.cuda.current_stream(1))
    with pytest.raises(RuntimeError, match="Event device 0 does not match other's de"):
        timed.elapsed_time(elsewhere)


@both
def test_an_event_stays_on_its_gpu(make):
    event = make()
    event.record(torch.cuda.Stream(1))
    assert event.device == torch.device("cuda:1")
    with pytest.raises(RuntimeError, match="Event device 1 does not match recording"):
        event.record(torch.cuda.Stream(2))
    with pytest.raises(RuntimeError, match="recording stream's device 0"):
        event.record()
    event.record(torch.cuda.Stream(1))
    event.wait(torch.cuda.Stream(3))


def test_streams_make_events_of_their_kind():
    assert type(torch.cuda.Stream().record_event()) is torch.cuda.Event
    assert type(torch.Stream().record_event()) is torch.Event
    mine = torch.cuda.Event()
    assert torch.cuda.Stream().record_event(mine) is mine
    assert isinstance(mine, torch.Event)


def test_the_two_kinds_mix():
    any_stream, cuda_stream = torch.Stream(), torch.cuda.Stream()
    any_stream.wait_stream(cuda_stream)
    cuda_stream.wait_stream(any_stream)
    cuda_stream.wait_event(any_stream.record_event())
    any_stream.wait_event(torch.cuda.Event())
    torch.cuda.Event().record(any_stream)
    torch.Event().record(cuda_stream)
    with torch.cuda.stream(any_stream):
        assert torch.cuda.current_stream().stream_id == any_stream.stream_id


def test_an_event_call_takes_the_host_a_moment(log):
    event = torch.cuda.Event()
    for call in (event.record, event.query, event.wait):
        before = log.seconds
        call()
        assert log.seconds - before == pytest.approx(EVENT)


def test_polling_an_event_gets_there():
    occupy()
    event = torch.cuda.current_stream().record_event()
    polls = 0
    while not event.query():
        polls += 1
        assert polls < 100_000
    assert polls > 10


# -- which stream is current -----------------------------------------------------------


def current(device=None) -> int:
    return torch.cuda.current_stream(device).stream_id


def test_contexts_nest_and_restore():
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(a):
        assert torch.cuda.current_stream() == a
        with torch.cuda.stream(b), torch.cuda.stream(None):
            assert torch.cuda.current_stream() == b
            with torch.cuda.stream(b):
                assert torch.cuda.current_stream() == b
            assert torch.cuda.current_stream() == b
            assert torch.cuda.default_stream().stream_id == 0
        assert torch.cuda.current_stream() == a
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.parametrize(
    "enter",
    [
        lambda s: torch.cuda.stream(s),
        lambda s: torch.cuda.StreamContext(s),
        lambda s: s,
    ],
    ids=["torch.cuda.stream", "StreamContext", "with stream"],
)
@pytest.mark.parametrize("kind", ["cuda", "any"])
def test_a_stream_of_another_gpu_makes_it_current(log, enter, kind):
    """torch._C._cuda_setStream changes the device, and back at the end."""
    torch.cuda.set_device(2)
    here = torch.cuda.Stream(2)
    there = torch.cuda.Stream(1) if kind == "cuda" else torch.Stream(1)
    with torch.cuda.stream(here):
        with enter(there):
            assert torch.cuda.current_device() == 1
            assert current() == current(1) == there.stream_id
            assert torch.cuda.current_stream(2) == here
            assert torch.ones(2, device="cuda").device.index == 1
        assert torch.cuda.current_device() == 2
        assert current(1) == 0 and torch.cuda.current_stream() == here
    assert current(2) == 0
    assert (log.events[-1].device, log.events[-1].stream) == ("cuda:1", there.stream_id)


@pytest.mark.parametrize(
    "enter", [lambda s: torch.cuda.stream(s), lambda s: s], ids=["function", "itself"]
)
def test_an_exception_leaves_the_context(enter):
    stream = torch.cuda.Stream(1)
    with pytest.raises(ZeroDivisionError), enter(stream):
        1 / 0  # noqa: B018
    assert current() == current(1) == torch.cuda.current_device() == 0


def test_a_stream_can_be_entered_twice():
    for stream in (torch.cuda.Stream(1), torch.Stream(1)):
        with stream as first, stream as second:
            assert first is second is stream
            assert current() == stream.stream_id
        assert current(1) == torch.cuda.current_device() == 0


def test_set_stream():
    side = torch.cuda.Stream(1)
    assert torch.cuda.set_stream(None) is None
    torch.cuda.set_stream(side)
    assert torch.cuda.current_device() == 1 and torch.cuda.current_stream() == side
    torch.cuda.set_stream(torch.cuda.default_stream(0))
    assert torch.cuda.current_device() == 0 and torch.cuda.current_stream(1) == side
    torch.accelerator.set_stream(torch.Stream(2))
    assert torch.cuda.current_device() == 2 and current() != 0
    assert torch.accelerator.current_stream().stream_id == current()
    assert torch.accelerator.current_stream(1).stream_id == side.stream_id
    assert type(torch.accelerator.current_stream()) is torch.Stream
    torch.cuda.set_device(1)  # a stream stays current for its GPU
    assert torch.cuda.current_stream() == side


@pytest.mark.parametrize(
    "ask",
    [
        lambda d: torch.cuda.current_stream(d),
        lambda d: torch.cuda.default_stream(d),
        lambda d: torch.accelerator.current_stream(d),
    ],
)
def test_asking_for_the_stream_of_each_gpu(ask):
    torch.cuda.set_device(3)
    for device, index in ((None, 3), (1, 1), ("cuda:2", 2), (torch.device("cuda"), 3)):
        assert ask(device).device_index == index
    with pytest.raises(torch.AcceleratorError):
        ask(7)


def test_work_goes_to_the_current_stream_of_its_own_gpu(log):
    x = torch.ones(4, device=1)
    with torch.cuda.stream(torch.cuda.Stream(0)):
        (x + 1) * 2
    assert {(e.device, e.stream) for e in log.events} == {("cuda:1", 0)}


def test_each_thread_has_its_own_current_stream():
    side, found, errors = torch.cuda.Stream(), [], []
    ready, checked = threading.Event(), threading.Event()

    def work():
        try:
            found.append(current())
            torch.cuda.set_stream(torch.cuda.Stream())
            found.append(current())
            ready.set()
            assert checked.wait(10)
            found.append(current())
        except BaseException as error:
            errors.append(error)

    with torch.cuda.stream(side):
        thread = threading.Thread(target=work)
        thread.start()
        assert ready.wait(10)
        assert torch.cuda.current_stream() == side
        checked.set()
        thread.join(10)
    assert errors == [] and found[0] == 0 and found[1] == found[2] != side.stream_id


def test_functions_on_a_side_stream_give_the_same_numbers(log):
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8).cuda()
    x = torch.randn(4, 8, device="cuda")
    wanted, side = layer(x).relu().sum(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    log.clear()
    with torch.cuda.stream(side):
        found = layer(x).relu().sum()
    assert {e.stream for e in log.events} == {side.stream_id}
    torch.cuda.current_stream().wait_stream(side)
    assert found.item() == wanted.item()


# -- after stop ------------------------------------------------------------------------


def test_stop_gives_the_names_back():
    simgpu.stop()
    before = (torch.Stream, torch.Event, torch.cuda.Stream, torch.cuda.Event,
              torch.cuda.current_stream, torch.cuda.set_stream,
              torch.accelerator.current_stream)  # fmt: skip
    simgpu.start(1)
    during = (torch.Stream, torch.Event, torch.cuda.Stream, torch.cuda.Event,
              torch.cuda.current_stream, torch.cuda.set_stream,
              torch.accelerator.current_stream)  # fmt: skip
    assert all(a is not b for a, b in zip(before, during, strict=True))
    assert torch.cuda.Stream is torch.cuda.streams.Stream
    simgpu.stop()
    assert (torch.Stream, torch.Event, torch.cuda.Stream, torch.cuda.Event,
            torch.cuda.current_stream, torch.cuda.set_stream,
            torch.accelerator.current_stream) == before  # fmt: skip
    assert torch.Stream("cpu").device.type == "cpu"


LEFT_OVER = {
    "query": lambda s, e: s.query(),
    "synchronize": lambda s, e: s.synchronize(),
    "wait_stream": lambda s, e: s.wait_stream(s),
    "record_event": lambda s, e: s.record_event(),
    "event query": lambda s, e: e.query(),
    "event synchronize": lambda s, e: e.synchronize(),
    "event record": lambda s, e: e.record(s),
    "event wait": lambda s, e: e.wait(s),
    "event elapsed_time": lambda s, e: e.elapsed_time(e),
}


@pytest.mark.parametrize("call", LEFT_OVER.values(), ids=LEFT_OVER)
def test_what_is_left_over_says_that_no_gpus_run(call):
    stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    event.record(stream)
    simgpu.stop()
    with pytest.raises(RuntimeError, match="call simgpu.start"):
        call(stream, event)
    repr(stream), repr(event), hash(stream)
    assert stream == stream


@pytest.mark.parametrize("call", LEFT_OVER.values(), ids=LEFT_OVER)
def test_what_is_left_over_is_harmless_after_a_new_start(call):
    stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    occupy(stream, 100)
    event.record(stream)
    simgpu.stop()
    simgpu.start(1)
    call(stream, event)
    assert event.query() and simgpu.timeline().seconds < 100e-6
    event.record()
    occupy(times=3)
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()


def test_old_events_put_nothing_in_order():
    events = [torch.cuda.current_stream().record_event() for _ in range(20)]
    simgpu.stop()
    simgpu.start(2)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = torch.ones(3, device="cuda")
        for _ in range(20):  # new events with the same numbers as the old ones
            side.record_event()
    for event in events:
        event.wait()
    with pytest.raises(torch.cuda._sanitizer.CUDASanitizerErrors):
        y + 1


def test_old_streams_are_watched_too():
    side = torch.cuda.Stream()
    simgpu.stop()
    simgpu.start(4)
    with torch.cuda.stream(side):
        y = torch.ones(3, device="cuda")
    with pytest.raises(torch.cuda._sanitizer.CUDASanitizerErrors):
        y + 1


def test_streams_of_gpus_that_are_gone():
    side = torch.cuda.Stream(3)
    simgpu.stop()
    simgpu.start(2)
    with pytest.raises(torch.AcceleratorError), torch.cuda.stream(side):
        pass
    assert torch.cuda.current_device() == 0
    assert (torch.ones(2, device="cuda") + 1).tolist() == [2, 2]


def test_the_current_stream_does_not_outlive_the_gpus():
    torch.cuda.set_stream(torch.cuda.Stream())
    simgpu.stop()
    simgpu.start(4)
    assert current() == 0


# -- left out --------------------------------------------------------------------------

IPC = "an event shared between processes"
REFUSED = [
    ("torch.cuda.CUDAGraph", lambda: torch.cuda.CUDAGraph()),
    ("torch.cuda.graph", lambda: torch.cuda.graph(None)),
    (
        "torch.cuda.make_graphed_callables",
        lambda: torch.cuda.make_graphed_callables(None, ()),
    ),
    ("torch.cuda.ExternalStream", lambda: torch.cuda.ExternalStream(0)),
    ("torch.cuda.streams.ExternalStream", lambda: torch.cuda.streams.ExternalStream(0)),
    (
        "torch.cuda.get_stream_from_external",
        lambda: torch.cuda.get_stream_from_external(0),
    ),
    ("a stream with stream_ptr", lambda: torch.cuda.Stream(stream_ptr=7)),
    (IPC, lambda: torch.cuda.Event(interprocess=True)),
    (IPC, lambda: torch.cuda.Event.from_ipc_handle(0, b"")),
    (IPC, lambda: torch.cuda.Event().ipc_handle()),
    (IPC, lambda: torch.Event.from_ipc_handle(torch.device("cuda"), b"")),
    (IPC, lambda: torch.Event().ipc_handle()),
    ("an event of a CUDA graph", lambda: torch.cuda.Event(external=True)),
]


@pytest.mark.parametrize("words, call", REFUSED)
def test_what_is_left_out_says_so(words, call):
    with pytest.raises(NotSimulated, match=f"^{words} is not simulated"):
        call()
