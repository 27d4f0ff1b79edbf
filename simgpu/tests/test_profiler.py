"""PyTorch's profiler: device times are the simulated clock's, and nothing is noisy."""

import json

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

import simgpu
from simgpu import _runtime as runtime

BOTH = [ProfilerActivity.CPU, ProfilerActivity.CUDA]


pytestmark = pytest.mark.simulated_gpus(1)


@pytest.fixture(autouse=True)
def output(capfd):
    """Nothing on stderr: neither C++ frames nor an error for each operation.

    PyTorch's own words aside: of its tracing, and in a build for CUDA of the driver.
    """
    yield
    lines = filter(None, capfd.readouterr().err.splitlines())
    own = ("USDT:", "gpuGetDeviceCount failed", "Memory block of unknown size")
    assert not [line for line in lines if not any(word in line for word in own)]


def step(layer, x):
    with record_function("step"):
        layer(x.cuda()).relu().sum().backward()


@pytest.fixture
def profiled():
    layer, x = nn.Linear(64, 64, device="cuda"), torch.ones(32, 64)
    with simgpu.timeline().recording() as log, profile(activities=BOTH) as found:
        step(layer, x)
    return found, log


def test_device_times_are_those_of_the_simulated_clock(profiled):
    found, log = profiled
    averages = {(row.key, row.device_type): row for row in found.key_averages()}
    total = sum(event.end - event.start for event in log) * 1e6
    on_gpu = [r for (_, kind), r in averages.items() if kind == DeviceType.CUDA]
    kernels = [row for row in on_gpu if not row.is_user_annotation]
    assert sum(r.self_device_time_total for r in kernels) == pytest.approx(total)
    addmm = sum(e.end - e.start for e in log if e.name == "addmm") * 1e6
    operation = averages["aten::addmm", DeviceType.CPU]
    assert operation.self_device_time_total == pytest.approx(addmm)
    assert averages["aten::linear", DeviceType.CPU].self_device_time_total == 0
    assert averages["step", DeviceType.CPU].device_time_total == pytest.approx(total)


def test_each_operation_counts_once_and_our_mode_is_not_in_the_table(profiled):
    found, _ = profiled
    counts = {row.key: row.count for row in found.key_averages()}
    assert counts["aten::addmm"] == 1 and counts["Memcpy HtoD"] == 1
    assert "PythonDispatchMode" not in counts


def test_a_table_says_that_device_times_are_simulated(profiled):
    found, _ = profiled
    for column in ("cuda_time_total", "self_device_time_total", "cpu_time_total"):
        text = found.key_averages().table(sort_by=column)
        assert "Self CUDA time total" in text and "simulated" in text


def exported(found, folder) -> dict:
    found.export_chrome_trace(str(folder / "trace.json"))
    return json.loads((folder / "trace.json").read_text(encoding="utf-8"))


def test_a_trace_shows_the_gpu(profiled, tmp_path):
    found, log = profiled
    trace = exported(found, tmp_path)
    kinds = [row.get("cat") for row in trace["traceEvents"]]
    copies = sum(event.kind == "copy" for event in log)
    assert kinds.count("gpu_memcpy") == copies == 1
    assert kinds.count("kernel") == len(log) - copies
    assert "cuda:0 (simulated time)" in json.dumps(trace)


@pytest.fixture
def trace(profiled, tmp_path):
    return exported(profiled[0], tmp_path)


def of_kind(trace, *kinds):
    return [row for row in trace["traceEvents"] if row.get("cat") in kinds]


def test_a_trace_says_which_call_launched_what(trace):
    """What readers of traces join: by correlation, and by arrows."""
    on_gpu = {
        r["args"]["correlation"]: r for r in of_kind(trace, "kernel", "gpu_memcpy")
    }
    calls = {r["args"]["correlation"]: r for r in of_kind(trace, "cuda_runtime")}
    assert len(on_gpu) == len(of_kind(trace, "kernel", "gpu_memcpy")) > 0
    assert on_gpu.keys() == calls.keys()
    operations = {r["args"]["External id"]: r for r in of_kind(trace, "cpu_op")}
    for number, row in on_gpu.items():
        copies = row["cat"] == "gpu_memcpy"
        name = "cudaMemcpyAsync" if copies else "cudaLaunchKernel"
        assert calls[number]["name"] == name
        outer = operations[row["args"]["External id"]]
        assert calls[number]["args"]["External id"] == row["args"]["External id"]
        assert outer["ts"] <= calls[number]["ts"] <= outer["ts"] + outer["dur"]
        assert (row["pid"], row["tid"]) == (
            row["args"]["device"],
            row["args"]["stream"],
        )
    arrows = of_kind(trace, "ac2g")
    for end, rows in (("s", calls), ("f", on_gpu)):
        found = {
            r["id"]: (r["pid"], r["tid"], r["ts"]) for r in arrows if r["ph"] == end
        }
        assert found == {n: (r["pid"], r["tid"], r["ts"]) for n, r in rows.items()}
    assert [card["id"] for card in trace["deviceProperties"]] == [0]


