"""Snapshots of simulated memory: in PyTorch's format, for PyTorch's own viewer."""

import base64
import json
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.cuda import _memory_viz as viz

from helpers import simgpu
from helpers.simgpu.cards import MIB

HERE = Path(__file__)
record = torch.cuda.memory._record_memory_history
snapshot = torch.cuda.memory._snapshot


@pytest.fixture(autouse=True)
def gpus():
    simgpu.start(2, memory="64MB")
    yield
    simgpu.stop()


def plain(text: str) -> str:
    """In place of the Perl script that would draw the flame graph."""
    return text


def line() -> int:
    """The number of the line that asks."""
    return sys._getframe(1).f_lineno


def events(device: int = 1) -> list[dict]:
    return snapshot()["device_traces"][device]


def frames_in(data: dict) -> list[dict]:
    """Every frame of a snapshot."""
    parts = [*data["segments"], *(e for t in data["device_traces"] for e in t)]
    parts += [block for segment in data["segments"] for block in segment["blocks"]]
    return [frame for part in parts for frame in part["frames"]]


def work() -> tuple[torch.Tensor, dict[str, int]]:
    """Some memory that lives, some that died, and the lines where it was asked for."""
    at = {"small": line() + 1}
    small = torch.zeros(1000, device=1)
    at["large"] = line() + 1
    large = torch.zeros(3 * MIB, device=1)
    at["del"] = line() + 1
    del large
    return small, at


def test_a_snapshot_has_the_documented_form():
    record()
    x, _ = work()
    data = snapshot()
    assert {"segments", "device_traces", "allocator_settings"} <= set(data)
    assert len(data["device_traces"]) == 2 and data["device_traces"][0] == []
    small, large = data["segments"]
    keys = {"device", "address", "total_size", "allocated_size", "active_size",
            "requested_size", "stream", "segment_type", "segment_pool_id",
            "is_expandable", "frames", "blocks"}  # fmt: skip
    assert keys == set(small) == set(large)
    assert (small["device"], small["stream"], small["segment_pool_id"]) == (
        1, 0, (0, 0),
    )  # fmt: skip
    assert (small["segment_type"], small["total_size"]) == ("small", 2 * MIB)
    assert (small["allocated_size"], small["active_size"]) == (4096, 4096)
    assert small["requested_size"] == 4000
    assert (large["segment_type"], large["total_size"]) == ("large", 12 * MIB)
    used, rest = small["blocks"]
    assert (used["size"], used["requested_size"]) == (4096, 4000)
    assert (used["state"], rest["state"]) == ("active_allocated", "inactive")
    assert used["address"] == small["address"]
    assert rest["address"] == small["address"] + 4096
    assert rest["size"] == 2 * MIB - 4096
    assert [block["state"] for block in large["blocks"]] == ["inactive"]
    assert torch.cuda.memory_snapshot() == data["segments"]
    assert data["allocator_settings"]["expandable_segments"] is False
    del x


def test_events_say_what_happened_and_where():
    record()
    x, at = work()
    torch.cuda.empty_cache()
    found = [(event["action"], event["size"]) for event in events()]
    assert found == [
        ("segment_alloc", 2 * MIB),
        ("alloc", 4000),
        ("segment_alloc", 12 * MIB),
        ("alloc", 12 * MIB),
        ("free_requested", 12 * MIB),
        ("free_completed", 12 * MIB),
        ("segment_free", 12 * MIB),
    ]
    trace = events()[:7]
    lines = [event["frames"][0]["line"] for event in trace[:-1]]
    small, large, freed = at["small"], at["large"], at["del"]
    assert lines == [small, small, large, large, freed, freed]
    for event in trace:
        assert {"action", "addr", "size", "stream", "time_us", "frames"} <= set(event)
    for event in trace[:-1]:
        assert event["frames"][0]["filename"] == str(HERE)
        assert event["frames"][0]["name"] == "work"
    assert trace[-1]["frames"][0]["name"] == "empty_cache"  # PyTorch's own
    assert trace[1]["addr"] == trace[0]["addr"]
    times = [event["time_us"] for event in trace]
    assert times == sorted(times)
    del x


