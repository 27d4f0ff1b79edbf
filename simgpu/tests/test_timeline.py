"""The log of what ran: lanes, waits, totals, its table, picture and trace."""

import json
from xml.etree import ElementTree

import pytest
import torch

import simgpu
from simgpu._pictures import timelines as draw
from simgpu._timing import clock, cost
from simgpu._timing.timeline import Totals, _covered

SVG = "{http://www.w3.org/2000/svg}"


pytestmark = pytest.mark.simulated_gpus(3, "T4")


def work() -> None:
    """Kernels on two streams, copies in both directions and between GPUs, waits."""
    _, side = torch.cuda.Stream(), torch.cuda.Stream()  # the first one has no events
    host = torch.ones(2**18).pin_memory()
    with torch.cuda.stream(side):
        x = host.to("cuda", non_blocking=True)
        x.mul_(2)
    big = torch.ones(2**18, device="cuda")
    big.mul_(3)
    torch.cuda.current_stream().wait_stream(side)
    x.record_stream(torch.cuda.current_stream())
    y = (x + big).to(1)
    layer = torch.nn.Linear(64, 64).to(1)
    layer(y.view(-1, 64)).sum().item()
    torch.cuda.synchronize()


def nothing() -> None: ...


def work_and_clear() -> None:
    work()
    simgpu.timeline().clear()


either = pytest.mark.parametrize("do", [work, nothing, work_and_clear])


# -- events, waits, lanes and totals ---------------------------------------------------


def test_events_are_in_the_order_of_launch(log):
    work()
    launches = [e.launched for e in log.events]
    assert launches == sorted(launches) and launches[0] >= 0
    for event in log.events:
        assert event.start >= event.launched + cost.LAUNCH - 1e-12
        assert event.end > event.start and event.kind in ("kernel", "copy")
        assert (event.kind == "copy") == bool(event.source and event.target)
    assert log.copies == [e for e in log.events if e.kind == "copy"]


def test_waits_and_launches_follow_each_other(log):
    work()
    names = [wait.name for wait in log.waits]
    assert names[0] == "pin" and "wait for cuda:1 to cpu" in names
    assert names.count("wait for cpu to cuda:1") == 2  # the layer's two parameters
    launches = [(e.launched, e.launched + cost.LAUNCH) for e in log.events]
    spans = sorted(launches + [(wait.start, wait.end) for wait in log.waits])
    for (start, end), (following, _) in zip(spans, spans[1:], strict=False):
        assert start < end <= following + 1e-12
    assert log.waits[-1].end <= log.host <= log.seconds


def test_every_event_is_in_the_lane_of_its_stream(log):
    work()
    lanes = log.lanes()
    assert list(lanes) == [("cuda:0", 0), ("cuda:0", 2), ("cuda:1", 0), ("cuda:2", 0)]
    assert lanes["cuda:2", 0] == []
    assert [e.name for e in lanes["cuda:0", 2]] == ["cpu to cuda:0", "mul_"]
    peer = next(e for e in log.copies if e.source == "cuda:0" and e.target == "cuda:1")
    assert peer in lanes["cuda:0", 0] and peer in lanes["cuda:1", 0]
    assert sum(map(len, lanes.values())) == len(log.events) + 1
    for (device, stream), events in lanes.items():
        assert events == sorted(events, key=lambda e: e.start)
        for event in events:
            assert (event.device, event.stream) == (device, stream) or event is peer
        for a, b in zip(events, events[1:], strict=False):
            assert a.end <= b.start


def test_a_peer_copy_is_in_the_lanes_of_the_streams_that_it_holds_up(log):
    x, side = torch.ones(4, device=0), torch.cuda.Stream(0)
    side.wait_stream(torch.cuda.current_stream(0))
    with torch.cuda.stream(side):
        x.to(1)
    (copy,) = log.copies
    assert copy in log.lanes()["cuda:0", side.stream_id]
    assert copy not in log.lanes()["cuda:0", 0]


def test_eleven_gpus_are_in_order():
    simgpu.stop()
    simgpu.start(11)
    log = simgpu.timeline()
    assert log.devices == [f"cuda:{i}" for i in range(11)]
    assert [device for device, _ in log.lanes()] == log.devices


