"""need_gpus chooses, count_copies counts, pictures escape what they are told."""

import types

import pytest
import torch

import simgpu
from helpers import (
    count_copies,
    draw,
    gpu_seconds,
    gpus,
    host_seconds,
    need_gpus,
    timeline,
)


@pytest.fixture(autouse=True)
def stopped(monkeypatch):
    monkeypatch.setenv("HELPERS_GPUS", "simulated")
    monkeypatch.setenv("SIMGPU", "on")
    yield
    simgpu.stop()


def test_need_gpus_says_in_one_line_what_there_is(capsys):
    need_gpus(2, card="t4", memory="512MB")
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert out.startswith("2 simulated GPUs (T4, 512.00 MiB each)")
    assert torch.cuda.device_count() == 2
    need_gpus(1)
    assert capsys.readouterr().out.startswith("1 simulated GPU (A100")


def test_asking_again_changes_the_gpus_and_keeps_the_tensors():
    need_gpus(4)
    x = torch.arange(3.0, device="cuda:3")
    need_gpus(4)
    assert x.device.index == 3
    need_gpus(2)
    assert torch.cuda.device_count() == 2
    assert x.device.type == "cpu" and x.tolist() == [0.0, 1.0, 2.0]


def test_the_clock_of_the_host_counts_what_keeps_it_busy():
    need_gpus(1)
    begin = host_seconds()
    simgpu.host_busy(0.25)
    assert host_seconds() == pytest.approx(begin + 0.25)


def test_real_gpus_are_demanded_in_vain(monkeypatch):
    monkeypatch.setenv("HELPERS_GPUS", "real")
    have = torch.cuda.device_count()
    with pytest.raises(RuntimeError, match=f"has {have} of {have + 1} GPUs"):
        need_gpus(have + 1)
    assert simgpu.count() == 0


def test_real_gpus_are_taken_where_there_are_enough(monkeypatch, capsys):
    monkeypatch.setenv("HELPERS_GPUS", "real")
    shares = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "NVIDIA X")
    properties = types.SimpleNamespace(total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, index: shares.append((index, share)),
    )
    need_gpus(2, memory="512MB")
    assert "2 real GPUs: 2 x NVIDIA X, capped at 512MB" in capsys.readouterr().out
    assert shares == [(0, 0.5), (1, 0.5)]
    need_gpus(1)
    assert "1 real GPU: 1 x NVIDIA X. Memory" in capsys.readouterr().out
    assert shares[2:] == [(0, 1.0)]
    with pytest.raises(ValueError, match="does not have 2GB"):
        need_gpus(1, memory="2GB")
    assert simgpu.count() == 0


def test_gpus_are_simulated_beside_real_ones_and_a_line_tells_of_these(
    monkeypatch, capsys
):
    monkeypatch.delenv("HELPERS_GPUS")
    monkeypatch.setattr(simgpu, "real_gpus", lambda: 2)
    need_gpus(2)
    simulated, told = capsys.readouterr().out.splitlines()
    assert simulated.startswith("2 simulated GPUs (A100")
    assert told == "HELPERS_GPUS=real takes this machine's own: 2 real."
    need_gpus(3)
    assert capsys.readouterr().out.count("\n") == 1


def test_a_timeline_of_real_gpus_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setenv("SIMGPU", "off")
    with pytest.raises(RuntimeError, match="first; SIMGPU=off asks for none"):
        simgpu.timeline()


def test_real_gpus_end_the_simulated_ones(monkeypatch):
    need_gpus(2)
    monkeypatch.setenv("HELPERS_GPUS", "real")
    with pytest.raises(RuntimeError, match="of 64 GPUs"):
        need_gpus(64)
    assert simgpu.count() == 0


def test_a_bad_request_leaves_the_running_gpus_alone():
    need_gpus(2, card="T4", memory="512MB")
    x = torch.ones(1, device="cuda:1")
    with pytest.raises(ValueError):
        need_gpus(2, card="RTX")
    need_gpus(2, card="t4", memory=512 * 2**20)  # the same, otherwise written
    assert x.device.index == 1


def test_copies_need_gpus():
    with pytest.raises(RuntimeError, match="call need_gpus first"):
        with count_copies():
            pass


def test_bad_requests_are_refused(monkeypatch):
    for number in (0, -1, 1000, 2.5):
        with pytest.raises(ValueError):
            need_gpus(number)
    with pytest.raises(ValueError, match="unknown card"):
        need_gpus(1, card="RTX")
    with pytest.raises(ValueError, match="512MB"):
        need_gpus(1, memory="plenty")
    monkeypatch.setenv("HELPERS_GPUS", "maybe")
    with pytest.raises(ValueError, match="use simulated or real"):
        need_gpus(1)


def test_copies_are_counted_with_their_bytes():
    need_gpus(2)
    x = torch.ones(10, device="cuda:0")
    with count_copies() as copies:
        x.to("cuda:1").cpu()
        x.sum().item()
    assert [tuple(copy) for copy in copies] == [
        ("cuda:0", "cuda:1", 40),
        ("cuda:1", "cpu", 40),
        ("cuda:0", "cpu", 4),
    ]
    assert copies.nbytes == 84
    assert "3 copies, 84 bytes" in repr(copies)
    assert "1 x cuda:0 to cuda:1" in repr(copies)


def test_copies_are_read_from_a_profiler_trace():
    def event(name, nbytes, device=1):
        about = {"bytes": nbytes, "device": device}
        return {"cat": "gpu_memcpy", "name": name, "args": about}

    trace = {
        "traceEvents": [
            event("Memcpy HtoD (Pageable -> Device)", 40),
            {"cat": "kernel", "name": "gemm", "args": {}},
            {"name": "process_name"},
            event("Memcpy DtoH (Device -> Pageable)", 4),
            event("Memcpy PtoP (Device -> Device)", 8),
            event("Memcpy DtoD (Device -> Device)", 99),
        ]
    }
    assert gpus.copies_in_trace(trace) == [
        gpus.Copy("cpu", "cuda:1", 40),
        gpus.Copy("cuda:1", "cpu", 4),
        gpus.Copy("cuda", "cuda:1", 8),
    ]


def test_gpu_seconds_counts_the_program_alone():
    need_gpus(2)
    x = torch.ones(256, 256, device="cuda:0")
    once = gpu_seconds(lambda: x @ x)
    assert gpu_seconds(lambda: x @ x) == once > 0
    assert len(timeline().events) == 1


def test_phases_of_a_timeline_are_named():
    need_gpus(1)
    x = torch.ones(2048, 2048)
    gpu_seconds(lambda: (x.cuda(), x.cuda() @ x.cuda()))
    picture = timeline({"two copies": 2, "one": 1})._repr_svg_()
    assert ">two copies</text>" in picture
    assert picture.count(">host</text>") == 1
    assert "two copies" not in timeline()._repr_svg_()


def test_a_picture_escapes_what_it_is_told():
    picture = draw.Picture(10, 10, "a < b")
    picture.text(0, 0, "<script>")
    assert "<script>" not in picture._repr_svg_()
    assert "<title>a &lt; b</title>" in picture._repr_svg_()
