"""The log of what ran: lanes, waits, totals, its table, picture and trace."""

import json
import re
from collections import defaultdict
from xml.etree import ElementTree

import pytest
import torch

from helpers import draw, simgpu
from helpers.simgpu import clock
from helpers.simgpu.timeline import Totals, _covered

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def log():
    simgpu.start(3, "T4")
    yield simgpu.timeline()
    simgpu.stop()


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


def test_lanes(log):
    assert list(log.lanes()) == [("cuda:0", 0), ("cuda:1", 0), ("cuda:2", 0)]
    assert all(events == [] for events in log.lanes().values())
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


def test_events_are_in_the_order_of_launch(log):
    work()
    launches = [e.launched for e in log.events]
    assert launches == sorted(launches) and launches[0] >= 0
    for event in log.events:
        assert event.start >= event.launched + clock.LAUNCH - 1e-12
        assert event.end > event.start and event.kind in ("kernel", "copy")
        assert (event.kind == "copy") == bool(event.source and event.target)
    assert log.copies == [e for e in log.events if e.kind == "copy"]


def test_waits(log):
    work()
    names = [wait.name for wait in log.waits]
    assert names[0] == "pin" and "wait for cuda:1 to cpu" in names
    assert names.count("wait for cpu to cuda:1") == 2  # the layer's two parameters
    for wait, following in zip(log.waits, log.waits[1:], strict=False):
        assert wait.start < wait.end <= following.start
    assert log.waits[-1].end <= log.host <= log.seconds


def test_totals_add_up(log):
    work()
    for device, totals in log.totals().items():
        events = [
            e for lane, es in log.lanes().items() if lane[0] == device for e in es
        ]
        spent = sum(e.end - e.start for e in events)
        assert isinstance(totals, Totals) and min(totals) >= 0
        assert totals.busy + totals.idle == pytest.approx(log.seconds)
        assert totals.overlap <= totals.busy <= spent + 1e-12
        # no more than two at once here
        assert totals.busy + totals.overlap == pytest.approx(spent)
        assert log.busy()[device] == totals.busy
    assert log.totals()["cuda:0"].overlap > 0
    assert log.totals()["cuda:1"].overlap == 0
    assert log.totals()["cuda:2"] == (0, pytest.approx(log.seconds), 0)


@pytest.mark.parametrize(
    "spans, one, two",
    [
        ([], 0, 0),
        ([(1, 2)], 1, 0),
        ([(1, 2), (2, 4)], 3, 0),
        ([(0, 4), (1, 2)], 4, 1),
        ([(0, 2), (1, 3)], 3, 1),
        ([(0, 3), (0, 3), (1, 2)], 3, 3),
        ([(5, 6), (0, 1)], 2, 0),
    ],
)
def test_time_covered_by_spans(spans, one, two):
    assert _covered(spans) == (one, two)


def test_the_table(log):
    empty = log.table()
    assert "start" in empty and "cuda:2: busy 0.0, idle 0.0" in empty
    assert empty.splitlines()[-1] == "times in µs, simulated"
    work()
    table = log.table()
    assert f"... and {len(log.events) - 20} more" in table or len(log.events) <= 20
    first = log.events[0]
    assert f"{first.start * 1e6:.1f}" in table.splitlines()[1]
    assert "cuda:0/2" in table and "1,048,576" in table
    assert len(log.table(2).splitlines()) == 1 + 2 + 1 + 3 + 1
    assert "more" not in log.table(most=1000)
    for device, totals in log.totals().items():
        assert f"{device}: busy {totals.busy * 1e6:,.1f}, idle" in table


def test_how_it_prints(log):
    assert repr(log) == "Timeline(0 events, 0 of them copies, 0 µs simulated)"
    torch.ones(4).to(1)
    torch.ones(4, device=0)
    assert re.fullmatch(
        r"Timeline\(2 events, 1 of them copies, \d+ µs simulated\)", repr(log)
    )


def test_looking_at_it_takes_no_time(log):
    work()
    before = (log.seconds, len(log.events), log.host)
    for look in (repr, draw.timeline, lambda t: t.table(), lambda t: t.chrome_trace()):
        look(log)
    assert (log.seconds, len(log.events), log.host) == before
    assert simgpu.timeline().events == log.events  # each is a view of the same log


# -- Chrome trace ----------------------------------------------------------------------


def trace_of(log) -> list[dict]:
    trace = json.loads(json.dumps(log.chrome_trace(), allow_nan=False))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    return trace["traceEvents"]


@pytest.mark.parametrize("do", [work, lambda: None], ids=["work", "nothing"])
def test_rows_of_the_trace(log, do):
    """The keys that the Trace Event Format asks of each kind of row."""
    do()
    for row in trace_of(log):
        assert row["ph"] in ("X", "M")
        assert type(row["pid"]) is int and type(row["tid"]) is int
        assert isinstance(row["name"], str) and isinstance(row["args"], dict)
        if row["ph"] == "X":
            assert isinstance(row["cat"], str)
            assert isinstance(row["ts"], (int, float)) and row["ts"] >= 0
            assert isinstance(row["dur"], (int, float)) and row["dur"] > 0
        else:
            assert row["name"] in ("process_name", "thread_name")
            assert isinstance(row["args"]["name"], str)


