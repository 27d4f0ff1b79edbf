"""Snapshots of simulated memory: in PyTorch's format, for PyTorch's own viewer."""

import base64
import json
import pickle
import pickletools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz as viz

import simgpu
from simgpu._device.cards import MIB

HERE = Path(__file__)
record = torch.cuda.memory._record_memory_history
snapshot = torch.cuda.memory._snapshot


pytestmark = pytest.mark.simulated_gpus(2, memory="64MB")


def line() -> int:
    """The number of the line that asks."""
    return sys._getframe(1).f_lineno


def work() -> tuple[torch.Tensor, dict[str, int]]:
    """Some memory that lives, some that died, and the lines where it was asked for."""
    at = {"small": line() + 1}
    small = torch.zeros(1000, device=1)
    at["large"] = line() + 1
    large = torch.zeros(3 * MIB, device=1)
    at["del"] = line() + 1
    del large
    return small, at


@pytest.fixture
def at() -> Iterator[dict[str, int]]:
    """The lines of `work`, which has been recorded; its memory lives."""
    record()
    _living, lines = work()
    yield lines


def events() -> list[dict]:
    return snapshot()["device_traces"][1]


def frames_in(data: dict) -> list[dict]:
    """Every frame of a snapshot."""
    parts = [*data["segments"], *(e for t in data["device_traces"] for e in t)]
    parts += [block for segment in data["segments"] for block in segment["blocks"]]
    return [frame for part in parts for frame in part["frames"]]


def training() -> Iterator[None]:
    """Stop after each step of a training on cuda:1."""
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(1)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(3):
        net(torch.ones(16, 64, device=1)).square().mean().backward()
        optimizer.step()
        yield
        optimizer.zero_grad()


def test_a_snapshot_has_the_documented_form(at):
    data = snapshot()
    assert {"segments", "device_traces", "allocator_settings"} <= set(data)
    assert len(data["device_traces"]) == 2 and data["device_traces"][0] == []
    small, large = data["segments"]
    assert [frame["line"] for frame in small.pop("frames")][0] == at["small"]
    assert [frame["line"] for frame in large.pop("frames")][0] == at["large"]
    used, rest = small.pop("blocks")
    (free,) = large.pop("blocks")
    address = small.pop("address")
    common = {"device": 1, "stream": 0, "segment_pool_id": (0, 0),
              "is_expandable": False}  # fmt: skip
    assert small == common | {
        "segment_type": "small", "total_size": 2 * MIB, "allocated_size": 4096,
        "active_size": 4096, "requested_size": 4000,
    }  # fmt: skip
    assert large == common | {
        "segment_type": "large", "total_size": 12 * MIB, "allocated_size": 0,
        "active_size": 0, "requested_size": 0, "address": free["address"],
    }  # fmt: skip
    for block, *expected in (
        (used, address, 4096, 4000, "active_allocated"),
        (rest, address + 4096, 2 * MIB - 4096, 0, "inactive"),
        (free, free["address"], 12 * MIB, 0, "inactive"),
    ):
        names = ("address", "size", "requested_size", "state")
        assert [block[name] for name in names] == expected
    assert torch.cuda.memory_snapshot() == snapshot()["segments"]
    assert data["allocator_settings"]["expandable_segments"] is False


def test_events_say_what_happened_and_where(at):
    torch.cuda.empty_cache()
    trace = events()
    small, large, freed = at["small"], at["large"], at["del"]
    assert [(e["action"], e["size"], e["frames"][0]["line"]) for e in trace[:6]] == [
        ("segment_alloc", 2 * MIB, small), ("alloc", 4000, small),
        ("segment_alloc", 12 * MIB, large), ("alloc", 12 * MIB, large),
        ("free_requested", 12 * MIB, freed), ("free_completed", 12 * MIB, freed),
    ]  # fmt: skip
    (last,) = trace[6:]
    assert (last["action"], last["size"]) == ("segment_free", 12 * MIB)
    assert last["frames"][0]["name"] == "empty_cache"  # PyTorch's own
    for event in trace[:6]:
        assert event["frames"][0]["filename"] == str(HERE)
        assert event["frames"][0]["name"] == "work"
        assert {"stream", "time_us"} <= set(event)
    assert trace[1]["addr"] == trace[0]["addr"]
    times = [event["time_us"] for event in trace]
    assert times == sorted(times)


def test_no_line_of_the_simulator_is_shown():
    record()
    for _ in training():
        data = snapshot()
    frames = frames_in(data)
    files = {frame["filename"] for frame in frames}
    ours = str(Path(simgpu.__file__).parent)
    assert not any(file.startswith(ours) for file in files)
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