def test_totals_add_up(log):
    work()
    for device, totals in log.totals().items():
        lanes = [events for lane, events in log.lanes().items() if lane[0] == device]
        spent = sum(e.end - e.start for events in lanes for e in events)
        assert isinstance(totals, Totals) and min(totals) >= 0
        assert totals.busy + totals.idle == pytest.approx(log.seconds)
        # no more than two at once here
        assert totals.busy + totals.overlap == pytest.approx(spent)
        assert log.busy()[device] == totals.busy
    assert log.totals()["cuda:0"].overlap > 0
    assert log.totals()["cuda:1"].overlap == 0
    assert log.totals()["cuda:2"] == (0, pytest.approx(log.seconds), 0)


@pytest.mark.parametrize(
    "spans, one, two",
    [([], 0, 0), ([(1, 2), (2, 4)], 3, 0), ([(0, 4), (1, 2)], 4, 1),
     ([(0, 2), (1, 3)], 3, 1), ([(0, 3), (0, 3), (1, 2)], 3, 3),
     ([(5, 6), (0, 1)], 2, 0)],
)  # fmt: skip
def test_time_covered_by_spans(spans, one, two):
    assert _covered(spans) == (one, two)


@pytest.mark.parametrize("do", [nothing, work_and_clear])
def test_an_empty_log_starts_at_zero(log, do):
    do()
    assert log.events == log.waits == log.copies == []
    assert log.seconds == log.host == 0
    assert list(log.lanes()) == [("cuda:0", 0), ("cuda:1", 0), ("cuda:2", 0)]
    assert set(log.totals().values()) == {(0, 0, 0)}


# -- table and picture -----------------------------------------------------------------


def test_the_table_shows_the_first_events_and_totals(log):
    empty = log.table()
    assert "start" in empty and "cuda:2: busy 0.0, idle 0.0" in empty
    assert empty.splitlines()[-1] == "times in µs, simulated"
    work()
    table = log.table()
    first = log.events[0]
    assert f"{first.start * 1e6:.1f}" in table.splitlines()[1]
    assert f"{first.end * 1e6:.1f}" in table.splitlines()[1]
    assert "cuda:0/2" in table and "1,048,576" in table
    assert len(log.table(2).splitlines()) == 1 + 2 + 1 + 3 + 1
    assert f"... and {len(log.events) - 2} more" in log.table(2)
    assert "more" not in log.table(most=1000)
    for device, totals in log.totals().items():
        assert f"{device}: busy {totals.busy * 1e6:,.1f}, idle" in table
    assert repr(log) == (
        f"Timeline({len(log.events)} events, {len(log.copies)} of them copies, "
        f"{log.seconds * 1e6:.0f} µs simulated)"
    )


@either
def test_looking_at_it_takes_no_time(log, do):
    do()
    before = (log.seconds, log.events, log.host)
    for look in (repr, draw.timeline, lambda t: t.table(), lambda t: t.chrome_trace()):
        look(log)
    assert (log.seconds, log.events, log.host) == before
    assert simgpu.timeline().events == log.events  # each is a view of the same log


@either
def test_the_picture_is_svg_with_a_title(log, do):
    do()
    picture = log._repr_svg_()
    root = ElementTree.fromstring(picture)
    assert root.tag == f"{SVG}svg" and root.get("role") == "img"
    title = root.find(f"{SVG}title").text
    assert f"{len(log.events)} events on 3 GPUs, simulated" in title
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert {"host", "cuda:0", "cuda:1", "cuda:2", "0"} <= set(words)
    assert ("cuda:0 s2" in words) == (do is work)
    assert words[-1].endswith("µs (simulated)")
    _, _, width, height = map(float, root.get("viewBox").split())
    boxes = list(root.iter(f"{SVG}rect"))
    for box in boxes:
        x, y, w, h = (float(box.get(k, 0)) for k in ("x", "y", "width", "height"))
        assert min(x, y) >= 0 and min(w, h) > 0
        assert x + w <= width and y + h <= height
    assert len(boxes) >= len(log.events)
    simgpu.stop()
    simgpu.start(3, "T4")
    do()
    assert simgpu.timeline()._repr_svg_() == picture  # the same every time


