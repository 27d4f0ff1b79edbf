"""Elastic jobs on simulated GPUs, really run, really broken, really recovered.

After each accident no row is lost or counted twice, and the weights are those of the
job that nobody disturbed: to the bit if the number of ranks stayed, or nearly so. A
job has several accidents in turn, because every process that imports PyTorch is slow.
"""

import functools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch.nn.functional import cross_entropy

from helpers import elastic
from helpers.elastic import LOOPBACK, Job
from helpers.job_log import runs_of
from helpers.processes import JobError, processes
from support.limits import JOB, SHORT, SLOWNESS
from support.waiting import wait
from tests.launching import (
    ROOT,
    SCRIPTS,
    environment,
    load,
    starts,
    temporary_folder,
)

pytestmark = pytest.mark.slow

SCRIPT = str(SCRIPTS / "break_it.py")  # around train_elastic.py
RUN = "torch.distributed.run"
BATCH, STEPS = 120, 20
PATIENT = {"last_call_timeout": 3}  # of nodes: a busy one may be late


@pytest.fixture(autouse=True)
def talkative(monkeypatch):
    """Agents say what they do, for the error of a test that fails."""
    monkeypatch.setenv("LOGLEVEL", "INFO")


def job(*arguments: str, **options) -> Job:
    gpus = options.get("ranks", 1)
    words = "--folder={folder}", f"--steps={STEPS}", *arguments
    return Job(SCRIPT, *words, gpus=gpus, **options)


@functools.cache
def script():
    return load("train_elastic.py")


@functools.cache
def undisturbed() -> dict[str, torch.Tensor]:
    """The weights after the last step: the gradients of two ranks are added up here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    (x, y), model = script().make_data().tensors, script().make_model()
    optimizer = script().make_optimizers(model)["optimizer"]
    for step in range(STEPS):
        rows = script().rows_of_step(step, BATCH, len(x))
        optimizer.zero_grad()
        for mine in (rows[0::2], rows[1::2]):
            losses = cross_entropy(model(x[mine]), y[mine], reduction="none")
            (losses.sum() / BATCH).backward()
        optimizer.step()
    torch.set_num_threads(threads)
    return model.state_dict()


def check(a_job: Job, exact: bool = True) -> None:
    """No sample was lost or counted twice, and the weights are the undisturbed ones."""
    found = a_job.rows_that_count
    assert sorted(found) == list(range(STEPS))
    for step, rows in found.items():
        expected = script().rows_of_step(step, BATCH, len(script().make_data()))
        assert rows == sorted(expected.tolist()), step
    assert script().newest(a_job.folder) == STEPS
    state = torch.load(a_job.folder / f"step-{STEPS:06}.pt", map_location="cpu")
    assert state["step"] == STEPS
    for name, weights in undisturbed().items():
        tolerance = 0 if exact else 1e-5
        torch.testing.assert_close(
            state["model"][name], weights, rtol=0, atol=tolerance
        )


# -- accidents -------------------------------------------------------------------------


@pytest.mark.long
def test_with_one_or_two_nodes_the_job_grows_and_shrinks():
    holds = ("--hold", "7", "12", "13", "16", "18")
    with job(*holds, nodes="1:2", conf=PATIENT) as it:

        def begins(*start: int) -> None:
            it.wait(lambda: starts(it.log)[-1:] == [start], f"the start {start}", JOB)

        it.add()
        it.reach(6, ranks=1)
        second = it.add()  # a node joins; the rank that is there does 7 and saves
        begins(2, 8)
        it.reach(11, ranks=2)
        second.kill()  # a node dies, and the rest goes on
        it.go(12)
        begins(1, 10)
        it.reach(12, ranks=1)
        third = it.add()
        begins(2, 14)
        it.reach(15, ranks=2)
        (worker,) = third.workers
        third.kill_agent()  # and leaves its worker behind
        it.go(16)
        it.reach(17, ranks=2)  # nobody has noticed
        assert psutil.pid_exists(worker)
        os.kill(worker, 9)
        it.go(18)
        assert it.finish() == [0, -9, -9]
        # a node may come too late for a start; then there is one more, without it
        found = iter(starts(it.log))
        expected = [(1, 0), (2, 8), (1, 10), (2, 14), (1, 15)]
        assert all(start in found for start in expected), starts(it.log)
        check(it, exact=False)


@pytest.mark.long
def test_with_two_nodes_at_least_the_job_waits_for_another():
    with job("--hold", "8", "12", nodes="2:3") as it:
        first, second = it.add(), it.add()
        it.reach(7, ranks=2)
        second.kill_worker()
        it.go(8)
        it.reach(11, ranks=2)
        second.kill()
        it.go(12)
        it.wait(lambda: first.workers == [], "the other worker's end")
        third = it.add()
        it.wait(lambda: len(starts(it.log)) == 3, "a third start")
        assert first.workers and third.workers
        assert it.finish() == [0, -9, 0]
        assert starts(it.log) == [(2, 0), (2, 5), (2, 10)]
        assert it.steps_again == [3, 2]
        events = [event for event, *parts in it.recoveries() if min(parts) > 0]
        assert events == ["kill worker", "kill node"]
        check(it)


def test_an_exception_that_comes_again_a_spoilt_checkpoint_and_a_hang():
    """The first job uses its budget of restarts up; the second goes on from there."""
    raises = ("--trouble=raise", "--at=12", "--of=1", "--always")
    hangs = ("--trouble=hang", "--at=12", f"--timeout={round(5 * SLOWNESS)}")
    with job(*raises, ranks=2, restarts=1) as first:
        node = first.add()
        assert first.finish() == [1]
        assert starts(first.log) == [(2, 0), (2, 10)]
        assert "ValueError: a broken sample in step 12" in node.words
        assert "ChildFailedError" in node.words
        names = sorted(path.name for path in first.folder.glob("step-*"))
        assert names == ["step-000005.pt", "step-000010.pt"]

        newest = first.folder / names[-1]
        newest.write_bytes(newest.read_bytes()[:-100])
        (first.folder / "next.half").write_bytes(b"begun")
        (first.folder / "trouble").unlink()
        with job(*hangs, ranks=2, folder=first.folder) as second:
            node = second.add()
            assert second.finish() == [0]
            assert starts(second.log)[2:] == [(2, 5), (2, 10)]
            assert "timeout" in node.words.lower() or "timed out" in node.words.lower()
            check(second)


def test_sigterm_saves_on_all_ranks_and_the_same_command_goes_on():
    """As a cluster's scheduler ends a job: SIGTERM for the agent alone."""
    with job("--hold", "7", ranks=2) as first:
        node = first.add()
        first.reach(6, ranks=2)
        os.kill(node.pid, signal.SIGTERM)
        assert first.finish() != [0]  # the agent says that it was ended
        names = sorted(path.name for path in first.folder.glob("step-*"))
        assert names == ["step-000005.pt", "step-000008.pt"]
        with job(ranks=2, folder=first.folder) as second:
            second.add()
            assert second.finish() == [0]
            assert starts(second.log) == [(2, 0), (2, 8)]
            assert second.steps_again == [0]
            check(second)


