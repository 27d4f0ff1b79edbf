"""Streams and events of simulated GPUs: the names, the words and the order of PyTorch.

What PyTorch does was read in torch/cuda/streams.py, torch/cuda/__init__.py and
torch/csrc; none of it was compared with a real GPU.
"""

import ctypes
import threading

import pytest
import torch
from torch import cuda

import simgpu
from simgpu import NotSimulated
from support.limits import SHORT

EVENT = 1e-6  # seconds of the host for a call on an event, see _timing/cost.py


pytestmark = pytest.mark.simulated_gpus(4, "T4")


def occupy(stream=None, times: int = 5) -> None:
    """Give a stream work of 33 µs each time: the host is far ahead of it afterwards."""
    with torch.cuda.stream(stream):
        big = torch.zeros(2**20, device="cuda")
        for _ in range(times):
            big.add_(1)


def current(device=None) -> int:
    return torch.cuda.current_stream(device).stream_id


both_streams = pytest.mark.parametrize(
    "make", [lambda *a: torch.cuda.Stream(*a), lambda *a: torch.Stream(*a)],
    ids=["torch.cuda.Stream", "torch.Stream"],
)  # fmt: skip
both_events = pytest.mark.parametrize(
    "make", [lambda **how: torch.cuda.Event(**how), lambda **how: torch.Event(**how)],
    ids=["torch.cuda.Event", "torch.Event"],
)  # fmt: skip


# -- streams ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device, index",
    [(None, 2), ("cuda", 2), (0, 0), ("cuda:1", 1), (torch.device("cuda", 1), 1)],
)
@both_streams
def test_a_stream_is_of_its_device(device, index, make):
    torch.cuda.set_device(2)
    stream = make(device)
    assert stream.device == torch.device("cuda", index)
    assert (stream.device_index, stream.device_type) == (index, 1)
    assert torch.cuda.Stream(-1).device_index == torch.cuda.current_device() == 2
    assert current(index) == 0  # not yet entered


def test_streams_of_no_gpu_are_refused():
    for device in (4, "cuda:9"):
        with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
            torch.cuda.Stream(device)
    with pytest.raises(ValueError, match="Expected a cuda device, but got: cpu"):
        torch.cuda.Stream("cpu")
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("asked, got", [(0, 0), (-1, -1), (-3, -3), (-9, -3), (5, 0)])
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


def test_streams_are_equal_as_in_pytorch():
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


def test_streams_and_events_print_as_in_pytorch():
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


def test_streams_have_handles():
    default, side = torch.cuda.default_stream(), torch.cuda.streams.Stream()
    assert default.cuda_stream == default.stream_id == default.priority == 0
    assert side.cuda_stream != 0
    assert isinstance(side._as_parameter_, ctypes.c_void_p)
    assert side._as_parameter_.value == side.native_handle == side.cuda_stream
    assert side.__cuda_stream__() == (0, side.cuda_stream)
    assert not side.is_capturing()
    assert not torch.cuda.is_current_stream_capturing()


@both_streams
def test_query_and_synchronize_follow_the_stream(log, make):
    stream = make()
    assert stream.query() is True
    occupy(stream)
    assert stream.query() is False
    assert torch.cuda.default_stream().query() is True
    before = len(log.waits)
    assert stream.synchronize() is None
    assert stream.query() is True and len(log.waits) == before + 1
    stream.synchronize()
    assert len(log.waits) == before + 1  # nothing left to wait for


def test_synchronize_waits_for_one_stream_or_device(log):
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.device(1):
        occupy(torch.cuda.Stream(), 30)
    occupy(first, 2)
    occupy(second, 6)
    first.synchronize()
    assert first.query() and not second.query()
    torch.cuda.synchronize()
    assert second.query()
    end = max(e.end for e in log.events if e.device == "cuda:1")
    assert log.waits[-1].end < end  # another GPU's goes on
    for wait in (torch.cuda.synchronize, torch.accelerator.synchronize):
        for device in (1, "cuda:1", torch.device("cuda", 1)):
            wait(device)
    assert log.waits[-1].end == end
    with torch.cuda.device(1):
        torch.cuda.synchronize()