def test_a_range_has_one_on_the_gpu_without_its_backward(trace):
    """The engine runs it in a thread of its own, where no range is open."""
    (found,) = of_kind(trace, "gpu_user_annotation")
    work = of_kind(trace, "kernel", "gpu_memcpy")
    names = [row["name"] for row in work]
    forward = work[: names.index("ones_like") + 1]
    assert names.index("ones_like") + 1 < len(names)
    assert found["name"] == "step" and found["ts"] == forward[0]["ts"]
    end = forward[-1]["ts"] + forward[-1]["dur"]
    assert found["ts"] + found["dur"] == pytest.approx(end, abs=1e-3)


def test_a_profile_of_the_gpus_alone_has_no_rows_of_the_host(tmp_path):
    x = torch.ones(3, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as found, record_function("mine"):
        x + 1
    assert [row.key for row in found.key_averages()] == ["add"]
    trace = exported(found, tmp_path)
    assert of_kind(trace, "cpu_op") == [] != of_kind(trace, "kernel", "cuda_runtime")


def test_a_schedule_writes_a_trace_of_each_cycle(tmp_path):
    layer, x = nn.Linear(8, 8, device="cuda"), torch.ones(4, 8)
    handler = torch.profiler.tensorboard_trace_handler(str(tmp_path))
    plan = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    with profile(activities=BOTH, schedule=plan, on_trace_ready=handler) as found:
        for _ in range(5):
            step(layer, x)
            found.step()
    (path,) = tmp_path.iterdir()
    assert "gpu_memcpy" in path.read_text(encoding="utf-8")
    assert {r.key: r.count for r in found.key_averages()}["Memcpy HtoD"] == 2


@pytest.mark.filterwarnings("ignore:.*use_cuda.*:FutureWarning")
@pytest.mark.parametrize("how", [{"use_cuda": True}, {"use_device": "cuda"}], ids=str)
def test_the_older_profiler_has_device_times(how):
    if "use_cuda" in how and torch.__version__ >= "2.14":
        pytest.skip("until torch 2.13")
    x = torch.ones(3, device="cuda")
    with torch.autograd.profiler.profile(**how) as found:
        x + 1
    row = {r.key: r for r in found.key_averages()}["aten::add"]
    assert row.device_time_total > 0
    assert "simulated" in found.table()


def test_a_profile_of_the_host_says_nothing_of_a_gpu():
    with profile(activities=[ProfilerActivity.CPU]) as found:
        torch.ones(3, device="cuda") + 1
    assert "CUDA" not in found.key_averages().table()


def test_ranges_and_cuda_profiler_go_nowhere():
    x = torch.ones(3, device="cuda")
    with torch.cuda.profiler.profile(), torch.autograd.profiler.emit_nvtx():
        x + 1
    assert ProfilerActivity.CUDA in torch.profiler.supported_activities()
    simgpu.stop()
    assert ProfilerActivity.CUDA not in torch.profiler.supported_activities()


def test_memory_is_that_of_the_device_on_which_a_tensor_is():
    """In blocks of the allocator, of 512 bytes; and the host's where that has it."""
    x = torch.ones(3, device="cuda")
    torch.softmax(x, 0)
    with profile(activities=BOTH, profile_memory=True) as found:
        y = x * 2
        z = torch.zeros(1000)
        w = z.cuda()
        del x, y
    rows = {row.key: row for row in found.key_averages()}
    device = {key: row.self_device_memory_usage for key, row in rows.items()}
    assert device["aten::mul"] == 512 and device["aten::_to_copy"] == 0
    assert rows["aten::_to_copy"].device_memory_usage == 4096
    assert rows["aten::zeros"].cpu_memory_usage == 4000
    assert device["[memory]"] == -1024 and w.is_cuda
    assert "CUDA Mem" in found.key_averages().table()
    with pytest.raises(simgpu.NotSimulated, match="export_memory_timeline"):
        found.export_memory_timeline("timeline.json", device="cuda:0")
    assert "malloc" not in vars(runtime.current().gpus[0].memory)
    assert runtime.current().clock.recordings == []  # they end with their profile