def test_every_process_and_thread_of_the_trace_has_a_name(log):
    work()
    rows = trace_of(log)
    named = defaultdict(list)
    for row in rows:
        if row["ph"] == "M":
            key = (
                row["pid"]
                if row["name"] == "process_name"
                else (row["pid"], row["tid"])
            )
            named[key].append(row["args"]["name"])
    assert all(len(names) == 1 for names in named.values())
    assert named[0] == ["host"] and named[1] == ["cuda:0 simulated"]
    assert named[1, 2] == ["stream 2"]
    for row in rows:
        assert row["pid"] in named and (row["pid"], row["tid"]) in named


def test_the_trace_says_what_the_log_says(log):
    work()
    rows = [row for row in trace_of(log) if row["ph"] == "X"]
    launches = [row for row in rows if row["cat"] == "launch"]
    assert [row["name"] for row in launches] == [e.name for e in log.events]
    assert [row["ts"] for row in rows if row["cat"] == "wait"] == [
        pytest.approx(wait.start * 1e6) for wait in log.waits
    ]
    for event in log.events:
        found = [
            row
            for row in rows
            if row["pid"] == 1 + int(event.device[5:])
            and row["tid"] == event.stream
            and row["ts"] == pytest.approx(event.start * 1e6)
        ]
        (row,) = found
        assert (row["name"], row["cat"]) == (event.name, event.kind)
        assert row["dur"] == pytest.approx((event.end - event.start) * 1e6)
        assert row["args"] == {"bytes": event.nbytes, "flops": event.flops}


def test_nothing_overlaps_within_a_thread_of_the_trace(log):
    work()
    threads = defaultdict(list)
    for row in trace_of(log):
        if row["ph"] == "X":
            threads[row["pid"], row["tid"]].append((row["ts"], row["dur"], row["name"]))
    for spans in threads.values():
        spans.sort()
        for (start, long, name), (following, _, other) in zip(
            spans, spans[1:], strict=False
        ):
            assert start + long <= following + 1e-6, (name, other)


def test_export(log, tmp_path):
    work()
    path = tmp_path / "trace.json"
    for target in (path, str(path)):
        log.export_chrome_trace(target)
        assert json.loads(path.read_text(encoding="utf-8")) == log.chrome_trace()
    with pytest.raises(OSError):
        log.export_chrome_trace(tmp_path / "no" / "folder.json")


# -- the picture -----------------------------------------------------------------------


@pytest.mark.parametrize("do", [work, lambda: None], ids=["work", "nothing"])
def test_the_picture_is_svg_with_a_title(log, do):
    do()
    root = ElementTree.fromstring(log._repr_svg_())
    assert root.tag == f"{SVG}svg" and root.get("role") == "img"
    title = root.find(f"{SVG}title").text
    assert f"{len(log.events)} events on 3 GPUs, simulated" in title
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert {"host", "cuda:0", "cuda:1", "cuda:2", "0"} <= set(words)
    assert ("cuda:0 s2" in words) == (do is work)
    assert words[-1].endswith("µs (simulated)")
    _, _, width, height = map(float, root.get("viewBox").split())
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.get(k, 0)) for k in ("x", "y", "width", "height"))
        assert min(x, y) >= 0 and min(w, h) > 0
        assert x + w <= width and y + h <= height
    assert len(list(root.iter(f"{SVG}rect"))) >= len(log.events)


def test_the_picture_is_the_same_every_time(log):
    pictures = []
    for _ in range(2):
        simgpu.stop()
        simgpu.start(3, "T4")
        work()
        pictures.append(simgpu.timeline()._repr_svg_())
    assert pictures[0] == pictures[1]


def test_names_are_escaped(log):
    torch.ones(4).to(1)
    event = log.events[0]._replace(name="<&>")
    log._clock.events.append(event._replace(end=event.start + 1))
    assert "&lt;&amp;&gt;" in log._repr_svg_()
    ElementTree.fromstring(log._repr_svg_())


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
    ElementTree.fromstring(log._repr_svg_())


def test_recordings_nest_and_outlive_clear(log):
    with log.recording() as outer:
        torch.ones(2, device=0)
        with log.recording() as inner:
            torch.ones(2, device=1)
            log.clear()
            torch.ones(2, device=2)
        torch.ones(2, device=0)
    torch.ones(2, device=1)
    assert [e.device for e in inner] == ["cuda:1", "cuda:2"]
    assert [e.device for e in outer] == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]
    with pytest.raises(ZeroDivisionError), log.recording() as broken:
        1 / 0  # noqa: B018
    torch.ones(2, device=0)
    assert broken == []


def test_clear(log):
    work()
    log.clear()
    assert log.events == log.waits == log.copies == []
    assert log.seconds == log.host == 0
    assert list(log.lanes()) == [("cuda:0", 0), ("cuda:1", 0), ("cuda:2", 0)]
    assert set(log.totals().values()) == {(0, 0, 0)}
    ElementTree.fromstring(log._repr_svg_())


def test_there_is_none_without_gpus():
    simgpu.stop()
    with pytest.raises(RuntimeError, match="simgpu.start"):
        simgpu.timeline()
