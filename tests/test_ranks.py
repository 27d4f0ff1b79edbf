"""Real ranks: they come up, answer in order, fail loudly and leave nothing behind."""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from helpers import ranks as module
from helpers.ranks import MOST, RankError, Ranks
from tests.waiting import wait

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
FORKS = pytest.mark.skipif(not module._FORKS, reason="no fork here")


@pytest.fixture(scope="module", autouse=True)
def at_the_end():
    yield
    module._state.close()
    assert descendants() == []


def descendants() -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if "rank_process" in " ".join(process.cmdline())
    ]


@pytest.fixture
def four():
    with Ranks(4) as ranks:
        ranks.run(rank)  # they know this file now; no time limit below is for that
        yield ranks


@pytest.fixture
def hear_ctrl_c():
    """Who runs the tests in the background has told this process to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def soon():
    """Before a collective would have given up by itself, on a busy machine, too."""
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    assert took < 18, f"took {took:.1f} s"


def rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def all_sum(value=None) -> float:
    import torch
    import torch.distributed as dist

    x = torch.tensor([float(dist.get_rank() if value is None else value)])
    dist.all_reduce(x)
    return x.item()


# -- what they do ----------------------------------------------------------------------


def test_item_r_came_from_rank_r(four, capsys):
    assert four.run(rank) == [0, 1, 2, 3]
    assert four.run(all_sum) == [6.0] * 4
    assert four.run(all_sum, 2) == four.run(all_sum, value=2) == [8.0] * 4
    assert repr(four) == "Ranks(4, gloo)"


def test_one_line_says_what_they_are(capsys):
    Ranks(1).close()
    Ranks(2).close()
    assert capsys.readouterr().out.splitlines() == [
        "1 real rank: processes on the CPU, backend gloo.",
        "2 real ranks: processes on the CPU, backend gloo.",
    ]


def test_functions_of_a_cell_are_sent_with_what_they_need(four):
    import torch

    factor = torch.tensor([1.0, 2.0])

    class Box:
        def __init__(self, value):
            self.value = value

    def scaled(box, plus=0):
        return factor * box.value * rank() + plus

    results = four.run(scaled, Box(10), plus=1)
    assert [r.tolist() for r in results] == [
        [10.0 * i + 1, 20.0 * i + 1] for i in range(4)
    ]


def test_prints_are_shown_in_rank_order_before_the_call_returns(four, capsys):
    def speak():
        time.sleep(0.05 * (3 - rank()))  # the last rank is the first to speak
        print("one\ntwo")
        print("no end of line", end="", flush=True)
        os.write(2, b" from C\n")

    for _ in range(3):
        four.run(speak)
        lines = capsys.readouterr().out.splitlines()
        assert lines == [
            f"[{r}] {words}"
            for r in range(4)
            for words in ("one", "two", "no end of line from C")
        ]


def test_much_output_does_not_block(four, capsys):
    four.run(lambda: print(("x" * 99 + "\n") * 20_000))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 * 20_001 and lines[-2] == "[3] " + "x" * 99


def test_cells_keep_their_names_from_one_to_the_next(four, capsys):
    four.cell("x = torch.ones(1) * rank\ndist.all_reduce(x)")
    four.cell("print(world_size)\nx.item() + 0.5")
    assert capsys.readouterr().out.splitlines() == [
        f"[{r}] {words}" for r in range(4) for words in ("4", "6.5")
    ]


def test_training_with_ddp_and_a_large_result(four):
    def train():
        import torch
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(rank())
        model = DistributedDataParallel(torch.nn.Linear(1000, 1000))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 1000)).sum().backward()
        optimizer.step()
        return model.module.weight.detach()

    with soon():
        first, *others = four.run(train)
    assert first.shape == (1000, 1000)
    assert all(first.equal(other) for other in others)


@LINUX
def test_memory_after_a_ddp_step_is_small():
    code = """
        import sys; sys.path.insert(0, "BENCHMARKS")
        from ranks_start import pss, step
        from helpers import Ranks
        with Ranks(4) as ranks:
            ranks.run(step)
            print(pss())
    """
    code = code.replace("BENCHMARKS", str(Path(__file__).parent / "benchmarks"))
    assert float(run(code).stdout.splitlines()[-1]) < 450


def run(code: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        **kwargs,
    )


def test_the_notebook_side_does_not_import_pytorch():
    code = """
        import sys
        from helpers import Ranks
        with Ranks(2) as ranks:
            print(ranks.run(lambda: 1), "torch" in sys.modules)
    """
    assert run(code).stdout.splitlines()[-1] == "[1, 1] False"


# -- bad requests ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, 64, MOST + 1])
def test_impossible_numbers_are_refused(size):
    with pytest.raises(ValueError, match=f"{size} ranks cannot be started"):
        Ranks(size)


@pytest.mark.parametrize("size", [2.0, "4", None, True])
def test_numbers_must_be_whole(size):
    with pytest.raises(ValueError, match="whole number"):
        Ranks(size)


def test_what_cannot_be_sent_says_so(four):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot send this to the ranks: .*lock"):
        four.run(lambda: lock)
    with pytest.raises(
        RankError, match="ranks 0, 1, 2, 3: TypeError: the result, a lock"
    ):
        four.run(threading.Lock)
    assert four.run(rank) == [0, 1, 2, 3]


def test_closed_ranks_say_so():
    ranks = Ranks(1)
    ranks.close()
    ranks.close()
    with pytest.raises(RankError, match="closed; open new ones"):
        ranks.run(rank)


def test_opening_ranks_closes_the_older_ones():
    older = Ranks(2)
    with Ranks(3) as newer:
        with pytest.raises(RankError, match="closed"):
            older.run(rank)
        assert newer.run(rank) == [0, 1, 2]


# -- failures --------------------------------------------------------------------------


def fail_on(which: int, how):
    """A function in which one rank fails while the others wait for it."""

    def program():
        if rank() == which:
            how()
        return all_sum()

    return program


def raise_error():
    raise ValueError("bad batch")


AFRESH = "The 4 ranks have been started afresh; what they had defined is gone."


def test_an_error_in_one_rank_names_it_and_where_the_others_wait(four):
    with soon(), pytest.raises(RankError) as caught:
        four.run(fail_on(1, raise_error))
    text = str(caught.value)
    assert "rank 1: ValueError: bad batch\n" in text
    assert 'in raise_error: raise ValueError("bad batch")' in text
    assert "ranks 0, 2, 3: did not finish; waiting\n" in text
    assert "in all_sum: dist.all_reduce(x)" in text
    assert text.endswith(AFRESH)
    assert "site-packages" not in text
    assert four.run(all_sum) == [6.0] * 4


def test_the_same_error_in_all_ranks_is_told_once(four):
    with pytest.raises(RankError) as caught:
        four.run(raise_error)
    assert str(caught.value).startswith("ranks 0, 1, 2, 3: ValueError: bad batch\n")
    assert str(caught.value).count("bad batch") == 2  # the error, and its line
    assert "afresh" not in str(caught.value)
    assert four.run(all_sum) == [6.0] * 4


def test_errors_of_cells_name_their_lines(four):
    with pytest.raises(RankError) as caught:
        four.cell("def f():\n    return 1 / 0\n\nif rank == 2:\n    f()")
    assert str(caught.value) == (
        "rank 2: ZeroDivisionError: division by zero\n"
        "  this cell, line 5: f()\n"
        "  this cell, line 2, in f: return 1 / 0"
    )
    with pytest.raises(RankError, match="SyntaxError"):
        four.cell("1 +")


@pytest.mark.parametrize(
    "how, words",
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was killed by SIGSEGV"),
        (lambda: os._exit(3), "ended with status 3"),
    ],
    ids=["SIGKILL", "SIGSEGV", "exit"],
)
def test_a_rank_that_dies_is_named_with_its_end(four, how, words):
    with soon(), pytest.raises(RankError) as caught:
        four.run(fail_on(2, how))
    assert f"rank 2: the process {words}" in str(caught.value)
    assert "dist.all_reduce(x)" in str(caught.value)
    assert str(caught.value).endswith(AFRESH)
    assert four.run(all_sum) == [6.0] * 4


def test_sys_exit_in_a_rank_is_an_error_like_any_other(four):
    with pytest.raises(RankError, match="ranks 0, 1, 2, 3: SystemExit: 7"):
        four.run(sys.exit, 7)
    assert four.run(rank) == [0, 1, 2, 3]


def test_a_rank_that_died_between_two_calls_is_noticed(four):
    pids = four.run(os.getpid)
    os.kill(pids[3], signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pids[0])], timeout=0.2)
    with soon(), pytest.raises(RankError, match="rank 3: the process was killed"):
        four.run(rank)
    assert four.run(rank) == [0, 1, 2, 3]


def test_a_skipped_collective_is_found_within_the_time_box(four):
    def skip():
        return 0.0 if rank() == 0 else all_sum()

    with soon(), pytest.raises(RankError, match="ranks 1, 2, 3: did not finish"):
        four.run(skip, timeout=3)
    assert four.run(all_sum) == [6.0] * 4


def test_a_collective_gives_up_by_itself():
    with Ranks(2, timeout=2) as two, soon():
        with pytest.raises(RankError, match="rank 1: "):
            two.run(lambda: 0 if rank() == 0 else all_sum())
        assert two.run(rank) == [0, 1]


def test_mismatched_shapes_end_in_an_error(four):
    def mismatch():
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1 + rank()))

    with soon(), pytest.raises(RankError):
        four.run(mismatch, timeout=5)
    assert four.run(all_sum) == [6.0] * 4


def test_an_endless_loop_is_shown_and_ended(four):
    def spin():
        while rank() == 1:
            pass

    with soon(), pytest.raises(RankError) as caught:
        four.run(spin, timeout=2)
    assert "rank 1: did not finish" in str(caught.value)
    assert "while rank() == 1" in str(caught.value) or "in spin" in str(caught.value)
    assert four.run(rank) == [0, 1, 2, 3]


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("where", ["python", "collective"])
def test_an_interrupt_ends_the_call_and_leaves_working_ranks(
    four, where, capsys, hear_ctrl_c
):
    def python():
        time.sleep(30)

    def collective():
        return 0 if rank() == 0 else all_sum()

    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with soon(), pytest.raises(KeyboardInterrupt):
        four.run({"python": python, "collective": collective}[where])
    assert ("afresh" in capsys.readouterr().out) == (where == "collective")
    assert four.run(all_sum) == [6.0] * 4


def test_a_stack_is_read_when_its_lines_are_whole(tmp_path: Path):
    dump = """Current thread 0x00007f:
  File "here.py", line 3 in work
  File "/course/helpers/rank_process.py", line 120 in main
