"""Real ranks: they come up, answer in order, fail loudly and leave nothing behind."""

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
from multiprocessing.connection import Connection
from pathlib import Path
from shutil import which
from types import SimpleNamespace

import cloudpickle
import psutil
import pytest

from simgpu import _ranks as module
from simgpu._ranks import (
    RankError,
    Ranks,
    fork_server,
    output,
    pickling,
    remote_call,
    worker,
)
from simgpu._ranks import notebook as ranks_module
from simgpu._ranks.listener import Listener
from simgpu._ranks.magic import run_cell_in_ranks
from simgpu._ranks.python_process import MAIN
from simgpu._ranks.rank_error import Failure, Frame, failure_report
from simgpu._ranks.rank_processes import RankProcesses
from support.limits import JOB, MOMENT, SHORT
from support.waiting import wait

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
FORKS = pytest.mark.skipif(not fork_server.CAN_FORK, reason="no fork here")
AFRESH = "The 4 ranks have been started afresh; what they had defined is gone."
# Functions of this file are sent like those of a notebook: no rank imports pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", autouse=True)
def at_the_end():
    yield
    module.close()
    assert descendants() == []


def descendants() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [process for process in children if MAIN in process.cmdline()]


@pytest.fixture
def four():
    """Four ranks, which work afterwards, whatever a test has done to them."""
    with Ranks(4, device="cpu", timeout=JOB) as ranks:
        yield ranks
        assert ranks.run(all_sum) == [6.0] * 4


@contextlib.contextmanager
def soon():
    """Before a collective would have given up by itself, on a busy machine, too."""
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    assert took < SHORT, f"took {took:.1f} s"