@pytest.mark.long
def test_sigterm_to_one_node_saves_and_the_other_goes_on():
    """Though the loaders have workers: torchrun signals the ranks' process groups.

    The worker is two steps ahead: ranks that wait before it gets step 9 have done 6.
    """
    with job("--hold", "9", "--workers=1", nodes="1:2", restarts=1, conf=PATIENT) as it:
        first, second = it.add(), it.add()
        it.reach(8, ranks=2)
        os.kill(second.pid, signal.SIGTERM)
        it.wait(lambda: "SIGTERM" in second.words, "the signal")
        it.go(9)
        statuses = it.finish()
        assert statuses[0] == 0 and statuses[1] != 0
        assert starts(it.log) == [(2, 0), (1, 8)]
        assert "1/1 attempts left" in first.words
        assert script().newest(it.folder) == STEPS
        assert "is killed by signal" not in first.words + second.words


def test_a_machine_that_fails_at_each_restart_ends_the_job_on_all():
    """The good node may restart ten times more, and go on alone by `--nnodes=1:2`."""
    with job(nodes="1:2", restarts=10, conf=PATIENT) as it:
        it.add()
        place = it.command.index("--max-restarts=10")
        it.command[place] = "--max-restarts=1"
        it.environ["BROKEN"] = "12"
        bad = it.add()
        assert it.finish() == [1, 1]
        assert starts(it.log)[:2] == [(2, 0), (2, 10)]
        assert "uncorrectable ECC error" in bad.words.rpartition("Root Cause")[2]
        assert "RendezvousClosedError" in it.nodes[0].words


def test_a_spare_node_waits_and_takes_the_place_of_one_that_died():
    """`--nnodes=2` and three agents."""
    with job("--hold", "8", nodes="2", conf=PATIENT) as it:
        it.add()
        it.add()
        it.reach(7, ranks=2)
        spare = it.add()
        it.wait(lambda: "Rendezvous'ing" in spare.words, "a spare")
        it.nodes[1].kill()
        it.go(8)
        assert it.finish() == [0, -9, 0]
        assert starts(it.log) == [(2, 0), (2, 5)] and it.steps_again == [3]
        check(it)


def test_a_job_shows_its_command_without_what_differs_from_run_to_run():
    with Job("a.py", "--folder={folder}", nodes="1:2", gpus=2, ranks=2) as it:
        words = str(it).replace("\\\n", "").split()
    assert words[0] == "torchrun"
    assert {"--nnodes=1:2", "--nproc-per-node=2", "--rdzv-id=NAME"} <= set(words)
    assert "--rdzv-endpoint=127.0.0.1:PORT" in words
    assert words[-2:] == ["a.py", "--folder=FOLDER"]
    assert it.launcher[1:] == ["-m", "simgpu", "--gpus=2", "-m", RUN]