def test_wait_stream_and_wait_event_put_work_in_order(log):
    a, b, c = (torch.cuda.Stream(i) for i in range(3))  # what they run on is not shared
    occupy(a)
    b.wait_stream(a)
    occupy(b, 1)
    event = b.record_event()
    c.wait_event(event)
    occupy(b)  # given later: c need not wait for it
    occupy(c, 1)
    of_a, of_b, of_c = (log.lanes()[str(s.device), s.stream_id] for s in (a, b, c))
    assert of_b[0].start == of_a[-1].end
    assert of_c[0].start == of_b[1].end < of_b[-1].end


# -- events ----------------------------------------------------------------------------


@both_events
def test_an_event_without_a_record_is_over(log, make):
    event = make()
    assert event.query() is True and event.synchronize() is None
    assert event.wait() is None and event.wait(torch.cuda.Stream()) is None
    assert torch.cuda.Event().cuda_event == 0 == event.event_id
    assert log.waits == []


@both_events
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
    other = torch.cuda.Stream(1)
    event.wait(other)
    occupy(other, 1)
    assert min(e.start for e in log.events if e.device == "cuda:1") >= max(
        e.end for e in log.events if e.device == "cuda:0"
    )


@both_events
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


@both_events
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
    for pair in ((timed, other), (other, timed)):
        with pytest.raises(RuntimeError, match="Both events must be completed before"):
            pair[0].elapsed_time(pair[1])
    other.synchronize()
    assert timed.elapsed_time(other) > 0
    elsewhere = make(enable_timing=True)
    elsewhere.record(torch.cuda.current_stream(1))
    elsewhere.synchronize()
    with pytest.raises(torch.AcceleratorError, match="CUDA error: invalid resource ha"):
        timed.elapsed_time(elsewhere)


@both_events
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


def test_the_two_kinds_of_streams_and_events_mix():
    any_stream, cuda_stream = torch.Stream(), torch.cuda.Stream()
    assert type(cuda_stream.record_event()) is torch.cuda.Event
    assert type(any_stream.record_event()) is torch.Event
    mine = torch.cuda.Event()
    assert cuda_stream.record_event(mine) is mine and isinstance(mine, torch.Event)
    any_stream.wait_stream(cuda_stream)
    cuda_stream.wait_stream(any_stream)
    cuda_stream.wait_event(any_stream.record_event())
    any_stream.wait_event(mine)
    mine.record(any_stream)
    torch.Event().record(cuda_stream)
    with torch.cuda.stream(any_stream):
        assert current() == any_stream.stream_id


def test_calls_on_streams_and_events_take_the_host_a_moment(log):
    event, main, side = torch.cuda.Event(), torch.cuda.current_stream(), torch.Stream()
    for call, times in [
        (event.record, 1), (event.query, 1), (event.wait, 1), (side.query, 1),
        (lambda: side.wait_stream(main), 2),  # records and waits
    ]:  # fmt: skip
        before = log.host
        call()
        assert log.host - before == pytest.approx(times * EVENT)


# -- which stream is current -----------------------------------------------------------


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
    "enter", [lambda s: cuda.stream(s), lambda s: cuda.StreamContext(s), lambda s: s],
    ids=["stream", "StreamContext", "with stream"],
)  # fmt: skip
@both_streams
def test_a_stream_of_another_gpu_makes_it_current(log, enter, make):
    """torch._C._cuda_setStream changes the device, and back at the end."""
    torch.cuda.set_device(2)
    here, there = torch.cuda.Stream(2), make(1)
    with torch.cuda.stream(here):
        with pytest.raises(ZeroDivisionError), enter(there):
            assert torch.cuda.current_device() == 1
            assert current() == current(1) == there.stream_id
            assert torch.cuda.current_stream(2) == here
            assert torch.ones(2, device="cuda").device.index == 1
            1 / 0  # noqa: B018 - an exception leaves the context too
        assert torch.cuda.current_device() == 2
        assert current(1) == 0 and torch.cuda.current_stream() == here
    assert current(2) == 0
    assert (log.events[-1].device, log.events[-1].stream) == ("cuda:1", there.stream_id)


@both_streams
def test_a_stream_can_be_entered_twice(make):
    stream = make(1)
    with stream as first, stream as second:
        assert first is second is stream
        assert current() == stream.stream_id
    assert current(1) == torch.cuda.current_device() == 0