def error_of(function, *args, **kwargs) -> str:
    """What the learner is told, soon enough."""
    with soon(), pytest.raises(RankError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def all_sum(value=None) -> float:
    import torch
    import torch.distributed as dist

    x = torch.tensor([float(dist.get_rank() if value is None else value)])
    dist.all_reduce(x)
    return x.item()


def skipped_by_rank_0() -> float:
    return 0.0 if rank() == 0 else all_sum()


# -- what they do ----------------------------------------------------------------------


def test_item_r_came_from_rank_r(four):
    import torch

    factor = torch.tensor([1.0, 2.0])

    class Box:
        def __init__(self, value):
            self.value = value

    def scaled(box, plus=0):
        return Box(factor * box.value * rank() + plus)

    assert four.run(rank) == [0, 1, 2, 3]
    assert four.run(all_sum, 2) == four.run(all_sum, value=2) == [8.0] * 4
    assert four.run(torch.ones, 1000, 1000)[3].sum() == 1e6  # more than a pipe holds
    for r, box in enumerate(four.run(scaled, Box(10), plus=1)):
        assert box.value.tolist() == [10 * r + 1, 20 * r + 1]
    assert repr(four) == "Ranks(4, gloo)"


def test_opening_ranks_says_what_they_are_and_closes_the_older_ones(capsys):
    older = Ranks(1, device="cpu")
    with Ranks(2, device="cpu") as newer:
        assert "are closed; open new ones" in error_of(older.run, rank)
        older.close()  # does nothing
        assert module.current() is newer and newer.run(rank) == [0, 1]
    assert module.current() is None
    assert capsys.readouterr().out.splitlines() == [
        "1 real rank: processes on the CPU, backend gloo.",
        "2 real ranks: processes on the CPU, backend gloo.",
    ]


def test_prints_are_shown_in_rank_order_before_the_call_returns(four, capsys):
    def speak():
        time.sleep(0.05 * (3 - rank()))  # the last rank is the first to speak
        print("one\ntwo")
        print("no end of line", end="", flush=True)
        os.write(2, b" from C\n")

    said = ("one", "two", "no end of line from C")
    for _ in range(3):
        four.run(speak)
        lines = capsys.readouterr().out.splitlines()
        assert lines == [f"[{r}] {words}" for r in range(4) for words in said]


def test_prints_of_c_and_between_calls_are_shown(four, capsys, tmp_path):
    def speak_later():
        import ctypes

        def later():
            while not os.path.exists(told):
                time.sleep(0.01)
            print("later")

        ctypes.CDLL(None).puts(b"from C")
        threading.Thread(target=later, daemon=True).start()

    told = str(tmp_path / "now")
    four.run(speak_later)
    said = [f"[{r}] from C" for r in range(4)]
    assert capsys.readouterr().out.splitlines() == said
    files = [each.path for each in four._workers.outputs]
    Path(told).touch()
    wait(lambda: all(b"later" in file.read_bytes() for file in files), "later")
    four.run(rank)
    said = [f"[{r}] later" for r in range(4)]
    assert capsys.readouterr().out.splitlines() == said


def test_much_output_does_not_block_and_more_is_cut(four, capsys, monkeypatch):
    four.run(lambda: print(("x" * 99 + "\n") * 20_000))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 * 20_001 and lines[-2] == "[3] " + "x" * 99
    monkeypatch.setattr(output, "SHOWN", 1000)
    four.run(lambda: print(("x" * 99 + "\n") * 1000))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 4 * 13 and "... (more than" in lines[-1]


def test_cells_keep_their_names_from_one_to_the_next(four, capsys):
    run_cell_in_ranks("", "x = torch.ones(1) * rank\ndist.all_reduce(x)\ndist = None")
    run_cell_in_ranks("", "print(world_size)\nx.item() + 0.5")
    assert capsys.readouterr().out.splitlines() == [
        f"[{r}] {words}" for r in range(4) for words in ("4", "6.5")
    ]
    four.cell("class Own:\n    pass\nall, own = [None] * 4, Own()")
    four.cell("import torch.distributed as dist\ndist.all_gather_object(all, own)")
    four.cell("assert isinstance(all[3], Own)")


def test_new_ranks_know_the_environment_the_folder_and_the_modules(
    monkeypatch, tmp_path
):
    def look():
        import numpy
        import torch
        import torch.distributed as dist
        from own_module import word

        detail = dist.get_debug_level() == dist.DebugLevel.DETAIL
        local, threads = os.environ["LOCAL_RANK"], torch.get_num_threads()
        drawn = numpy.random.rand()  # noqa: NPY002
        return drawn, (detail, local, os.getcwd(), threads, word)

    Ranks(1, device="cpu").close()  # now the fork server is in another folder
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "own_module.py").write_text("word = 'known'")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(modules)
    with Ranks(2, threads=2, device="cpu") as ranks:
        (first, _), (second, seen) = ranks.run(look)
    assert seen == (True, "1", str(tmp_path), 2, "known")
    assert first != second  # or all forked ranks draw the same numbers


# -- bad requests ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, 33, 64, 2.0, "4", None, True])
def test_impossible_ranks_are_refused(size):
    known = isinstance(size, int) and size is not True
    words = f"{size} ranks cannot be started" if known else "whole number"
    with pytest.raises(ValueError, match=words):
        Ranks(size)


def test_what_cannot_be_sent_says_so(four):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot send this to the ranks: .*lock"):
        four.run(lambda: lock)
    told = error_of(four.run, threading.Lock)
    assert told.startswith("ranks 0, 1, 2, 3: TypeError: the result, a lock, cannot be")


def test_the_magic_says_what_it_lacks():
    assert "there are no ranks; open some" in error_of(run_cell_in_ranks, "", "1")
    with pytest.raises(ValueError, match="usage: %%ranks"):
        run_cell_in_ranks("--timeout soon", "1")


def test_two_threads_do_not_mix_their_results(four, tmp_path):
    go_on, answers = tmp_path / "go on", []

    def until_told():
        while not go_on.exists():
            time.sleep(0.01)
        return rank()

    thread = threading.Thread(target=lambda: answers.append(four.run(until_told)))
    thread.start()
    wait(four._busy.locked, "the call of the thread")
    assert error_of(four.run, rank) == "these ranks are at work on another call"
    go_on.touch()
    thread.join(SHORT)
    assert answers == [[0, 1, 2, 3]] and four.run(rank) == [0, 1, 2, 3]