def test_the_gpus_of_a_job_are_simulated_where_there_are_real_ones(monkeypatch):
    monkeypatch.setenv("HELPERS_GPUS", "real")
    with Job("a.py", gpus=1) as simulated, Job("a.py") as without:
        assert simulated.environ["HELPERS_GPUS"] == "simulated"
        assert without.environ["HELPERS_GPUS"] == "real"


def test_a_log_is_cut_where_the_ranks_started():
    who = {"ranks": 1, "rank": 0, "agent": 7, "pid": 8}
    step = {**who, "event": "step", "rows": [1]}
    log = [
        {"event": "add node", "node": 0},
        {**who, "event": "loaded", "step": 0},
        {**step, "step": 0},
        {"event": "kill worker", "node": 0},
        {**who, "event": "loaded", "step": 0, "pid": 9},
    ]
    first, second = runs_of(log)
    assert (first.end, first.marks[0]["step"], first.pids) == (1, 1, [8])
    assert (second.first, second.end, second.agents) == (0, 0, {0: 7})


# -- nothing is lost, nothing stays ----------------------------------------------------


@pytest.fixture
def sleeper(tmp_path: Path) -> str:
    """A script whose ranks do nothing, and without PyTorch."""
    path = tmp_path / "sleeper.py"
    path.write_text("import time; time.sleep(1000)")
    return str(path)


def test_close_ends_agents_and_workers(sleeper, tmp_path: Path):
    (tmp_path / "temporary").mkdir()
    with temporary_folder(tmp_path / "temporary"):
        with Job(sleeper, ranks=2) as it:
            node = it.add()
            it.wait(lambda: len(node.workers) == 2, "two workers")
            name, folder = it.name, it.folder
            assert len(processes(name)) >= 3
            assert list(folder.glob("torchelastic_*"))  # torchrun does not remove it
            child = os.fork()  # holds the guard's pipe open
            if child == 0:
                time.sleep(600)
                os._exit(0)
        os.kill(child, 9)
        os.waitpid(child, 0)
        assert it.nodes[0].status == -9
        it.close()  # once more changes nothing
        assert processes(name) == [] and not folder.exists()


def test_a_killed_notebook_leaves_nothing(sleeper):
    text = f"""
import time
from helpers.elastic import Job
job = Job({sleeper!r})
node = job.add()
job.wait(lambda: node.workers, "a worker")
print(job.name, job.folder, flush=True)
time.sleep(1000)
"""
    with environment() as environ:
        notebook = subprocess.Popen(
            [sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env=environ,
        )  # fmt: skip
        name, folder = notebook.stdout.readline().split()
        assert len(processes(name)) >= 2
        notebook.kill()
        notebook.wait(SHORT)
        wait(lambda: not processes(name), "the end of all")
        wait(lambda: not Path(folder).exists(), "the end of the folder")
        notebook.stdout.close()


def test_the_guard_stays_while_something_cannot_be_ended(monkeypatch):
    def fails(job: str) -> None:
        raise JobError("these processes do not die")

    it = Job("script.py")
    with monkeypatch.context() as patch, pytest.raises(JobError, match="do not die"):
        patch.setattr(elastic, "end", fails)
        it.close()
    assert it._guard.poll() is None and not it.folder.exists()
    it.close()
    assert it._guard.poll() is not None


def test_waiting_has_an_end_and_tells_why():
    with Job("not-there.py", restarts=0) as it:
        with pytest.raises(JobError, match="no node was added"):
            it.reach(1)
        it.add()
        with pytest.raises(JobError, match="0 s are over before step 99 by 3 ranks"):
            it.reach(99, ranks=3, seconds=0)  # the limit is what is tested
        with pytest.raises(JobError, match="has ended before step 1(.|\n)*not-there"):
            it.reach(1)
        assert it.finish() == [1]
        with pytest.raises(JobError, match="node 0 has 0 workers now"):
            it.nodes[0].kill_worker()
        it.marks.clear()
        (it.folder / "log.jsonl").write_text('{"time": 1, "ev\n{"time": 2}\n{"ti')
        assert it.log == [{"time": 2}]


def test_a_free_port_is_free_and_below_those_of_the_system():
    port = elastic.free_port()
    assert 20_000 <= port < 30_000
    with socket.create_server(("", port)):
        pass


@pytest.mark.parametrize("nodes", ["", "0", "two", "1:", "-1", "1:x", "3:1"])
def test_nodes_that_torchrun_cannot_read(nodes):
    with pytest.raises(ValueError, match='write a number, or "1:3"'):
        Job("script.py", nodes=nodes)


@pytest.mark.parametrize("card, settings", [("lo0", ["lo0", "lo0"]), (None, [])])
def test_ranks_talk_over_the_loopback_of_this_machine(monkeypatch, card, settings):
    """As macOS calls it; where the name is not known, Gloo chooses."""
    names = "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(elastic, "LOOPBACK", card)
    with Job("script.py") as it:
        assert [it.environ[name] for name in names if name in it.environ] == settings


def test_the_loopback_of_this_machine_is_one_of_its_cards():
    if LOOPBACK is None:
        pytest.skip("its name is not known on this system")
    assert LOOPBACK in psutil.net_if_addrs()