def test_names_are_escaped_in_the_picture(log):
    torch.ones(4).to(1)
    event = log.events[0]._replace(name="<&>")
    log._clock.events.append(event._replace(end=event.start + 1))
    assert "&lt;&amp;&gt;" in log._repr_svg_()
    ElementTree.fromstring(log._repr_svg_())


# -- Chrome trace ----------------------------------------------------------------------


@either
def test_the_trace_says_what_the_log_says_in_its_format(log, do):
    """The keys are those that the Trace Event Format asks of each kind of row."""
    do()
    names = [("process_name", 0, 0, "host"), ("thread_name", 0, 0, "launches")]
    works = [(w.name, "wait", 0, 0, w.start, w.end - w.start, 0, 0) for w in log.waits]
    for e in log.events:
        works.append((e.name, "launch", 0, 0, e.launched, cost.LAUNCH, 0, 0))
    for i in range(3):
        names.append(("process_name", 1 + i, 0, f"cuda:{i} simulated"))
    for (device, stream), events in log.lanes().items():
        process = 1 + int(device.removeprefix("cuda:"))
        names.append(("thread_name", process, stream, f"stream {stream}"))
        for e in events:
            where = (e.name, e.kind, process, stream)
            works.append((*where, e.start, e.end - e.start, e.nbytes, e.flops))
    trace = json.loads(json.dumps(log.chrome_trace(), allow_nan=False))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for row in trace["traceEvents"]:
        where = (row["pid"], row["tid"])
        assert list(map(type, where)) == [int, int]
        if row["ph"] == "M":
            names.remove((row["name"], *where, row["args"]["name"]))
            continue
        assert row["ph"] == "X" and row["ts"] >= 0 and row["dur"] > 0
        sizes = (row["args"].get("bytes", 0), row["args"].get("flops", 0))
        times = (row["ts"] / 1e6, row["dur"] / 1e6)
        found = (row["name"], row["cat"], *where, *map(pytest.approx, times), *sizes)
        works.remove(found)
    assert names == works == []


def test_the_trace_is_exported_to_a_file(log, tmp_path):
    work()
    path = tmp_path / "trace.json"
    for target in (path, str(path)):
        log.export_chrome_trace(target)
        assert json.loads(path.read_text(encoding="utf-8")) == log.chrome_trace()
    with pytest.raises(OSError):
        log.export_chrome_trace(tmp_path / "no" / "folder.json")


# -- the length of the log -------------------------------------------------------------


def test_a_full_log_forgets_the_oldest(monkeypatch):
    simgpu.stop()
    monkeypatch.setattr(clock, "KEPT", 50)
    simgpu.start(3, "T4")
    log = simgpu.timeline()
    x = torch.zeros(4, device=1)
    with log.recording() as recorded:
        for _ in range(60):
            x.add_(1)
            x.cpu()
    assert len(recorded) == 120 and len(log.events) == len(log.waits) == 50
    assert log.events == recorded[-50:]
    assert log.seconds == recorded[-1].end
    for look in (log.__repr__, log.table, log.chrome_trace, log._repr_svg_):
        look()
    totals = log.totals()["cuda:1"]
    assert 0 < totals.busy < log.seconds
    assert totals.busy + totals.idle == pytest.approx(log.seconds)


def test_recordings_nest_and_outlive_clear(log):
    with log.recording() as outer, log.recording() as middle:
        with log.recording() as inner:
            torch.ones(2, device=1)
            log.clear()
            torch.ones(2, device=2)
        torch.ones(2, device=0)
    torch.ones(2, device=1)
    assert [e.device for e in inner] == ["cuda:1", "cuda:2"]
    assert [e.device for e in outer] == ["cuda:1", "cuda:2", "cuda:0"]
    assert outer == middle
    with pytest.raises(ZeroDivisionError), log.recording() as broken:
        1 / 0  # noqa: B018
    torch.ones(2, device=0)
    assert broken == []