# -- failures --------------------------------------------------------------------------


def raise_error():
    raise ValueError("bad batch")


def end_by(number: int):
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    "how, words",
    [
        (raise_error, "ValueError: bad batch\n"),
        (end_by(signal.SIGKILL), "the process was killed by SIGKILL"),
        (end_by(signal.SIGSEGV), "the process was killed by SIGSEGV"),
        (lambda: os._exit(3), "the process ended with status 3"),
    ],
)
def test_a_rank_that_fails_is_named_and_where_the_others_wait(
    four, how, words, monkeypatch
):
    monkeypatch.setattr(remote_call, "GRACE_SECONDS", MOMENT)

    def program():
        if rank() == 1:
            how()
        return all_sum()

    told = error_of(four.run, program)
    assert f"rank 1: {words}" in told
    assert "in all_sum: dist.all_reduce(x)" in told
    assert told.endswith(AFRESH) and "site-packages" not in told
    if how is raise_error:
        assert 'in raise_error: raise ValueError("bad batch")' in told
        assert "ranks 0, 2, 3: did not finish; waiting\n" in told


def test_the_same_error_in_all_ranks_is_told_once(four):
    def deeper(n=0):
        return deeper(n + 1)

    told = error_of(four.run, raise_error)
    assert told.startswith("ranks 0, 1, 2, 3: ValueError: bad batch\n")
    assert told.count("bad batch") == 2 and "afresh" not in told  # it, and its line
    assert error_of(four.run, sys.exit, 7) == "ranks 0, 1, 2, 3: SystemExit: 7"
    told = error_of(four.run, deeper)
    assert "RecursionError" in told and " more\n" in told and told.count("\n") < 12


def test_errors_of_cells_name_their_lines_and_the_other_ranks_finish(four):
    cell = """import time
def f():
    return 1 / 0
if rank == 2:
    f()
time.sleep(0.5)"""
    assert error_of(four.cell, cell) == (
        "rank 2: ZeroDivisionError: division by zero\n"
        "  this cell, line 5: f()\n"
        "  this cell, line 3, in f: return 1 / 0"
    )
    told = error_of(four.cell, "f()")
    assert "this cell, line 1: f()\n  an earlier cell, line 3, in f: return" in told
    told = error_of(four.cell, "x = 1\n1 +")
    assert "SyntaxError: " in told and told.endswith("\n  this cell, line 2: 1 +")
    told = error_of(run_cell_in_ranks, "", "x = 1\nx / 0")  # below a line %%ranks
    assert "\n  this cell, line 3: x / 0" in told


def test_a_file_of_this_folder_is_named_without_the_path_to_it(tmp_path, monkeypatch):
    """So a stored error is the same on every machine, and of every Python."""
    here, elsewhere = tmp_path / "here", str(tmp_path / "model.py")
    here.mkdir()
    monkeypatch.chdir(here)
    inside = os.path.join("scripts", "model.py")
    # before Python 3.12 a comprehension has a frame of its own
    stack = [Frame(str(here / inside), 1, "f"), Frame(str(here / inside), 4, "<listcom"
             "p>"), Frame(elsewhere, 2, "g")]  # fmt: skip
    told = failure_report({}, {}, {0: Failure("ValueError: no", stack)})
    assert f"\n  {inside}, line 4, in f: " in told and "line 1," not in told
    assert f"\n  {elsewhere}, line 2, in g: " in told


RESIDENT = """
import gc, weakref, psutil, torch
def resident():
    return psutil.Process().memory_info().rss
class Node: pass
"""


