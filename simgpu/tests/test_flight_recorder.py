"""NCCL's flight recorder and watchdog: what a job leaves for a post-mortem."""

import contextlib
import json
import os
import pickle
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed.flight_recorder import fr_trace

import simgpu
from support import programs
from support.limits import MOMENT, SHORT
from support.waiting import wait

KEYS = {
    "frames", "record_id", "pg_id", "process_group", "thread_name", "thread_id",
    "collective_seq_id", "p2p_seq_id", "op_id", "profiling_name", "time_created_ns",
    "input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "state",
    "time_discovered_started_ns", "time_discovered_completed_ns", "retired",
    "timeout_ms", "is_p2p",
}  # fmt: skip


@pytest.fixture
def joined(monkeypatch):
    """Makes a process group of one rank, with these variables."""

    def join(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        simgpu.start(1)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()
    simgpu.stop()


def trace(**options) -> dict:
    return pickle.loads(c10d._dump_nccl_trace(**options))


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cuda")


def test_each_collective_is_recorded_under_pytorchs_keys(joined):
    joined()
    dist.all_reduce(ones(2, 3))
    dist.all_gather([ones(4)], ones(4))
    torch.cuda.synchronize()
    found = trace()
    assert found["version"] == "2.10" and found["comm_lib_version"].startswith("2.")
    config = {"name": "0", "desc": "default_pg", "ranks": "[0]"}
    assert found["pg_config"] == {"0": config}
    assert found["pg_status"]["0"] == {
        "last_enqueued_collective": 2, "last_started_collective": -1,
        "last_completed_collective": 2,
    }  # fmt: skip
    first, second = found["entries"]
    assert first.keys() == KEYS  # and no duration: nobody has asked for the time
    assert (first["record_id"], first["collective_seq_id"], first["op_id"]) == (0, 1, 1)
    assert first["process_group"] == ("0", "default_pg")
    assert first["profiling_name"] == "nccl:all_reduce"
    assert first["input_sizes"] == first["output_sizes"] == [[2, 3]]
    assert first["input_dtypes"] == ["Float"] and first["timeout_ms"] == 600_000
    assert first["state"] == "completed" and first["retired"]
    lines = [frame["filename"] for frame in first["frames"]]
    assert lines.index(__file__) == 2 and "simgpu/src" not in lines[0]
    assert second["profiling_name"] == "nccl:all_gather"
    assert second["output_sizes"] == [[1, 4]]


def test_times_are_simulated(joined):
    joined(TORCH_NCCL_ENABLE_TIMING="1")
    x = ones(2**24)
    work = dist.all_reduce(x, async_op=True)
    (entry,) = trace()["entries"]
    assert entry["state"] in ("scheduled", "started")
    work.wait()
    torch.cuda.synchronize()
    (entry,) = trace()["entries"]
    begin, end = (entry[f"time_discovered_{w}_ns"] for w in ("started", "completed"))
    assert entry["state"] == "completed"
    assert entry["duration_ms"] == pytest.approx((end - begin) / 1e6)
    assert entry["time_created_ns"] <= begin <= end


def test_the_buffer_keeps_the_last_and_may_be_off(joined):
    joined(TORCH_FR_BUFFER_SIZE="2", TORCH_NCCL_TRACE_BUFFER_SIZE="100")
    for _ in range(3):
        dist.all_reduce(ones(1))
    torch.cuda.synchronize()
    assert [entry["record_id"] for entry in trace()["entries"]] == [1, 2]
    assert trace(onlyActive=True)["entries"] == []
    assert "entries" not in trace(includeCollectives=False)
    assert "frames" not in trace(includeStackTraces=False)["entries"][0]
    as_json = json.loads(c10d._dump_nccl_trace_json())
    assert as_json["entries"][0]["time_discovered_started_ns"] == 0
    assert as_json["pg_status"]["0"]["last_completed_collective"] == "3"
    c10d._reset_fr_recording_nccl()
    assert trace()["entries"] == []
    assert "entries" not in json.loads(c10d._dump_nccl_trace_json())


def test_nothing_is_recorded_into_an_empty_buffer(joined):
    joined(TORCH_NCCL_TRACE_BUFFER_SIZE="0")
    dist.all_reduce(ones(1))
    assert trace()["entries"] == []


def exchange() -> list[tuple]:
    """Messages of a batch, unequal parts, a functional collective, a barrier."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, x = dist.get_rank(), ones(4)
    ends = [
        dist.P2POp(dist.isend, x, 1 - rank),
        dist.P2POp(dist.irecv, x + 0, 1 - rank),
    ]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    dist.all_gather([ones(4), ones(3)], ones(4 - rank))
    funcol.all_reduce(x, "sum", dist.group.WORLD).sum().item()
    dist.barrier()
    keys = ("profiling_name", "collective_seq_id", "p2p_seq_id", "op_id", "state")
    return [tuple(entry[key] for key in keys) for entry in trace()["entries"]]


def test_messages_batches_and_unequal_parts(simulated_ranks):
    found = simulated_ranks(exchange, 2)
    batch = [
        ("nccl:send 0->1", 0, 1, 1, "scheduled"),
        ("nccl:recv 0<-1", 0, 1, 2, "scheduled"),
        ("nccl:coalesced", 0, 1, 2, "completed"),
    ]
    assert found[0] == [
        *batch,
        ("nccl:send 0->1", 0, 2, 3, "completed"),
        ("nccl:_broadcast_oop", 1, 2, 4, "scheduled"),
        ("nccl:_broadcast_oop", 1, 2, 4, "scheduled"),
        ("nccl:coalesced", 1, 2, 4, "completed"),
        ("nccl:all_reduce", 2, 2, 5, "completed"),
        ("nccl:all_reduce_barrier", 3, 2, 6, "completed"),
    ]
    assert found[1][3] == ("nccl:recv 1<-0", 0, 2, 3, "completed")


def fail(how: str, prefix: str) -> None:
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = prefix
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=MOMENT))
    rank, x = dist.get_rank(), ones(4)
    dist.all_reduce(x)
    if how == "size":
        dist.all_reduce(ones(4 + rank))
    elif how == "type":
        dist.all_reduce(x) if rank else dist.broadcast(x, 0)
    elif how == "late":
        if rank == 1:
            wait(Path(f"{prefix}1").exists, "what it is told of rank 0")
        dist.all_reduce(x)
    elif how == "one by one":
        if rank == 3:
            wait(Path(f"{prefix}3").exists, "what it is told of the others")
        time.sleep(0.3 * rank)  # all wait when the first gives up, and none is told
        dist.all_reduce(x)
    torch.cuda.synchronize()


FAILURES = {
    "size": ["sequence number: 2 has errors", "Error type: SIZE_OR_SYNTAX_MISMATCH"],
    "type": ["sequence number: 2 has errors", "Error type: COLLECTIVE_TYPE_MISMATCH"],
    "late": ["Not all ranks joining collective, sequence number: 2", "ranks: {1}"],
}


@pytest.mark.parametrize("how", FAILURES)
def test_pytorchs_analyser_reads_the_dumps(
    simulated_ranks, tmp_path, capfd, caplog, how
):
    with contextlib.suppress(Exception):
        simulated_ranks(fail, 2, how, str(tmp_path / "trace_"), seconds=SHORT)
    said = capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace_0", "trace_1"]
    with caplog.at_level("INFO"):
        fr_trace.main(["-p", "trace_", str(tmp_path)])
    for line in FAILURES[how]:
        assert line in caplog.text
    late = (
        r"\[rank0\]:\[E\S+ \S+ ProcessGroupNCCL.cpp\] \[Rank 0\] Watchdog caught "
        r"collective operation timeout: WorkNCCL\(SeqNum=2, OpType=ALLREDUCE, NumelIn=4"
        r", NumelOut=4, Timeout\(ms\)=MS\) ran for MS milliseconds "
    )
    late = late.replace("MS", str(round(1000 * MOMENT)))
    assert (re.search(late, said) is not None) == (how == "late")
    status = "PG status: last enqueued work: 2"
    assert (status in said) == (how == "late")
    told = (  # a rank that has not come hears of it, and says how far it is
        r"\[rank1\]:\[E.* Rank 1\] Received a dump signal due to a collective timeout "
        r"from  rank 0 .* Last enqueued NCCL work: 1, last completed NCCL work: 1\."
    )
    assert (re.search(told, said) is not None) == (how == "late")


def test_a_rank_that_waits_says_that_its_own_time_is_over(
    simulated_ranks, tmp_path, capfd
):
    with contextlib.suppress(Exception):
        simulated_ranks(fail, 4, "one by one", str(tmp_path / "trace_"), seconds=SHORT)
    said = capfd.readouterr().err
    late = re.findall(r"\[Rank (\d)\] Watchdog caught", said)
    told = re.findall(r" Rank (\d)\] Received a dump signal", said)
    assert (sorted(late), told) == (["0", "1", "2"], ["3"])


def ask_through_the_pipe(folder: str) -> str:
    os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = f"{folder}/pipe_"
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/trace_"
    dist.init_process_group("nccl")
    dist.all_reduce(ones(4))
    torch.cuda.synchronize()
    with open(f"{folder}/pipe_0.pipe", "w", encoding="utf-8") as pipe:
        pipe.write("1")
    end = time.monotonic() + SHORT
    while time.monotonic() < end:
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            with open(f"{folder}/trace_0", "rb") as file:
                return pickle.load(file)["entries"][0]["state"]
    return "nothing"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no named pipes")
def test_a_dump_on_demand(simulated_ranks, tmp_path):
    assert simulated_ranks(ask_through_the_pipe, 1, str(tmp_path)) == ["completed"]


PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1, device="cuda"))
{}
"""


@pytest.mark.parametrize("destroys", [False, True])
def test_a_group_that_is_not_destroyed_is_told_at_the_end(tmp_path, destroys):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format("dist.destroy_process_group()" * destroys))
    ran = programs.simulated(tmp_path, "--gpus", 1, file, new_python=True)
    warning = "WARNING: destroy_process_group() was not called before program exit"
    assert ran.status == 0 and (warning in ran.stderr) != destroys
