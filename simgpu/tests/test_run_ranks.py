"""A function on several ranks: what it sees, what comes back, how it ends."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from simgpu._ranks.run_ranks import RanksFailed, run_ranks
from support.limits import GRACE

VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def look_around(factor: float, more: float = 0.0) -> tuple:
    """What a rank sees, and a tensor on its GPU."""
    print(f"this is rank {os.environ['RANK']}")
    gpus = torch.cuda.device_count()
    name = torch.cuda.get_device_name()
    total = torch.cuda.get_device_properties(0).total_memory
    x = torch.ones(3, device="cuda") * factor + more
    return [int(os.environ[name]) for name in VARIABLES], (gpus, name, total), x


def test_ranks_see_what_torchrun_gives_them(capsys):
    found = run_ranks(
        look_around, 4, 2.0, more=1.0, card="T4", memory="1GB", nodes=2,
        network="10 Gbit/s",
    )  # fmt: skip
    variables, gpus, tensors = zip(*found, strict=True)
    assert list(variables) == [
        [0, 0, 0, 4, 2], [1, 1, 0, 4, 2], [2, 0, 1, 4, 2], [3, 1, 1, 4, 2],
    ]  # fmt: skip
    assert {count for count, _, _ in gpus} == {2}
    assert all("T4" in name and total == 2**30 for _, name, total in gpus)
    assert all(x.device.type == "cpu" and x.tolist() == [3, 3, 3] for x in tensors)
    printed = capsys.readouterr().out.splitlines()
    assert sorted(printed) == [f"this is rank {rank}" for rank in range(4)]


def in_this_process() -> int:
    return os.getpid()


def _listening(process: int) -> set[str]:
    """The addresses at which a process listens, or one that it has started."""
    starter = psutil.Process(process)
    every = [starter, *starter.children(recursive=True)]
    connections = [c for one in every for c in one.net_connections("tcp")]
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.mark.skipif(sys.platform != "linux", reason="asks which sockets there are")
def test_only_this_machine_can_reach_the_store_where_ranks_meet():
    before = _listening(os.getpid())
    (found,) = run_ranks(_listening, 1, os.getpid())
    assert "127.0.0.1" in found and found - before <= {"127.0.0.1"}


@pytest.mark.simulated_gpus(3)
def test_this_process_has_no_gpus_but_may_have():
    pids = run_ranks(in_this_process, 2)
    assert len({*pids, os.getpid()}) == 3 and torch.cuda.device_count() == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ranks": 0}, "0 ranks cannot lie on 1 nodes"),
        ({"ranks": 3, "nodes": 2}, "3 ranks cannot lie on 2 nodes"),
        ({"ranks": 2, "card": "A1"}, "A1"),
        ({"ranks": 2, "memory": "1TB"}, "does not have 1TB"),
        ({"ranks": 2, "network": "fast"}, "cannot read 'fast' as a bandwidth"),
    ],
)
def test_what_cannot_be_is_refused_before_any_process(options, said):
    with pytest.raises(ValueError, match=said):
        run_ranks(in_this_process, **options)


def test_a_function_that_no_process_can_import_is_refused():
    with pytest.raises(TypeError, match="at the top level of a module"):
        run_ranks(lambda: 1, 2)


def test_a_module_that_was_loaded_by_its_path_is_loaded_so_again(tmp_path):
    path = tmp_path / "loaded_by_path.py"
    path.write_text("def seven():\n    return 7\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("loaded_by_path", path)
    module = sys.modules["loaded_by_path"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        assert run_ranks(module.seven, 2) == [7, 7]
    finally:
        del sys.modules["loaded_by_path"]


def fail_in_one(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        torch.ones(2, device="cuda") + torch.ones(3, device="cuda")


def test_the_error_of_a_rank_is_raised_here_with_its_own_lines():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail_in_one, 3, 1)
    assert caught.value.failures.keys() == {1}
    first, *lines = str(caught.value).splitlines()
    assert first == "rank 1: Traceback (most recent call last):"
    assert "in fail_in_one" in lines[0] and Path(__file__).name in lines[0]
    assert lines[-1].startswith("RuntimeError: The size of tensor a (2) must match")
    assert not [line for line in lines if "simgpu/" in line and ", line" in line][1:]


def start_another_and_hang(folder: str) -> None:
    """What a rank starts must not outlive it, either."""
    rank = int(os.environ["RANK"])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"])
    Path(folder, str(rank)).write_text(f"{os.getpid()} {other.pid}")
    if rank == 1:
        time.sleep(10_000)  # here
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    dist.all_reduce(torch.ones(1, device="cuda"))  # there


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended may not be collected yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="has no /proc")
def test_a_time_limit_shows_where_each_rank_stood_and_leaves_nothing(tmp_path):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(start_another_and_hang, 2, str(tmp_path), seconds=GRACE)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    for rank, comment in ((0, "# there"), (1, "# here")):
        text = caught.value.failures[rank]
        assert text.startswith(f"has not ended within {GRACE:g} s\nIt stood here")
        number = 1 + next(i for i, line in enumerate(lines) if line.endswith(comment))
        assert f"line {number} in start_another_and_hang" in text
    for rank in range(2):
        for pid in (tmp_path / str(rank)).read_text().split():
            assert not is_running(int(pid))


def files_in_shared_memory() -> list[str]:
    """Of a rank that gives and takes much."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    x = torch.ones(10**6, device="cuda")
    dist.all_reduce(x)
    assert x.sum().item() == 2e6
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if "/dev/shm" in line]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="has no /proc")
def test_values_leave_nothing_in_shared_memory():
    assert run_ranks(files_in_shared_memory, 2) == [[], []]