@LINUX
def test_after_a_call_a_rank_frees_cycles_and_gives_memory_back(four):
    """Python's own collector is off here, and a tensor at the end keeps the heap."""
    cell = """
        gc.disable()
        before, node = resident(), Node()
        node.itself, node.tensors = node, [torch.ones(4096) for _ in range(8000)]
        last, grown, alive = torch.ones(4096), resident() - before, weakref.ref(node)
        del node
    """
    four.cell(RESIDENT + textwrap.dedent(cell))
    four.cell("freed, left = alive() is None, resident() - before\ngc.enable()")
    for freed, grown, left in four.run(found_in_cells, "freed", "grown", "left"):
        assert freed and grown > 120e6 and left < 20e6


@LINUX
def test_a_large_block_goes_back_as_soon_as_it_is_free(four):
    """glibc takes the second one from its heap, and keeps it, once one was freed."""
    cell = """
        first = torch.ones(4_000_000)
        del first
        before = resident()
        second, last = torch.ones(4_000_000), torch.ones(1024)
        grown = resident() - before
        del second
        left = resident() - before
    """
    four.cell(RESIDENT + textwrap.dedent(cell))
    for grown, left in four.run(found_in_cells, "grown", "left"):
        assert grown > 15e6 and left < 3e6


def found_in_cells(*names: str) -> tuple:
    import __main__

    return tuple(getattr(__main__, name) for name in names)


def test_a_rank_that_died_between_two_calls_is_noticed(four):
    os.kill(four.run(os.getpid)[3], signal.SIGKILL)
    assert four._workers.connections[3].poll(SHORT)  # it has hung up
    assert "rank 3: the process was killed" in error_of(four.run, rank)


def test_a_collective_gives_up_by_itself():
    with Ranks(2, timeout=MOMENT) as two:
        assert "rank 1: " in error_of(two.run, skipped_by_rank_0)
        assert two.run(rank) == [0, 1]


def mismatch():
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1 + rank()))


@pytest.mark.parametrize(
    "program, words",
    [(skipped_by_rank_0, "ranks 1, 2, 3: did not finish"), (mismatch, "rank")],
)
def test_wrong_collectives_are_found_within_the_time_limit(four, program, words):
    assert error_of(four.run, program, timeout=MOMENT).startswith(words)


@pytest.mark.parametrize("took, grace", [(0.1, 3), (10, 20)])
def test_ranks_that_were_slow_to_come_up_have_longer_to_answer(took, grace):
    workers = types.SimpleNamespace(outputs=[], took=took)
    assert remote_call.RemoteCall(workers).grace == grace


def test_ranks_that_lost_their_connections_start_afresh(four, monkeypatch):
    limit = MOMENT  # it is over without rank 2

    def all_but_two():
        from datetime import timedelta

        import torch.distributed as dist

        if dist.get_rank() != 2:
            dist.monitored_barrier(timeout=timedelta(seconds=limit))

    monkeypatch.setattr(remote_call, "GRACE_SECONDS", MOMENT)
    told = error_of(four.run, all_but_two)
    assert told.endswith(AFRESH) and "<string>" not in told


def test_an_endless_loop_is_shown_and_ended(four):
    told = error_of(
        run_cell_in_ranks, f"--timeout {MOMENT}", "while rank == 1:\n    1 + 1"
    )
    assert told.startswith("rank 1: did not finish; waiting\n  this cell, line")
    assert told.endswith(AFRESH)


def interrupted(ranks: Ranks, folder: Path, function) -> None:
    """Ctrl-C, once all four ranks are in a function."""

    def program():
        (folder / str(rank())).touch()
        return function()

    def interrupt():
        wait(lambda: len(os.listdir(folder)) == 4, "the start of all ranks")
        time.sleep(0.3)  # from their first line into the collective
        os.kill(os.getpid(), signal.SIGINT)

    # who runs the tests in the background has told this process to ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    try:
        with soon(), pytest.raises(KeyboardInterrupt):
            ranks.run(program)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize(
    "function, afresh",
    [(lambda: time.sleep(10_000), False), (skipped_by_rank_0, True)],
    ids=["python", "collective"],
)
def test_an_interrupt_ends_the_call(four, function, afresh, capsys, tmp_path):
    interrupted(four, tmp_path, function)
    assert (AFRESH in capsys.readouterr().out) == afresh