"""
    stack = tmp_path / "0.stack"

    def signalled(rank, number):
        stack.write_text(dump[: dump.index("line 120")])
        threading.Timer(0.2, stack.write_text, [dump]).start()

    job = SimpleNamespace(crew=SimpleNamespace(folder=tmp_path, signal=signalled))
    outermost = ("/course/helpers/rank_process.py", 120, "main")
    assert module._Job._stack(job, 0) == [outermost, ("here.py", 3, "work")]


# -- nothing is left -------------------------------------------------------------------


def test_closing_ends_every_rank_and_removes_the_folder():
    ranks = Ranks(3)
    pids, folder = ranks.run(os.getpid), ranks._crew.folder
    assert folder.exists()
    ranks.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not folder.exists()


CHILD = """
    import os, sys, time
    from helpers import Ranks
    ranks = Ranks(2)
    def hang():
        import torch, torch.distributed as dist
        if dist.get_rank() == 0:
            time.sleep(60)
        dist.all_reduce(torch.ones(1))
    print(*ranks.run(os.getpid), flush=True)
    {then}
"""


@FORKS
@pytest.mark.parametrize("then", ["time.sleep(60)", "ranks.run(hang)"])
def test_ranks_end_when_the_notebook_is_killed(then, tmp_path):
    code = textwrap.dedent(CHILD).format(then=then)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    process.stdout.readline()
    pids = list(map(int, process.stdout.readline().split()))
    everyone = psutil.Process(process.pid).children(recursive=True)
    assert {p.pid for p in everyone} > set(pids)
    time.sleep(0.5 if "hang" in then else 0)  # so that they do hang
    process.kill()
    process.wait(10)
    _, alive = psutil.wait_procs(everyone, timeout=5)
    assert alive == []
    left = [path.name for path in tmp_path.iterdir()]
    assert not [name for name in left if name.startswith(("ranks-", "pymp-"))]
    process.stdout.close()


@FORKS
def test_a_notebook_that_hangs_up_while_its_nursery_reports_leaves_nothing():
    """A process that is killed hangs up before it is dead, and its ranks end then."""
    module.close()
    ranks = Ranks(8)  # what is sent first to one that has hung up raises nothing
    nursery, pids = module._state.nursery, ranks._crew.pids
    process = nursery.process.popen
    try:
        os.kill(process.pid, signal.SIGSTOP)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        states = [psutil.Process(pid).status for pid in pids]
        wait(lambda: {state() for state in states} == {"zombie"}, "the ranks' end", 30)
        nursery.link.close()
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(10) == 0
        assert not nursery.folder.exists()
    finally:
        module._forget()
        nursery.close()


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "1 / 0"])
def test_a_script_that_ends_takes_its_ranks_along(ending):
    code = textwrap.dedent(CHILD).format(then=ending)
    result = run(code)
    assert result.returncode == {"": 0, "1 / 0": 1}.get(ending, 3)
    pids = map(int, result.stdout.splitlines()[-1].split())
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_fifty_starts_and_stops_in_a_row():
    for i in range(50):
        with Ranks(2) as ranks, soon():
            assert ranks.run(all_sum, i) == [2.0 * i] * 2
            crew = ranks._crew
            pids = crew.pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_two_notebooks_at_once():
    code = """
        from helpers import Ranks
        def total(i):
            import torch, torch.distributed as dist
            x = torch.full((1,), float(i)); dist.all_reduce(x); return x.item()
        with Ranks(2) as ranks:
            print(set(sum((ranks.run(total, i) for i in range(100)), [])) ==
                  {2.0 * i for i in range(100)})
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for process in both:
        assert process.communicate(timeout=60)[0].splitlines()[-1] == "True"


