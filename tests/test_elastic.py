"""Elastic jobs really run, really broken, really recovered.

After each accident no row is lost or counted twice, and the weights are those of the
job that nobody disturbed: to the bit if the number of ranks stayed, or nearly so.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from helpers.elastic import Job, JobError

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = str(ROOT / "notebooks/scripts/train_elastic.py")
STEPS, ROWS, BATCH = 20, 1437, 120

sys.path.insert(0, str(ROOT / "notebooks"))
from scripts import train_elastic  # noqa: E402


def job(*arguments: str, **options) -> Job:
    return Job(SCRIPT, "--folder={folder}", f"--steps={STEPS}", *arguments, **options)


def weights(a_job: Job) -> dict[str, torch.Tensor]:
    return torch.load(a_job.folder / "weights.pt", weights_only=True)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, torch.Tensor]:
    with job(ranks=2) as it:
        it.add()
        assert it.finish() == [0]
        check_rows(it)
        return weights(it)


def check_rows(a_job: Job) -> None:
    """Every row of every step, once."""
    rows = train_elastic.rows_that_count(a_job.log)
    assert sorted(rows) == list(range(STEPS))
    for step, used in rows.items():
        expected = train_elastic.rows_of_step(step, BATCH, ROWS)
        assert used == sorted(expected.tolist()), step


def check(a_job: Job, undisturbed: dict, exact: bool = True) -> None:
    check_rows(a_job)
    for name, mine in weights(a_job).items():
        if exact:
            assert torch.equal(mine, undisturbed[name]), name
        else:
            torch.testing.assert_close(mine, undisturbed[name], rtol=0, atol=1e-5)


def starts(a_job: Job) -> list[tuple[int, int]]:
    """(ranks, first step) of each time that training began."""
    found = [
        (entry["ranks"], entry["step"])
        for entry in a_job.log
        if entry["event"] == "loaded" and entry["rank"] == 0
    ]
    return found


def two_nodes(a_job: Job) -> None:
    """Both nodes of a job for one or two; the second may come too late at first."""
    a_job.add()
    a_job.add()
    a_job.wait(lambda: (2, 0) in starts(a_job), "a start of two ranks")


# -- accidents -------------------------------------------------------------------------


def test_a_worker_is_killed(undisturbed):
    with job("--hold=12", nodes=2) as it:
        it.add()
        second = it.add()
        it.reach(11, ranks=2)
        second.kill_worker()
        it.go(12)
        assert it.finish() == [0, 0]
        assert starts(it) == [(2, 0), (2, 10)]
        check(it, undisturbed)


def test_a_node_dies_and_the_rest_goes_on(undisturbed):
    with job("--hold=12", nodes="1:2") as it:
        two_nodes(it)
        it.reach(11, ranks=2)
        it.nodes[1].kill()
        it.go(12)
        assert it.finish() == [0, -9]
        assert starts(it)[-2:] == [(2, 0), (1, 10)]
        check(it, undisturbed, exact=False)


def test_a_killed_agent_leaves_its_worker_behind(undisturbed):
    with job("--hold", "3", "6", nodes="1:2") as it:
        two_nodes(it)
        it.reach(2, ranks=2)
        (worker,) = it.nodes[1].workers
        it.nodes[1].kill_agent()
        it.go(3)
        it.reach(5, ranks=2)  # nobody has noticed
        assert psutil.pid_exists(worker)
        os.kill(worker, 9)
        it.go(6)
        assert it.finish() == [0, -9]
        assert starts(it)[-2:] == [(2, 0), (1, 5)]
        check(it, undisturbed, exact=False)


def test_a_node_joins(undisturbed):
    with job("--hold=8", nodes="1:2") as it:
        it.add()
        it.reach(7, ranks=1)
        it.add()
        it.wait(lambda: starts(it)[-1] == (2, 5), "a start of two ranks")
        it.go(8)
        assert it.finish() == [0, 0]
        assert starts(it) == [(1, 0), (2, 5)]
        check(it, undisturbed, exact=False)


def test_below_the_minimum_the_job_waits_and_comes_back(undisturbed):
    with job("--hold=12", nodes="2:3") as it:
        it.add()
        second = it.add()
        it.reach(11, ranks=2)
        second.kill()
        it.go(12)
        it.wait(lambda: it.nodes[0].workers == [], "the other worker's end")
        third = it.add()
        it.wait(lambda: len(starts(it)) == 2, "a second start")
        assert it.nodes[0].workers and third.workers
        assert it.finish() == [0, -9, 0]
        assert starts(it) == [(2, 0), (2, 10)]
        check(it, undisturbed)


def test_an_exception_is_recorded_and_the_ranks_start_anew(undisturbed):
    with job("--trouble=raise", "--at=7", "--of=1", ranks=2) as it:
        node = it.add()
        assert it.finish() == [0]
        assert starts(it) == [(2, 0), (2, 5)]
        assert "ValueError: a bad row in step 7" in node.words
        check(it, undisturbed)


def test_the_budget_of_restarts_is_used_up():
    trouble = ("--trouble=raise", "--at=7", "--always")
    with job(*trouble, ranks=2, restarts=1) as it:
        node = it.add()
        assert it.finish() == [1]
        assert starts(it) == [(2, 0), (2, 5)]
        assert "a bad row in step 7" in node.words and "ChildFailedError" in node.words
        assert not (it.folder / "weights.pt").exists()


def test_a_spoilt_checkpoint_is_not_used(undisturbed):
    with job(ranks=2) as first:
        first.command = [
            word.replace("--steps=20", "--steps=12") for word in first.command
        ]
        first.add()
        assert first.finish() == [0]
        names = sorted(path.name for path in first.folder.glob("step-*"))
        assert names == ["step-000005.pt", "step-000010.pt"]
        newest = first.folder / names[-1]
        newest.write_bytes(newest.read_bytes()[:-100])
        (first.folder / "step-000015.pt.half").write_bytes(b"begun")
        with job(ranks=2, folder=first.folder) as second:
            second.add()
            assert second.finish() == [0]
            (spoilt,) = [e for e in second.log if e["event"] == "spoilt"]
            assert spoilt["names"] == ["step-000010.pt"]
            assert starts(second)[1:] == [(2, 5)]
            check(second, undisturbed)


def test_a_rank_that_hangs_is_given_up_by_the_others(undisturbed):
    with job("--trouble=hang", "--at=7", "--patience=3", ranks=2) as it:
        node = it.add()
        assert it.finish() == [0]
        assert starts(it) == [(2, 0), (2, 5)]
        assert "timeout" in node.words.lower() or "timed out" in node.words.lower()
        check(it, undisturbed)


# -- nothing is lost, nothing stays ----------------------------------------------------


def processes_of(name: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HELPERS_ELASTIC_JOB") == name:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def test_close_ends_agents_and_workers():
    with job("--hold=1", nodes="1:2") as it:
        it.add()
        it.reach(0)
        name, folder = it.name, it.folder
        assert len(processes_of(name)) >= 2
        child = os.fork()  # holds the guard's pipe open
        if child == 0:
            time.sleep(60)
            os._exit(0)
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert it.nodes[0].status == -9
    it.close()  # once more changes nothing
    assert processes_of(name) == [] and not folder.exists()


def test_a_killed_notebook_leaves_nothing():
    text = f"""