def test_an_answer_that_was_not_shown_is_not_the_next_ones(four, monkeypatch):
    def break_off(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(remote_call.RemoteCall, "finish", break_off)
    with pytest.raises(KeyboardInterrupt):
        four.run(lambda: "old")
    monkeypatch.undo()
    assert four.run(lambda: "new") == ["new"] * 4


def test_an_interrupt_within_an_answer_starts_the_ranks_afresh(four, monkeypatch):
    received, restart = Connection.recv, four._restart

    def break_off(connection):
        if any(connection is own for own in four._workers.connections.values()):
            raise KeyboardInterrupt
        return received(connection)

    def restart_unharmed():
        monkeypatch.undo()
        restart()

    monkeypatch.setattr(Connection, "recv", break_off)
    four._restart = restart_unharmed
    with pytest.raises(KeyboardInterrupt):
        four.run(rank)
    assert four.run(rank) == [0, 1, 2, 3]


def test_a_stack_is_read_when_its_lines_are_whole(tmp_path: Path):
    dump = f"""Current thread 0x00007f:
  File "\\xdcbung.py", line 3 in work
  File "{worker.__file__}", line 120 in main
"""
    stack = tmp_path / "0.stack"

    def signalled(rank, number):
        stack.write_text(dump[:-4])  # "in m"
        threading.Timer(0.2, stack.write_text, [dump]).start()

    group = SimpleNamespace(folder=tmp_path, send_signal=signalled)
    outermost = (worker.__file__, 120, "main")
    found = RankProcesses.stack(group, 0, worker.__file__)
    assert found == [outermost, ("Übung.py", 3, "work")]


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(RankError("rank 1: no")))
    assert str(error) == "rank 1: no"
    assert error._render_traceback_() == ["RankError: rank 1: no"]


def test_functions_that_are_sent_keep_the_names_of_their_files():
    source = "def outer():\n    def inner():\n        return 1 / 0\n    return inner()"
    namespace = {"__name__": "__main__"}
    exec(compile(source, "<a cell>", "exec"), namespace)
    received = pickle.loads(pickling.dumps(namespace["outer"]))
    with pytest.raises(ZeroDivisionError) as caught:
        received()
    files = [str(entry.path) for entry in caught.traceback[-2:]]
    assert files == ["<a cell>", "<a cell>"]


# -- starting --------------------------------------------------------------------------


def test_fifty_starts_and_stops_in_a_row():
    for i in range(50):
        with Ranks(2, device="cpu") as ranks, soon():
            assert ranks.run(all_sum, i) == [2.0 * i] * 2
            pids, folder = [*ranks._workers.pids.values()], ranks._workers.folder
            assert folder.exists()
        assert not any(map(psutil.pid_exists, pids)) and not folder.exists()


@FORKS
def test_a_fork_server_that_dies_is_told_at_once_and_replaced(four):
    threading.Timer(0.5, fork_server._running.process.kill).start()
    told = error_of(four.run, time.sleep, 50)
    assert "ended, and the one that forks ranks did too" in told
    assert four.run(rank) == [0, 1, 2, 3]


def test_spawned_ranks_do_the_same(monkeypatch):
    """As on Windows, where there is no fork."""
    monkeypatch.setattr(fork_server, "CAN_FORK", False)
    with Ranks(2, device="cpu") as ranks:
        pids = ranks.run(os.getpid)
        assert ranks.run(all_sum) == [1.0, 1.0]
        told = error_of(ranks.run, lambda: os._exit(3) if rank() else None)
        assert told.startswith("rank 1: the process ended with status 3\n")
        assert ranks.run(all_sum) == [1.0, 1.0]
    assert not any(map(psutil.pid_exists, pids))


