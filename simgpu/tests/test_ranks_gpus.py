"""Ranks on simulated GPUs: as under torchrun, on one clock, and with errors in time."""

import contextlib
import json
import os
import signal
import sys
import time
import types
from xml.etree import ElementTree

import cloudpickle
import psutil
import pytest
from test_ranks import AFRESH, FORKS, LINUX, error_of, interrupted, rank

import simgpu
from simgpu import _ranks as module
from simgpu._ranks import Ranks, fork_server, worker
from simgpu._ranks import which_gpus as gpus_module
from simgpu._timing.job import JobTimeline
from support.limits import JOB

# Functions of this file are sent like those of a notebook: no rank imports pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", autouse=True)
def at_the_end():
    yield
    module.close()


@pytest.fixture
def four():
    """Four ranks, which work afterwards, whatever a test has done to them."""
    with Ranks(4, memory="1GB", timeout=JOB) as ranks:
        yield ranks
        assert ranks.run(all_sum) == [6.0] * 4


def on_own_gpu() -> None:
    import torch

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def all_sum(value=None) -> float:
    import torch
    import torch.distributed as dist

    on_own_gpu()
    x = torch.tensor([float(rank() if value is None else value)], device="cuda")
    dist.all_reduce(x)
    return x.item()


# -- what they are ---------------------------------------------------------------------


def test_opening_them_says_what_is_simulated(capsys):
    with Ranks(1, card="t4", memory="512MB") as ranks:
        assert repr(ranks) == "Ranks(1, simulated GPUs, nccl)"
        assert (ranks.backend, ranks.simulated) == ("nccl", True)
    Ranks(2, nodes=2, network="100 Gbit/s").close()
    with Ranks(1, device="cpu") as ranks:
        assert (ranks.backend, ranks.simulated) == ("gloo", False)
    assert capsys.readouterr().out.splitlines() == [
        "1 rank: processes on simulated GPUs (T4, 512.00 MiB each), backend nccl.",
        "2 ranks: processes on simulated GPUs (A100, 79.25 GiB each) on 2 nodes, "
        "backend nccl.",
        "1 real rank: processes on the CPU, backend gloo.",
    ]


NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")