import time
from helpers.elastic import Job
job = Job({SCRIPT!r}, "--folder={{folder}}", "--hold=1")
job.add()
job.reach(0)
print(job.name, job.folder, flush=True)
time.sleep(100)
"""
    notebook = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    name, folder = notebook.stdout.readline().split()
    folder = Path(folder)
    assert len(processes_of(name)) >= 2
    notebook.kill()
    notebook.wait(10)
    end = time.monotonic() + 10
    while processes_of(name) and time.monotonic() < end:
        time.sleep(0.05)
    assert processes_of(name) == []
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not folder.exists()
    notebook.stdout.close()


def test_waiting_has_an_end_and_tells_why():
    with job() as it:
        it.add()
        with pytest.raises(JobError, match="0 s are over before step 99 by 3 ranks"):
            it.reach(99, ranks=3, seconds=0)
        assert it.finish() == [0]
        (it.folder / "log.jsonl").write_text('{"time": 1, "ev\n{"time": 2}\n{"ti')
        assert it.log[0] == {"time": 2}
        with pytest.raises(JobError, match="node 0 has 0 workers now"):
            it.nodes[0].kill_worker()
    with job() as it, pytest.raises(JobError, match="no node was added"):
        it.reach(1)
    with Job("not-there.py") as it:
        it.add()
        with pytest.raises(JobError, match="has ended before step 1(.|\n)*not-there"):
            it.reach(1)


@pytest.mark.parametrize("nodes", ["", "0", "two", "1:", "-1", "1:x", "3:1"])
def test_nodes_that_torchrun_cannot_read(nodes):
    with pytest.raises(ValueError, match='write a number, or "1:3"'):
        Job("script.py", nodes=nodes)


# -- the script's parts ----------------------------------------------------------------


def test_rows_of_the_steps_of_an_epoch_are_all_different():
    steps = ROWS // BATCH
    rows = [train_elastic.rows_of_step(step, BATCH, ROWS) for step in range(2 * steps)]
    first, second = torch.cat(rows[:steps]), torch.cat(rows[steps:])
    assert len(first.unique()) == len(second.unique()) == steps * BATCH
    assert not torch.equal(first, second)


def test_checkpoints_are_whole_or_not_there(tmp_path: Path):
    assert train_elastic.newest(tmp_path) == (None, [])
    for step in (5, 10, 15):
        train_elastic.save(tmp_path, step, {"step": step})
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        "step-000010.pt", "step-000015.pt",
    ]  # fmt: skip
    assert train_elastic.newest(tmp_path) == ({"step": 15}, [])
    whole = (tmp_path / "step-000015.pt").read_bytes()
    for wrong in (b"", whole[:40], whole[:-1], whole[:-1] + b"?"):
        (tmp_path / "step-000015.pt").write_bytes(wrong)
        assert train_elastic.newest(tmp_path) == ({"step": 10}, ["step-000015.pt"])