def test_no_line_of_the_simulator_is_shown():
    record()
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).to(1)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(2):
        net(torch.ones(4, 8, device=1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    data = snapshot()
    frames = frames_in(data)
    files = {frame["filename"] for frame in frames}
    ours = str(Path(simgpu.__file__).parent)
    assert str(HERE) in files and not any(file.startswith(ours) for file in files)
    used = [b for s in data["segments"] for b in s["blocks"] if b["frames"]]
    assert used and all(
        str(HERE) in {frame["filename"] for frame in part["frames"]}
        for part in [*used, *data["device_traces"][1]]
        if part.get("action") != "snapshot"
    )
    assert any(frame["name"] == "_engine_run_backward" for frame in frames)


def test_the_frames_are_those_of_a_real_gpu():
    record()
    net = torch.nn.Linear(8, 8).to(1)
    at = line() - 1
    frames = next(e for e in events() if e["action"] == "alloc")["frames"]
    names = [frame["name"] for frame in frames]
    assert names[:3] == ["convert", "_apply", "to"] and names[3].startswith("test_")
    assert frames[3]["line"] == at
    del net


def test_an_error_is_recorded_with_what_was_free():
    record()
    x = torch.zeros(1000, device=1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(32 * MIB, device=1)
    (event,) = [event for event in events() if event["action"] == "oom"]
    assert event["size"] == 128 * MIB and event["device_free"] == 62 * MIB
    assert "addr" not in event
    assert event["frames"][0]["filename"] == str(HERE)
    del x


def test_a_block_that_waits_for_a_stream_is_neither_used_nor_free():
    record()
    side = torch.cuda.Stream(1)
    x = torch.ones(MIB, device=1)
    side.wait_stream(torch.cuda.current_stream(1))
    with torch.cuda.stream(side):
        for _ in range(50):
            y = x * 2
    x.record_stream(side)
    del x
    waiting, free = next(
        segment["blocks"] for segment in snapshot()["segments"] if not segment["stream"]
    )
    assert (waiting["size"], free["state"]) == (4 * MIB, "inactive")
    assert waiting["state"] == "active_pending_free"
    names = [e["action"] for e in events() if e["size"] == 4 * MIB and not e["stream"]]
    assert names == ["alloc", "free_requested"]
    torch.cuda.synchronize(1)
    torch.empty(1, device=1)
    assert "free_completed" in [event["action"] for event in events()]
    assert "active_pending_free" not in str(snapshot()["segments"])
    del y


# -- what is recorded ------------------------------------------------------------------


def test_nothing_is_recorded_unless_asked():
    x, _ = work()
    data = snapshot()
    assert data["device_traces"] == [[], []] and not frames_in(data)
    assert [s["total_size"] for s in data["segments"]] == [2 * MIB, 12 * MIB]
    record()
    torch.zeros(1, device=1)
    record(enabled=None)
    torch.zeros(1, device=1)
    assert events() == []
    del x


def test_the_newest_events_are_kept():
    record(max_entries=5)
    for size in range(1, 101):
        torch.zeros(size, device=1)
    trace = events()
    assert len(trace) == 5 and trace[-1]["size"] == 400
    record(max_entries=3)
    torch.zeros(1, device=1)
    assert len(events()) == 3


def test_the_history_can_be_cleared():
    record()
    torch.zeros(1, device=1)
    record(clear_history=True)
    assert not [event for event in events() if event["action"] != "snapshot"]
    torch.zeros(1, device=1)
    assert "alloc" in [event["action"] for event in events()]


@pytest.mark.parametrize(
    "context, on_blocks, on_allocs, on_frees",
    [
        (None, None, None, None),
        ("state", "small", None, None),
        ("alloc", "small", "large", "large"),
        ("all", "small", "large", "del"),
    ],
)
def test_the_context_says_which_lines_are_kept(
    context, on_blocks, on_allocs, on_frees
):  # fmt: skip
    record(context=context)
    x, at = work()
    data = snapshot()

    def first_line(part):
        return part["frames"][0]["line"] if part["frames"] else None

    assert first_line(data["segments"][0]["blocks"][0]) == at.get(on_blocks)
    large = {
        event["action"]: first_line(event)
        for event in data["device_traces"][1]
        if event["size"] == 12 * MIB
    }
    assert large["alloc"] == large["segment_alloc"] == at.get(on_allocs)
    assert large["free_requested"] == large["free_completed"] == at.get(on_frees)
    del x


def test_only_the_state_may_be_recorded():
    record(enabled="state")
    x, at = work()
    data = snapshot()
    assert len(data["device_traces"][1]) <= 1
    assert data["segments"][0]["blocks"][0]["frames"][0]["line"] == at["small"]
    del x


@pytest.mark.parametrize(
    "wrong", [{"enabled": "some"}, {"context": "some"}, {"stacks": "some"}]
)
def test_wrong_options_are_refused(wrong):
    with pytest.raises(RuntimeError, match="expected "):
        record(**wrong)


def test_a_snapshot_is_itself_an_event():
    record()
    torch.zeros(1000, device=1)
    x = torch.zeros(1000, device=1)
    assert [e["action"] for e in events()].count("snapshot") == 0
    (event,) = [e for e in events() if e["action"] == "snapshot"]
    assert event["size"] == 4096
    del x


# -- PyTorch's own viewer --------------------------------------------------------------


def test_a_dump_is_a_pickle_that_needs_nothing_but_python(tmp_path):
    record()
    x, _ = work()
    file = tmp_path / "dump.pickle"
    torch.cuda.memory._dump_snapshot(str(file))
    data = pickle.loads(file.read_bytes())
    assert data["segments"] == snapshot()["segments"]
    used = {type(value) for value in every_value(data)}
    assert used <= {dict, list, tuple, str, int, float, bool, type(None)}
    del x


def every_value(data):
    """All that is in nested dicts and lists."""
    yield data
    if isinstance(data, dict):
        for value in data.values():
            yield from every_value(value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from every_value(value)


def test_the_viewer_sums_the_segments():
    record()
    x, _ = work()
    y = torch.zeros(5 * MIB + 10, device=1)  # 20 MiB + 40 bytes
    text = viz.segsum(snapshot())
    assert "[aa] 22.0MiB allocated, 2.0MiB (0.0% internal) free" in text
    assert "segments: 3\n" in text
    assert "total_reserved: 36.0MiB\ntotal_allocated: 20.0MiB\n" in text
    assert re.search(r"total_free: 16\.0MiB \(0\.0% internal\)", text)
    del x, y


def test_the_viewer_retells_the_trace():
    record()
    x, _ = work()
    torch.cuda.empty_cache()
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(32 * MIB, device=1)
    text = viz.trace(snapshot())
    told = re.sub(r"\d{9,}", "ADDRESS", text).splitlines()
    assert told[0] == "Device 1 ----------------"
    assert told[2:9] == [
        "a = cudaMalloc(ADDRESS, 2.0MiB)",
        "b = a[0:3.9KiB]",
        "c = cudaMalloc(ADDRESS, 12.0MiB)",
        "d = c[0:12.0MiB]",
        "del d # 12.0MiB",
        "# free completed for d 12.0MiB",
        "cudaFree(c) # 12.0MiB",
    ]
    assert "raise OutOfMemoryError # 128.0MiB requested, 62.0MiB free in CUDA" in text
    del x


def test_flame_graphs_name_the_lines_that_hold_memory():
    record()
    x, at = work()
    data = snapshot()
    wanted = f"{HERE.name}:{at['small']}:work 4000\n"
    for text in (viz.memory(data, plain), viz.segments(data, plain)):
        (held,) = [part for part in text.splitlines(True) if part.endswith(wanted)]
        assert held.startswith("stream_0;") and ";active_allocated;" in held
    address = data["segments"][0]["address"]
    assert f"stream_0;seg_{address};active_allocated;" in viz.segments(data, plain)
    assert viz.memory(data, plain).count("<gaps> 96\n") == 1  # 4096 - 4000
    assert "simgpu/" not in viz.memory(data, plain)
    del x


def test_two_snapshots_are_compared(capsys):
    record()
    x, _ = work()
    before = snapshot()["segments"]
    torch.cuda.empty_cache()
    y = torch.zeros(5 * MIB, device=1)
    at = line() - 1
    text = viz.compare(before, snapshot()["segments"], plain)
    assert "only_before;stream_0;seg_" in text and "only_after;stream_0;seg_" in text
    assert f"{HERE.name}:{at}:test_two_snapshots_are_compared {20 * MIB}\n" in text
    assert "only_before = [" in capsys.readouterr().out
    del x, y


@pytest.mark.parametrize(
    "draw, kind",
    [
        (viz.trace_plot, "Active Memory Timeline"),
        (lambda d: viz.trace_plot(d, plot_segments=True), "Active Cached Memory Tim"),
        (lambda d: viz.trace_plot(d, filter_freed=True), "Active Memory Timeline"),
        (viz.segment_plot, "Allocator State History"),
    ],
)
def test_pages_of_the_viewer_hold_the_snapshot(draw, kind, capsys):
    record()
    x, _ = work()
    data = snapshot()
    text = draw(data)
    assert kind in text
    (files,) = re.findall(r"local_files = (\[.*\])", text)
    held = pickle.loads(base64.b64decode(json.loads(files)[0]["base64"]))
    assert held["segments"] == data["segments"]
    assert capsys.readouterr().out == ""  # no free that was never asked for
    del x


def test_what_was_freed_can_be_filtered_out():
    record()
    x, _ = work()
    left = viz.filter_alloc_free_pairs(snapshot())["device_traces"][1]
    assert [e["size"] for e in left if e["action"] == "alloc"] == [4000]
    assert not [e for e in left if e["action"].startswith("free")]
    del x


def test_the_viewer_reads_a_snapshot_of_every_moment_of_a_training():
    record()
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8)).to(1)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(3):
        loss = net(torch.ones(16, 64, device=1)).square().mean()
        loss.backward()
        optimizer.step()
        data = snapshot()
        assert "total_allocated" in viz.segsum(data)  # it asserts that sizes add up
        assert "Device 1 ---" in viz.trace(data)
        lines = viz.memory(data, plain).splitlines()
        counted = sum(int(text.rsplit(" ", 1)[1]) for text in lines)
        assert counted == sum(s["total_size"] for s in data["segments"])


def test_all_is_as_before_after_the_simulator_stops():
    simgpu.stop()
    names = ("_cuda_memorySnapshot", "_cuda_record_memory_history")
    before = [getattr(torch._C, name, None) for name in names]
    simgpu.start(2, memory="64MB")
    record()
    torch.zeros(1, device=1)
    simgpu.stop()
    assert [getattr(torch._C, name, None) for name in names] == before
    simgpu.start(2, memory="64MB")
    torch.zeros(1, device=1)
    assert events() == []  # a new machine records nothing