@FORKS
def test_a_killed_nursery_is_replaced():
    Ranks(1).close()
    module._state.nursery.process.popen.kill()
    with Ranks(2) as ranks:
        assert ranks.run(rank) == [0, 1]


def test_spawned_ranks_do_the_same(monkeypatch):
    """As on Windows, where there is no fork."""
    monkeypatch.setattr(module, "_FORKS", False)
    with Ranks(2) as ranks:
        pids = ranks.run(os.getpid)
        assert ranks.run(all_sum) == [1.0, 1.0]
        with pytest.raises(RankError, match="rank 1: the process ended with status 3"):
            ranks.run(fail_on(1, lambda: os._exit(3)))
        assert ranks.run(all_sum) == [1.0, 1.0]
    assert not any(psutil.pid_exists(pid) for pid in pids)


# -- the cell magic --------------------------------------------------------------------


def test_the_magic_runs_a_cell_in_every_rank(four, capsys):
    module._magic("", "y = rank + 1\ny * 10")
    assert capsys.readouterr().out.splitlines() == [
        "[0] 10", "[1] 20", "[2] 30", "[3] 40",
    ]  # fmt: skip
    with pytest.raises(RankError, match="did not finish"):
        module._magic("--timeout 1", "while True: pass")


def test_the_magic_says_what_it_lacks():
    with pytest.raises(RankError, match="there are no ranks; open some"):
        module._magic("", "1")
    with pytest.raises(ValueError, match="usage: %%ranks"):
        module._magic("--timeout soon", "1")


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(RankError("rank 1: no")))
    assert str(error) == "rank 1: no"
    assert error._render_traceback_() == ["RankError: rank 1: no"]