def test_an_error_is_recorded_with_what_was_free(at):
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(32 * MIB, device=1)
    (event,) = [event for event in events() if event["action"] == "oom"]
    assert event["size"] == 128 * MIB and event["device_free"] == 62 * MIB
    assert "addr" not in event
    assert event["frames"][0]["filename"] == str(HERE)


def test_a_block_that_waits_for_a_stream_is_neither_used_nor_free():
    record()
    x = torch.zeros(MIB, device=1)
    side = torch.cuda.Stream(1)
    with torch.cuda.stream(side):
        y = torch.ones(6 * MIB, device=1)  # it is busy for long
    x.record_stream(side)
    del x
    waiting, free = next(
        segment["blocks"] for segment in snapshot()["segments"] if not segment["stream"]
    )
    assert (waiting["size"], free["state"]) == (4 * MIB, "inactive")
    assert waiting["state"] == "active_pending_free"
    assert [e["action"] for e in events() if e["size"] == 4 * MIB] == [
        "alloc", "free_requested",
    ]  # fmt: skip
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


def test_the_newest_events_are_kept_until_the_history_is_cleared():
    record(max_entries=5)
    for size in range(1, 101):
        torch.zeros(size, device=1)
    assert [event["size"] for event in events()][3:] == [400, 400]
    record(max_entries=3)
    assert [event["size"] for event in events()] == [400, 400, 0]  # a snapshot
    record(clear_history=True)
    assert events() == []


@pytest.mark.parametrize(
    "context, on_blocks, on_allocs, on_frees",
    [(None, None, None, None), ("state", "small", None, None),
     ("alloc", "small", "large", "large"), ("all", "small", "large", "del")],
)  # fmt: skip
def test_the_context_says_which_lines_are_kept(context, on_blocks, on_allocs, on_frees):
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


@pytest.mark.parametrize("option", ["enabled", "context", "stacks"])
def test_wrong_options_are_refused(option):
    with pytest.raises(RuntimeError, match="expected "):
        record(**{option: "some"})


def test_a_snapshot_is_itself_an_event(at):
    assert [event["action"] for event in events()].count("snapshot") == 0
    (event,) = [event for event in events() if event["action"] == "snapshot"]
    assert event["size"] == 4096


# -- PyTorch's own viewer --------------------------------------------------------------


def plain(text: str) -> str:
    """In place of the Perl script that would draw the flame graph."""
    return text


def test_a_dump_is_a_pickle_that_needs_nothing_but_python(at, tmp_path):
    file = tmp_path / "dump.pickle"
    torch.cuda.memory._dump_snapshot(str(file))
    dump = file.read_bytes()
    assert pickle.loads(dump)["segments"] == snapshot()["segments"]
    steps = [step.name for step, _, _ in pickletools.genops(dump)]
    assert not [name for name in steps if "GLOBAL" in name]  # of no class or function


def test_flame_graphs_name_the_lines_that_hold_memory(at):
    data = snapshot()
    wanted = f"{HERE.name}:{at['small']}:work 4000\n"
    for text in (viz.memory(data, plain), viz.segments(data, plain)):
        (held,) = [part for part in text.splitlines(True) if part.endswith(wanted)]
        assert held.startswith("stream_0;") and ";active_allocated;" in held
    address = data["segments"][0]["address"]
    assert f"stream_0;seg_{address};active_allocated;" in viz.segments(data, plain)
    assert viz.memory(data, plain).count("<gaps> 96\n") == 1  # 4096 - 4000


@pytest.mark.parametrize(
    "draw, options, kind",
    [
        (viz.trace_plot, {}, "Active Memory Timeline"),
        (viz.trace_plot, {"plot_segments": True}, "Active Cached Memory Timeline"),
        (viz.trace_plot, {"filter_freed": True}, "Active Memory Timeline"),
        (viz.segment_plot, {}, "Allocator State History"),
    ],
)
def test_pages_of_the_viewer_hold_the_snapshot(at, draw, options, kind, capsys):
    data = snapshot()
    text = draw(data, **options)
    assert kind in text
    (files,) = re.findall(r"local_files = (\[.*\])", text)
    held = pickle.loads(base64.b64decode(json.loads(files)[0]["base64"]))
    assert held["segments"] == data["segments"]
    assert capsys.readouterr().out == ""  # no free that was never asked for


def test_the_viewer_reads_a_snapshot_of_every_moment_of_a_training():
    record()
    for _ in training():
        data = snapshot()
        assert "total_allocated" in viz.segsum(data)  # it asserts that sizes add up
        assert "Device 1 ---" in viz.trace(data)
        lines = viz.memory(data, plain).splitlines()
        counted = sum(int(text.rsplit(" ", 1)[1]) for text in lines)
        assert counted == sum(s["total_size"] for s in data["segments"])