@FORKS
def test_a_notebook_that_hangs_up_while_its_fork_server_reports_leaves_nothing():
    """A process that is killed hangs up before it is dead, and its ranks end then."""
    module.close()
    ranks = Ranks(
        8, device="cpu"
    )  # what is sent first to one that has hung up raises nothing
    server, pids = fork_server._running, [*ranks._workers.pids.values()]
    try:
        os.kill(server.process.pid, signal.SIGSTOP)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        states = [psutil.Process(pid).status for pid in pids]
        wait(lambda: {state() for state in states} == {"zombie"}, "the ranks' end")
        server.connection.close()
        os.kill(server.process.pid, signal.SIGCONT)
        assert server.process.wait(SHORT) == 0
        assert not server.folder.exists()
    finally:
        ranks_module._forget()
        server.close()


def test_who_has_no_key_is_turned_away(monkeypatch):
    """As programs that go on calling at a port that another one has had.

    The ranks are opened in a thread, and live longer than it.
    """
    enter, strangers, opened = Listener.__enter__, [], []

    def enter_after_strangers(listener):
        for words in (b"", b"\0\0", b"\xff" + bytes(9), b"GET / HTTP/1.1\r\n\r\n"):
            strangers.append(socket.create_connection(listener.address, SHORT))
            strangers[-1].sendall(words)
        socket.create_connection(listener.address, SHORT).close()
        return enter(listener)

    module.close()  # or only the ranks would connect, not the fork server too
    monkeypatch.setattr(Listener, "__enter__", enter_after_strangers)
    thread = threading.Thread(
        target=lambda: opened.append(Ranks(2, device="cpu")), daemon=True
    )
    thread.start()
    thread.join(SHORT)
    time.sleep(1)  # the system would tell the children of a thread at once
    with opened[0] as ranks:
        assert ranks.run(rank) == [0, 1]
    assert len(strangers) == (8 if fork_server.CAN_FORK else 4)
    for stranger in strangers:
        with stranger, contextlib.suppress(ConnectionResetError):
            while stranger.recv(1024):
                pass  # until the other side hangs up, or says nothing for long


def test_who_never_gives_a_key_is_not_waited_for():
    with Listener() as listener, socket.create_connection(listener.address):
        told = error_of(listener.accept, 1, [])  # the limit is what is tested
    assert told == "no answer from a new process after 1 s"


@FORKS
def test_a_start_that_fails_leaves_nothing(monkeypatch, tmp_path):
    def break_off(*args):
        raise KeyboardInterrupt

    def kill(server, settings):
        server.process.kill()

    module.close()
    monkeypatch.setattr(fork_server.tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Listener, "accept", break_off)
        Ranks(2, device="cpu")
    assert list(tmp_path.iterdir()) == [] and descendants() == []
    with monkeypatch.context() as patched:
        patched.setattr(fork_server.ForkServer, "fork", kill)
        assert error_of(Ranks, 2, device="cpu").endswith(
            "with status -9: it said nothing"
        )
    with Ranks(2, device="cpu") as ranks:
        assert ranks.run(rank) == [0, 1]
    module.close()
    assert list(tmp_path.iterdir()) == []


# -- nothing is left -------------------------------------------------------------------


@FORKS
def test_what_a_rank_started_ends_with_it():
    with Ranks(2, device="cpu") as ranks:
        pids = ranks.run(lambda: subprocess.Popen(["sleep", "10000"]).pid)
        assert all(map(psutil.pid_exists, pids))
    started = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(started, timeout=SHORT)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


def start_script(code: str, *, before=(), **environ: str) -> subprocess.Popen:
    """Start a Python program that opens ranks of its own."""
    return subprocess.Popen(
        [*before, sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **environ},
    )  # fmt: skip


def last_line(process: subprocess.Popen):
    """What the program has printed last, as JSON."""
    out, err = process.communicate(timeout=JOB)
    assert out, err
    return json.loads(out.splitlines()[-1])