@pytest.mark.parametrize(
    "nodes, layout", [(1, ["00440", "11440", "22440", "33440"]),
                      (2, ["00420", "11420", "20421", "31421"])]
)  # fmt: skip
def test_each_rank_has_the_gpus_of_its_node_and_the_environment_of_torchrun(
    nodes, layout, monkeypatch
):
    def look():
        import torch

        found = "".join(os.environ[name] for name in NAMES)
        return found, torch.cuda.device_count(), os.environ["MASTER_ADDR"]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hides the machine's own
    with Ranks(4, nodes=nodes) as ranks:
        assert ranks.run(look) == [(found, 4 // nodes, "127.0.0.1") for found in layout]
        assert ranks.run(all_sum) == [6.0] * 4


def test_a_literal_program_makes_the_process_group_by_itself(four, capsys):
    for turn in range(2):
        four.cell(
            "import os\n"
            "dist.destroy_process_group()\n"
            "dist.init_process_group('nccl')\n"
            "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
            "x = torch.ones(2, device='cuda') * rank\n"
            "dist.all_reduce(x)\n"
            f"if rank == 3: print({turn}, dist.get_backend(), x)"
        )
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "[3] 1 nccl tensor([6., 6.], device='cuda:3')"


def test_the_device_of_a_rank_is_for_the_learner_to_set(four):
    told = error_of(four.cell, "dist.all_reduce(torch.ones(1, device='cuda'))")
    assert "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 0" in told
    assert "this cell, line 1: dist.all_reduce" in told and told.endswith(AFRESH)
    assert four.run(all_sum) == [6.0] * 4


def test_work_of_one_cell_may_be_waited_for_in_the_next(four, capsys):
    four.run(on_own_gpu)
    four.cell("x = torch.ones(1, device='cuda')\nwork = dist.all_reduce(x, async_op=1)")
    four.cell("_ = work.wait()\nx")
    assert "[0] tensor([4.], device='cuda:0')" in capsys.readouterr().out


@pytest.mark.parametrize(
    "request_, words",
    [
        ({"device": "tpu"}, "use cuda or cpu"),
        ({"card": "RTX"}, "unknown card 'RTX'"),
        ({"card": "T4", "memory": "20GB"}, "a T4 does not have 20GB of memory"),
        ({"nodes": 3}, "4 ranks cannot be shared equally by 3 nodes"),
        ({"nodes": 0}, "number of nodes is a whole number"),
        ({"nodes": 2, "network": "fast"}, "cannot read 'fast' as a bandwidth"),
    ],
)
def test_impossible_gpus_are_refused_before_anything_starts(request_, words):
    with pytest.raises(ValueError, match=words):
        Ranks(4, **request_)
    assert module.current() is None


def test_real_gpus_are_taken_only_where_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(gpus_module, "_real_gpus", lambda: 2)
    asked = (2, "cuda", "A100", None)
    monkeypatch.delenv("SIMGPU", raising=False)
    assert gpus_module.choose(*asked, 1, None).simulated
    monkeypatch.setenv("SIMGPU", "off")
    assert not gpus_module.choose(*asked, 1, None).simulated
    # the machine's cards may be others than the T4 that would be simulated
    own = gpus_module.choose(2, "cuda", "T4", "20GB", 1, None)
    assert str(own) == "real GPUs, capped at 20GB each"
    with pytest.raises(RuntimeError, match="2 of 3 GPUs"):
        gpus_module.choose(3, *asked[1:], 1, None)
    with pytest.raises(RuntimeError, match="not so many nodes"):
        gpus_module.choose(*asked, 2, None)


@LINUX
@pytest.mark.parametrize(
    "file, real", [("null", 0), ("nvidiactl", 0), ("nvidia0", 2), ("dxg", 2)]
)
def test_pytorch_counts_real_gpus_only_where_linux_has_a_file_of_one(
    file, real, monkeypatch, tmp_path
):
    (tmp_path / file).touch()  # dxg is that of a Linux in Windows
    monkeypatch.setattr(gpus_module, "_FILES", tmp_path)
    monkeypatch.setattr(simgpu, "real_gpus", lambda: 2, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_module._real_gpus() == real
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus_module._real_gpus() == 0


def test_a_rank_caps_the_memory_of_its_own_real_gpu(monkeypatch):
    """With stand-ins for the GPU and for NCCL."""
    import torch
    import torch.distributed as dist

    shares, groups = [], []
    gpu = types.SimpleNamespace(total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *cap: shares.append(cap)
    )
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: groups.append(a))
    monkeypatch.setenv("LOCAL_RANK", "3")
    settings = types.SimpleNamespace(
        threads=torch.get_num_threads(),
        timeout=9,  # no limit: nothing waits
        gpus=gpus_module.Gpus(False, memory="256MB"),
    )
    worker._init_on_gpus(settings)
    assert shares == [(0.25, 3)] and groups == [("nccl",)]
    settings.gpus = gpus_module.Gpus(False)
    worker._init_on_gpus(settings)
    assert len(shares) == 1 and len(groups) == 2


def test_real_ranks_are_started_afresh_after_any_failure():
    ranks = Ranks.__new__(Ranks)  # NCCL needs GPUs, the decision does not
    ranks.backend, ranks.simulated = "nccl", False
    assert ranks._can_go_on_after("")
    assert not ranks._can_go_on_after("rank 1: ValueError: bad batch")
    assert not ranks._can_go_on_after_interrupt()
    ranks.backend = "gloo"
    assert ranks._can_go_on_after("rank 1: ValueError: bad batch")
    assert ranks._can_go_on_after_interrupt()


# -- failures --------------------------------------------------------------------------


def test_a_rank_that_has_finished_is_named_by_those_that_wait_for_it(four):
    told = error_of(four.run, lambda: 0.0 if rank() == 0 else all_sum())
    assert told.startswith("ranks 1, 2, 3: torch.distributed.DistBackendError: ")
    assert "waits for rank 0, which has come to the end of its function" in told
    assert "in all_sum: dist.all_reduce(x)" in told and told.endswith(AFRESH)


def fail():
    raise ValueError("bad batch")


@pytest.mark.parametrize(
    "how, words",
    [
        (fail, ["ranks 0, 2, 3: torch.distributed.DistBackendError: all_reduce of 1 ",
                "waits for rank 1, which has raised ValueError.",
                "rank 1: ValueError: bad batch\n"]),
        (lambda: os.kill(os.getpid(), signal.SIGKILL),
         ["rank 1: the process was killed by SIGKILL",
          "waits for rank 1, which has ended."]),
    ],
    ids=["raises", "dies"],
)  # fmt: skip
def test_a_rank_that_fails_is_named_by_those_that_wait_for_it(four, how, words):
    four.run(all_sum)  # so that they are connected
    told = error_of(four.run, lambda: how() if rank() == 1 else all_sum())
    assert told.endswith(AFRESH) and [w for w in words if w not in told] == [], told


def test_a_rank_that_comes_late_to_a_cell_is_waited_for(four):
    def program():
        if rank() == 0:
            time.sleep(1.5)  # more than the time after which the others look
        return all_sum()

    for _ in range(2):
        assert four.run(program) == [6.0] * 4


def test_an_error_outside_collectives_keeps_the_ranks(four):
    four.cell("kept = 7")
    four.run(all_sum)
    told = error_of(four.cell, "if rank == 2:\n    1 / 0")
    assert told == (
        "rank 2: ZeroDivisionError: division by zero\n  this cell, line 2: 1 / 0"
    )
    four.cell("assert kept == 7")


def test_a_collective_that_only_one_rank_has_launched_ends_the_ranks(four):
    def program():
        import torch
        import torch.distributed as dist

        all_sum()
        if rank() == 0:  # nobody needs its value
            dist.all_reduce(torch.ones(9, device="cuda"), async_op=True)
        raise ValueError("after it")

    assert error_of(four.run, program).endswith(AFRESH)


def test_a_rank_without_memory_says_where(four):
    told = error_of(
        four.cell,
        "import os\n"
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        "x = torch.ones(2**29 if rank == 1 else 1, device='cuda')\n",
    )
    assert "rank 1: torch.OutOfMemoryError: CUDA out of memory. Tried to" in told
    assert "this cell, line 3: x = torch.ones(" in told


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_an_interrupt_in_a_collective_starts_the_ranks_afresh(four, capsys, tmp_path):
    def program():
        return time.sleep(10_000) if rank() == 0 else all_sum()

    interrupted(four, tmp_path, program)
    assert AFRESH in capsys.readouterr().out


# -- timeline and memory ---------------------------------------------------------------


def step() -> None:
    """One all-reduce beside computing; rank r computes r + 1 times as much."""
    import torch
    import torch.distributed as dist

    import simgpu

    all_sum()
    simgpu.timeline().clear()
    x = torch.ones(1 << 20, device="cuda")
    for _ in range(8 * (rank() + 1)):
        x = x * 2
    work = dist.all_reduce(torch.ones(1 << 20, device="cuda"), async_op=True)
    x = x * 2
    work.wait()
    torch.cuda.synchronize()


def test_a_timeline_has_all_ranks_on_one_axis(four):
    seen = []
    for _ in range(2):
        four.run(step)
        seen.append(four.timeline())
    log, again = seen
    assert isinstance(log, JobTimeline) and log.ranks == [0, 1, 2, 3]
    assert log.logs == again.logs, "the same program takes the same time"
    collectives = []
    for r in range(4):
        titles = [lane.title for lane in log.lanes(r)]
        assert titles == ["stream 0", "NCCL, all ranks"]
        *_, nccl = log.lanes(r).values()
        collectives += nccl
    assert {event.name for event in collectives} == {"all_reduce"}
    assert len({event.end for event in collectives}) == 1
    assert len({event.start + event.waited for event in collectives}) == 1
    waits = [event.waited for event in collectives]
    assert waits == sorted(waits, reverse=True) and waits[3] == 0 < waits[2]
    assert list(log.waited()) == [(0, 3), (1, 3), (2, 3)]


def test_a_timeline_draws_itself_and_exports_a_trace(four, tmp_path):
    four.run(step)
    log = four.timeline()
    picture = log._repr_svg_()
    ElementTree.fromstring(picture)
    assert "Timeline of 4 ranks, simulated time: rank 0 waits" in picture
    assert ">waits for rank 3<" in picture and ">NCCL, all ranks<" in picture
    log.export_chrome_trace(tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [row["args"]["name"] for row in rows if row["name"] == "process_name"]
    assert names == [f"rank {r} cuda:{r} simulated" for r in range(4)]
    assert [row["pid"] for row in rows if row.get("cat") == "collective"] == [
        row["pid"] for row in rows if row["name"] == "process_name"
    ]
    assert sum(row["name"] == "all_reduce waits for rank 3" for row in rows) == 3


def test_memory_has_a_bar_for_each_rank(four):
    four.run(on_own_gpu)
    four.cell("x = torch.ones(2**20 * (rank + 1), device='cuda')\nx = x[:5].clone()")
    rows = four.memory()
    assert [row.device for row in rows] == [f"cuda:{r}" for r in range(4)]
    assert [row.rank for row in rows] == [0, 1, 2, 3]
    assert all(row.allocated < row.peak < row.total == 2**30 for row in rows)
    assert rows[3].peak > rows[0].peak
    picture = rows._repr_svg_()
    ElementTree.fromstring(picture)
    assert f"Memory of 4 ranks (simulated): at most {rows[3].peak / 2**20:.4g} MiB" in (
        picture
    )


def test_ranks_on_the_cpu_have_neither():
    with Ranks(1, device="cpu") as ranks:
        assert "only simulated GPUs have a timeline" in error_of(ranks.timeline)
        assert "these ranks are on the CPU" in error_of(ranks.memory)


# -- starting and ending ---------------------------------------------------------------


def test_they_leave_nothing_behind():
    for i in range(20):
        with Ranks(2) as ranks:
            assert ranks.run(all_sum, i) == [2.0 * i] * 2
            pids = [*ranks._workers.pids.values(), ranks._workers._store_pid]
            folder = ranks._workers.folder
            assert all(map(psutil.pid_exists, pids))
        assert not any(map(psutil.pid_exists, pids)) and not folder.exists()


@LINUX
def test_only_this_machine_can_reach_the_store():
    with Ranks(2) as ranks:
        keeper = psutil.Process(ranks._workers._store_pid)
        bound = {c.laddr.ip for c in keeper.net_connections() if c.status == "LISTEN"}
        assert bound == {"127.0.0.1"}


@FORKS
def test_a_store_whose_process_dies_is_told_and_replaced(four):
    four.run(all_sum)
    os.kill(four._workers._store_pid, signal.SIGKILL)
    assert error_of(four.run, all_sum).endswith(AFRESH)
    assert four.run(all_sum) == [6.0] * 4


def test_spawned_ranks_do_the_same(monkeypatch):
    """As on Windows, where there is no fork."""
    monkeypatch.setattr(fork_server, "CAN_FORK", False)
    with Ranks(2) as ranks:
        pids = [*ranks.run(os.getpid), ranks._workers._store_pid]
        assert ranks.run(all_sum) == [1.0, 1.0]
        assert len(ranks.timeline().ranks) == 2
    assert not any(map(psutil.pid_exists, pids))


def test_an_answer_is_not_taken_for_a_rank_that_is_missing():
    with contextlib.closing(Ranks(1)) as ranks:
        assert ranks.timeline().ranks == [0]
        with pytest.raises(KeyError, match="rank 1 has no log"):
            ranks.timeline().lanes(1)