def test_set_stream_makes_its_gpu_current():
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


def test_the_streams_of_every_gpu_can_be_asked_for():
    torch.cuda.set_device(3)
    indices = {None: 3, 1: 1, "cuda:2": 2, torch.device("cuda"): 3}
    for ask in (cuda.current_stream, cuda.default_stream,
                torch.accelerator.current_stream):  # fmt: skip
        for device, index in indices.items():
            assert ask(device).device_index == index
        with pytest.raises(RuntimeError, match="Device index value 7 is out of index "):
            ask(7)


def test_work_goes_to_the_current_stream_of_its_own_gpu(log):
    x = torch.ones(4, device=1)
    with torch.cuda.stream(torch.cuda.Stream(0)):
        (x + 1) * 2
    assert {(e.device, e.stream) for e in log.events} == {("cuda:1", 0)}


def test_each_thread_has_its_own_current_stream():
    side, found = torch.cuda.Stream(), []

    def work():
        found.append(current())
        torch.cuda.set_stream(torch.cuda.Stream())
        found.append(current())

    with torch.cuda.stream(side):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(SHORT)
        assert torch.cuda.current_stream() == side
    before, after = found
    assert before == 0 and after not in (0, side.stream_id)


# -- after stop ------------------------------------------------------------------------


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
def test_streams_and_events_of_gpus_that_are_gone_are_harmless(call):
    stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    occupy(stream)
    event.record(stream)
    simgpu.stop()
    with pytest.raises(RuntimeError, match="call simgpu.start"):
        call(stream, event)
    repr(stream), repr(event), hash(stream)
    assert stream == stream
    simgpu.start(1)
    call(stream, event)
    assert event.query() and simgpu.timeline().seconds < 100e-6
    event.record()
    occupy()
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()


@pytest.mark.parametrize("call", ["wait", "query", "synchronize"])
def test_events_of_gpus_that_are_gone_put_nothing_in_order(call):
    events = [torch.cuda.current_stream().record_event() for _ in range(20)]
    simgpu.stop()
    simgpu.start(2)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = torch.ones(3, device="cuda")
        for _ in range(20):  # new events with the same numbers as the old ones
            side.record_event()
    for event in events:
        getattr(event, call)()
    with pytest.raises(torch.cuda._sanitizer.CUDASanitizerErrors):
        y + 1


def test_a_stream_made_before_the_start_is_watched():
    side = torch.cuda.Stream()
    simgpu.stop()
    simgpu.start(4)
    with torch.cuda.stream(side):
        y = torch.ones(3, device="cuda")
    with pytest.raises(torch.cuda._sanitizer.CUDASanitizerErrors):
        y + 1


def test_a_stream_of_a_gpu_that_is_gone_cannot_be_entered():
    side = torch.cuda.Stream(3)
    event = side.record_event()
    simgpu.stop()
    simgpu.start(2)
    with pytest.raises(torch.AcceleratorError), torch.cuda.stream(side):
        pass
    assert torch.cuda.current_device() == 0
    assert (torch.ones(2, device="cuda") + 1).tolist() == [2, 2]
    event.record()  # a new start for it
    assert event.device == torch.device("cuda:0")


def test_the_current_stream_does_not_outlive_the_gpus():
    torch.cuda.set_stream(torch.cuda.Stream())
    simgpu.stop()
    simgpu.start(4)
    assert current() == 0


# -- left out --------------------------------------------------------------------------

IPC = "a torch.Event shared between processes"
REFUSED = [
    (r"a stream of another library \(handle 0x7\)",
     lambda: cuda.get_stream_from_external(7)),
    ("a stream with stream_ptr", lambda: cuda.Stream(stream_ptr=7)),
    (IPC, lambda: torch.Event.from_ipc_handle(torch.device("cuda"), b"")),
    (IPC, lambda: torch.Event().ipc_handle()),
    ("an event with external=True, for CUDA graphs", lambda: cuda.Event(external=True)),
]  # fmt: skip


@pytest.mark.parametrize("words, call", REFUSED)
def test_what_is_left_out_says_so(words, call):
    with pytest.raises(NotSimulated, match=f"^{words} is not simulated"):
        call()