@LINUX
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting takes root"
)
def test_a_full_shared_memory_is_no_trouble():
    code = """
        from helpers import Ranks
        def total():
            import torch, torch.distributed as dist
            x = torch.ones(1_000_000); dist.all_reduce(x); return x.sum().item()
        with Ranks(2) as ranks:
            print(ranks.run(total))
    """
    inside = (
        "mount -t tmpfs -o size=64k tmpfs /dev/shm && "
        '(head -c 1M /dev/zero > /dev/shm/full || true) 2>/dev/null && exec "$@"'
    )
    command = ["unshare", "-m", "sh", "-c", inside, "sh", sys.executable, "-c"]
    result = subprocess.run(
        [*command, textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    if "Operation not permitted" in result.stderr:
        pytest.skip("this machine does not let root mount")
    assert result.stdout.splitlines()[-1] == "[2000000.0, 2000000.0]", result.stderr


# -- what a reader of the code found ---------------------------------------------------


def test_an_answer_that_was_not_shown_is_not_the_next_ones(four, monkeypatch, capsys):
    def break_off(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(module._Job, "finish_or_stacks", break_off)
    with pytest.raises(KeyboardInterrupt):
        four.run(lambda: "old")
    monkeypatch.undo()
    assert four.run(lambda: "new") == ["new"] * 4


def test_an_interrupt_within_an_answer_starts_the_ranks_afresh(four, monkeypatch):
    received, restart = module.Connection.recv, four._restart

    def break_off(link):
        if any(link is own for own in four._crew.links):
            raise KeyboardInterrupt
        return received(link)

    def restart_unharmed():
        monkeypatch.undo()
        restart()

    monkeypatch.setattr(module.Connection, "recv", break_off)
    four._restart = restart_unharmed
    with pytest.raises(KeyboardInterrupt):
        four.run(rank)
    assert four.run(rank) == [0, 1, 2, 3]


def test_ranks_live_longer_than_the_thread_that_opened_them():
    opened = []
    thread = threading.Thread(target=lambda: opened.append(Ranks(2)))
    module._state.close()
    thread.start()
    thread.join(30)
    time.sleep(1)
    with opened[0] as ranks:
        assert ranks.run(rank) == [0, 1]


@FORKS
def test_a_nursery_that_dies_meanwhile_is_told_at_once(four):
    def kill():
        module._state.nursery.process.popen.kill()

    threading.Timer(0.5, kill).start()
    with soon(), pytest.raises(RankError, match="the one that forks ranks did too"):
        four.run(time.sleep, 50)
    assert four.run(rank) == [0, 1, 2, 3]


@FORKS
def test_a_forked_child_leaves_its_parents_ranks_alone():
    code = """
        import os, sys
        from helpers import Ranks
        with Ranks(2) as ranks:
            if (pid := os.fork()) == 0:
                sys.exit()
            os.waitpid(pid, 0)
            print(ranks.run(lambda: 1))
    """
    result = run(code)
    assert result.stdout.splitlines()[-1] == "[1, 1]", result.stderr


def test_objects_of_a_cells_class_come_back_and_travel(four):
    class Box:
        def __init__(self, value):
            self.value = value

    assert [box.value for box in four.run(lambda: Box(rank()))] == [0, 1, 2, 3]
    four.cell("class Own:\n    pass\nall = [None] * 4\nown = Own()")
    four.cell("dist.all_gather_object(all, own)\nassert isinstance(all[3], Own)")


def test_new_ranks_know_the_environment_and_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.chdir(tmp_path)

    def look():
        import torch.distributed as dist

        return str(dist.get_debug_level()), os.getcwd()

    with Ranks(1) as ranks:
        ((level, folder),) = ranks.run(look)
    assert "DETAIL" in level and folder == str(tmp_path)


def test_two_threads_do_not_mix_their_results(four, tmp_path):
    go_on, answers = tmp_path / "go on", []

    def until_told():
        while not go_on.exists():
            time.sleep(0.01)
        return rank()

    thread = threading.Thread(target=lambda: answers.append(four.run(until_told)))
    thread.start()
    wait(four._busy.locked, "the call of the thread", 20)
    with pytest.raises(RankError, match="^these ranks are at work on another call$"):
        four.run(rank)
    go_on.touch()
    thread.join(20)
    assert answers == [[0, 1, 2, 3]] and four.run(rank) == [0, 1, 2, 3]


@FORKS
def test_what_a_rank_started_ends_with_it():
    with Ranks(2) as ranks:
        pids = ranks.run(lambda: subprocess.Popen(["sleep", "60"]).pid)
        assert all(map(psutil.pid_exists, pids))
    _, alive = psutil.wait_procs(
        [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=5
    )
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


def test_prints_of_c_and_between_calls_are_shown(four, capsys):
    def speak_later():
        import ctypes

        ctypes.CDLL(None).puts(b"from C")
        threading.Timer(0.2, print, ("later",)).start()

    four.run(speak_later)
    files = [four._crew.output(r) for r in range(4)]
    wait(lambda: all(b"later" in file.read_bytes() for file in files), "later", 20)
    four.run(rank)
    lines = capsys.readouterr().out.splitlines()
    for r in range(4):
        assert f"[{r}] from C" in lines and f"[{r}] later" in lines


def test_endless_output_and_recursions_are_cut(four, capsys, monkeypatch):
    monkeypatch.setattr(module, "SHOWN", 1000)
    four.run(lambda: print(("x" * 99 + "\n") * 1000))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 4 * 13 and "... (more than" in lines[-1]

    def deeper(n=0):
        return deeper(n + 1)

    with pytest.raises(RankError) as caught:
        four.run(deeper)
    text = str(caught.value)
    assert "RecursionError" in text and " more\n" in text and text.count("\n") < 12
    with pytest.raises(RankError, match="SyntaxError: .*\n  this cell, line 2: 1 \\+"):
        four.cell("x = 1\n1 +")


def test_forked_ranks_draw_different_numbers(four):
    def draw():
        import numpy

        return numpy.random.rand()  # noqa: NPY002

    assert len(set(four.run(draw))) == 4


def test_ranks_that_lost_their_connections_start_afresh(four):
    def all_but_two():
        from datetime import timedelta

        import torch.distributed as dist

        if dist.get_rank() != 2:
            dist.monitored_barrier(timeout=timedelta(seconds=1))

    with soon(), pytest.raises(RankError) as caught:
        four.run(all_but_two)
    assert str(caught.value).endswith(AFRESH) and "<string>" not in str(caught.value)
    assert four.run(all_sum) == [6.0] * 4


def test_the_backend_can_be_chosen():
    with Ranks(1, backend="gloo") as ranks:
        assert module.current() is ranks and ranks.backend == "gloo"
    assert module.current() is None
    with pytest.raises(ValueError, match="use gloo or nccl"):
        Ranks(1, backend="mpi")


def test_strangers_at_the_door_are_turned_away(monkeypatch):
    """As from programs that go on calling at a port that another one has had."""
    enter, strangers = module._Door.__enter__, []

    def enter_after_strangers(door):
        enter(door)
        for words in (b"", b"\0\0", b"\xff" + bytes(9), b"GET / HTTP/1.1\r\n\r\n"):
            strangers.append(socket.create_connection(door.setting["address"], 20))
            strangers[-1].sendall(words)
        socket.create_connection(door.setting["address"], 20).close()
        return door

    module.close()  # or only the ranks would call, not the nursery too
    monkeypatch.setattr(module._Door, "__enter__", enter_after_strangers)
    with Ranks(2) as ranks:
        assert ranks.run(rank) == [0, 1]
    assert len(strangers) == (8 if module._FORKS else 4)
    for stranger in strangers:
        with stranger, contextlib.suppress(ConnectionResetError):
            while stranger.recv(1024):
                pass  # until the other side hangs up, or 20 s of silence


def test_who_only_has_strangers_does_not_wait_for_ever(tmp_path):
    with module._Door() as door, socket.create_connection(door.setting["address"]):
        with soon(), pytest.raises(RankError, match="no answer from a new process"):
            door.accept(1, [], tmp_path)


@FORKS
def test_a_start_that_is_broken_off_leaves_nothing(monkeypatch, tmp_path):
    def break_off(*args):
        raise KeyboardInterrupt

    module.close()
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module._Door, "accept", break_off)
    with pytest.raises(KeyboardInterrupt):
        Ranks(2)
    assert list(tmp_path.iterdir()) == [] and descendants() == []
    monkeypatch.undo()
    with Ranks(2) as ranks:
        assert ranks.run(rank) == [0, 1]
