"""All ranks on one axis: lanes, waits, `--timeline` and `--nodes` under torchrun."""

import json
import textwrap
from pathlib import Path

import pytest

from simgpu._timing.events import Event, Wait
from simgpu._timing.job import JobTimeline, RankLog
from support import programs

SCRIPT = """
    import os, signal, sys
    import torch
    import torch.distributed as dist

    if __name__ == "__main__":
        dist.init_process_group("nccl")
        local_rank, rank = int(os.environ["LOCAL_RANK"]), dist.get_rank()
        torch.cuda.set_device(local_rank)
        x = torch.ones(1 << 22, device="cuda")
        for _ in range(rank):
            x = x * 2
        dist.all_reduce(x, async_op=True).wait()
        torch.cuda.synchronize()
        if sys.argv[1:] == [str(rank)]:
            os.kill(os.getpid(), signal.SIGKILL)
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        line = [rank, *map(os.environ.get, names), torch.cuda.device_count()]
        print(" ".join(map(str, line)) + chr(10), end="")  # in one piece
        dist.destroy_process_group()
"""


def in_ranks(folder: Path, *arguments, ranks=4, rest=()) -> programs.Done:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    return programs.in_ranks(folder, ranks, *arguments, path, *rest)


def event(start, end, *, stream=0, name="mul", kind="kernel", **more) -> Event:
    return Event(kind, name, "cuda:1", start, end, 8, 0, stream=stream, **more)


# -- the data --------------------------------------------------------------------------


def test_lanes_of_nccl_are_named_after_who_they_connect():
    to, back = "rank 0 to rank 3", "rank 3 to rank 0"
    events = [
        event(0, 1),
        event(0, 1, stream=2),
        event(1, 2, stream=1000, group="ranks 0, 3"),
        event(1, 2, stream=1001, group=to),
        event(2, 3, stream=1001, group=back),
    ]
    job = JobTimeline([RankLog(3, events, [], 3.0), RankLog(0, [], [], 1.0)])
    assert [lane.title for lane in job.lanes(3)] == [
        "stream 0", "stream 2", "NCCL, ranks 0, 3", "NCCL, ranks 0 and 3",
    ]  # fmt: skip
    assert (job.ranks, job.lanes(0), job.seconds) == ([0, 3], {}, 3.0)
    with pytest.raises(KeyError, match="rank 1 has no log"):
        job.lanes(1)


def test_the_waiting_is_apart_in_the_trace():
    all_reduce = event(
        1e-6, 5e-6, kind="collective", name="all_reduce", group="all ranks",
        stream=1000, waited=3e-6, waited_for=2,
    )  # fmt: skip
    log = RankLog(1, [all_reduce], [Wait("busy", 0.0, 1e-6)], 5e-6)
    job = JobTimeline([log], {2: "it died"})
    trace = job.chrome_trace()
    assert trace["otherData"] == {"rank 2": "it died"}
    spans = {
        row["name"]: (round(row["ts"], 6), round(row["dur"], 6), row["cat"])
        for row in trace["traceEvents"]
        if row["ph"] == "X" and row["tid"]
    }
    assert spans == {
        "all_reduce waits for rank 2": (1, 3, "wait"),
        "all_reduce": (4, 1, "collective"),
    }
    assert job.waited() == {(1, 2): 3e-6}
    assert repr(job) == "JobTimeline(1 ranks, 2 missing, 1 events, 5 µs simulated)"


# -- under torchrun --------------------------------------------------------------------


def test_a_trace_has_all_ranks(tmp_path):
    done = in_ranks(tmp_path, "--timeline", "out.json")
    assert done.status == 0, done.stderr
    trace = json.loads((tmp_path / "out.json").read_text())
    rows = trace["traceEvents"]
    found = [row for row in rows if row.get("cat") == "collective"]
    assert [row["pid"] for row in found] == [0, 64, 128, 192]
    assert len({(row["ts"], row["dur"]) for row in found}) == 1
    waits = [row["name"] for row in rows if "waits for" in row["name"]]
    assert waits == ["all_reduce waits for rank 3"] * 3 and not trace["otherData"]


def test_a_rank_that_died_is_left_out_with_a_note(tmp_path):
    done = in_ranks(tmp_path, "--timeline=out.json", rest=(2,))
    assert done.status == -9
    note = (
        "rank 2 is not in out.json: its process ended before it could hand in its log"
    )
    assert note in done.stderr
    trace = json.loads((tmp_path / "out.json").read_text())
    rows = trace["traceEvents"]
    names = [r["args"]["name"] for r in rows if r["name"] == "process_name"]
    assert names == [f"rank {r} cuda:{r} simulated" for r in (0, 1, 3)]


def test_nodes_are_laid_out_as_torchrun_would(tmp_path):
    done = in_ranks(tmp_path, "--nodes", 2, "--network", "100 Gbit/s")
    assert done.status == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "0 0 2 0 2", "1 1 2 0 2", "2 0 2 1 2", "3 1 2 1 2",
    ]  # fmt: skip


def test_a_slower_network_takes_longer(tmp_path):
    def seconds(*arguments) -> float:
        done = in_ranks(tmp_path, "--timeline", "out.json", *arguments)
        assert done.status == 0, done.stderr
        rows = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
        return next(row["dur"] for row in rows if row.get("cat") == "collective")

    fast = seconds()
    slow = seconds("--nodes=2", "--network", "100 Gbit/s")
    assert fast < slow < seconds("--nodes=2", "--network=10 Gbit/s")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--nodes", 3), "4 ranks cannot be shared equally by 3 nodes"),
        (("--network", "fast"), "cannot read 'fast' as a bandwidth"),
        (("--timeline", "nowhere/out.json"), "there is no folder"),
    ],
)
def test_bad_requests_are_refused(tmp_path, arguments, words):
    done = in_ranks(tmp_path, *arguments)
    assert done.status != 0 and words in done.stderr and not done.stdout


def test_nodes_are_for_ranks(tmp_path):
    (tmp_path / "script.py").write_text("")
    done = programs.simulated(tmp_path, "--gpus", 2, "--nodes", 2, "script.py")
    assert "--nodes is for ranks; start them with torchrun" in done.stderr


def test_a_program_without_ranks_has_a_trace_too(tmp_path):
    (tmp_path / "script.py").write_text(
        "import torch; torch.ones(9, device='cuda') * 2"
    )
    done = programs.simulated(
        tmp_path, "--gpus", 1, "--timeline", "out.json", "script.py"
    )
    assert done.status == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert [r["name"] for r in rows if r.get("cat") == "kernel"] == ["ones", "mul"]