NOTEBOOK = """
    import json, os, psutil, signal, sys, threading, time
    from simgpu import Ranks
    def total(i):
        import torch, torch.distributed as dist
        x = torch.full((1,), float(i)); dist.all_reduce(x); return x.item()
    def hang():
        import torch.distributed as dist
        time.sleep(10_000) if dist.get_rank() == 0 else total(1)
    def kill():
        os.kill(os.getpid(), signal.SIGKILL)
    ranks = Ranks(2, device="cpu")
    for i in range(100):
        assert ranks.run(total, i) == [2.0 * i] * 2
    children = [p.pid for p in psutil.Process().children(recursive=True)]
    assert set(ranks.run(os.getpid)) < set(children)
    print(json.dumps(children), flush=True)
    {ending}
"""
ENDINGS = {  # of a notebook -> its exit status
    "": 0,
    "raise SystemExit(3)": 3,
    "1 / 0": 1,
    "kill()": -9,
    "threading.Timer(0.5, kill).start(); ranks.run(hang)": -9,
}


@FORKS
@pytest.mark.slow
def test_notebooks_at_once_end_with_all_that_they_have_started(tmp_path):
    started = [
        start_script(NOTEBOOK.replace("{ending}", ending), TMPDIR=str(tmp_path))
        for ending in ENDINGS
    ]
    for process, status in zip(started, ENDINGS.values(), strict=True):
        children = [pid for pid in last_line(process) if psutil.pid_exists(pid)]
        assert process.returncode == status
        assert children == [] or status == -9  # these end a moment later
        alive = psutil.wait_procs(map(psutil.Process, children), timeout=SHORT)[1]
        assert alive == []
    names = [path.name for path in tmp_path.iterdir()]
    assert not [name for name in names if name.startswith(("ranks-", "pymp-"))]


@LINUX
def test_ranks_are_light_and_a_forked_child_leaves_them_alone():
    """The notebook's process does not import PyTorch."""
    benchmarks = str(Path(__file__).parent / "tools")
    script = start_script(f"""
        import json, os, sys
        sys.path.insert(0, {benchmarks!r})
        from ranks_start import shared_out_megabytes, step
        from simgpu import Ranks
        with Ranks(4, device="cpu") as ranks:
            ranks.run(step)
            megabytes = shared_out_megabytes()
            if (pid := os.fork()) == 0:
                sys.exit()
            os.waitpid(pid, 0)
            answers = ranks.run(int)
        with Ranks(2) as gpus:
            gpus.timeline()._repr_svg_(), gpus.memory()._repr_svg_()
        print(json.dumps([megabytes, "torch" in sys.modules, answers]))
    """)
    megabytes, imported, results = last_line(script)
    import torch

    most = 450 if torch.version.cuda is None else 700  # CUDA's libraries
    assert megabytes < most and not imported and results == [0] * 4


@LINUX
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting takes root"
)
def test_a_full_shared_memory_is_no_trouble():
    if missing := [name for name in ("mount", "unshare") if which(name) is None]:
        pytest.skip(f"not found: {', '.join(missing)}")
    inside = (
        "mount -t tmpfs -o size=64k tmpfs /dev/shm && "
        '(head -c 1M /dev/zero > /dev/shm/full || true) 2>/dev/null && exec "$@"'
    )
    code = """
        from simgpu import Ranks
        def total():
            import torch, torch.distributed as dist
            x = torch.ones(1_000_000); dist.all_reduce(x); return x.sum().item()
        with Ranks(2, device="cpu") as ranks:
            print(ranks.run(total))
    """
    script = start_script(code, before=("unshare", "-m", "sh", "-c", inside, "sh"))
    out, err = script.communicate(timeout=SHORT)
    if "not permitted" in err or "permission denied" in err:
        pytest.skip("this machine does not let root mount")
    assert out.splitlines()[-1] == "[2000000.0, 2000000.0]", err
