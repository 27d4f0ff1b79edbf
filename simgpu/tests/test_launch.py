"""Ranks of a launcher behind `python -m simgpu`: forked, and as in a new Python."""

import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import psutil
import pytest

from simgpu._launch.program import can_run
from simgpu._launch.server import ForkedRank, RankServer
from simgpu._launchers import _CAN_FORK
from support import programs
from support.limits import JOB, SHORT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _CAN_FORK, reason="ranks are forked on Linux"),
]

# what a program can find out about the process in which it runs
FACTS = """
    import gc, json, os, random, signal, sys, threading
    import neighbour

    os.environ["OMP_NUM_THREADS"] = "2"  # before PyTorch is there
    facts = {
        "arguments": sys.argv, "all": sys.orig_argv[1:], "path": sys.path[0],
        "main": [__name__, __file__, str(__spec__), type(__loader__).__name__],
        "names": sorted(globals()),
        "torch": "torch" in sys.modules,
        "folder": os.getcwd(),
        "session": os.getsid(0) == os.getpgid(0) == os.getpid(),
        "files": sorted(os.listdir("/proc/self/fd")),
        "signals": [str(signal.getsignal(n)) for n in (1, 2, 10, 13, 15)],
        "threads": threading.active_count(),
        "unbuffered": sys.stdout.write_through,
        "environ": {k: v for k, v in sorted(os.environ.items())
                    if not k.startswith("TORCHELASTIC") and "PORT" not in k},
    }
    with open("/proc/self/environ") as file:
        shown = dict(p.split("=", 1) for p in file.read().split(chr(0)) if p)
    facts["shown"] = {k: v for k, v in shown.items()
                      if k in facts["environ"] and k != "SIMGPU_CHILDREN"}
    with open("/proc/self/cmdline") as file:
        facts["command"] = file.read().rstrip(chr(0)).split(chr(0))[1:]
    import torch
    facts["gpus"] = torch.cuda.device_count()
    facts["workers"] = torch.get_num_threads()
    facts["spec"] = torch.__spec__.origin
    import numpy
    differs = [random.random(), numpy.random.rand(), gc.get_freeze_count() > 0]
    with open(f"facts-{os.environ['RANK']}.json", "w") as file:
        json.dump([facts, differs], file)
"""

# the folder of a command's programs, and its list of cards
OF_ONE_LAUNCH = re.compile(
    re.escape(tempfile.gettempdir()) + r"/simgpu\w+|/proc/\d+/fd/\d+"
)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def torchrun(folder: Path, *arguments, **environment) -> programs.Done:
    return programs.simulated(
        folder, "--gpus", 2, "torchrun", *arguments, new_python=True, **environment
    )


def facts_of(folder: Path) -> list:
    """What each rank has found, first those facts that any process would find.

    What bears the name of one launch reads the same for each.
    """
    texts = [(folder / f"facts-{n}.json").read_text() for n in range(2)]
    return [json.loads(OF_ONE_LAUNCH.sub("of this launch", text)) for text in texts]


@pytest.fixture
def signals_ignored():
    """As `nohup` and the background of a shell script start what they start."""
    numbers = signal.SIGHUP, signal.SIGINT, signal.SIGUSR1
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_forked_rank_finds_what_a_new_python_finds(tmp_path, signals_ignored):
    write(tmp_path, "facts.py", FACTS)
    write(tmp_path, "neighbour.py", "")
    started = ("--nproc-per-node=2", "facts.py", "-x", "an argument")
    done = torchrun(tmp_path, *started)
    assert done.status == 0, done.stderr
    forked = facts_of(tmp_path)
    # of a module that has a name of Python's own, the program is to have its own
    shutil.copy(queue.__file__, tmp_path)
    done = torchrun(tmp_path, *started)
    assert done.status == 0, done.stderr
    new = facts_of(tmp_path)
    for rank in range(2):
        for name, fact in forked[rank][0].items():
            assert fact == new[rank][0][name], name
        assert forked[rank][1][2] and not new[rank][1][2]
    assert forked[0][0]["gpus"] == 2 and not forked[0][0]["torch"]
    assert forked[0][0]["shown"]["LOCAL_RANK"] == "0"
    for mine, other in zip(forked[0][1][:2], forked[1][1][:2], strict=True):
        assert mine != other  # random numbers


MODULE = """
    import importlib.util, sys
    assert importlib.util.find_spec("torch") is not None  # only asks
    from torch.cuda import device_count
    print(__name__, __spec__.name, sys.argv[1:], device_count(), flush=True)
"""


def test_without_forks_each_rank_has_hashes_of_its_own(tmp_path):
    write(tmp_path, "hashes.py", "import gc; print(hash('a'), gc.get_freeze_count())")
    for options, count in ([], 1), (["--no-fork"], 2):
        done = programs.simulated(
            tmp_path, "--gpus", 2, *options, "torchrun", "--nproc-per-node=2",
            "hashes.py", new_python=True,
        )  # fmt: skip
        hashes, frozen = zip(*map(str.split, done.stdout.splitlines()), strict=True)
        assert len(hashes) == 2 and len(set(hashes)) == count, done.stderr
        assert (set(frozen) == {"0"}) is bool(options)


def test_a_module_is_run_and_its_output_is_written_where_torchrun_is_told(tmp_path):
    write(tmp_path, "tool.py", MODULE)
    logs = tmp_path / "logs"
    done = torchrun(
        tmp_path, "--nproc-per-node=2", "--redirects=1", f"--log-dir={logs}", "-m",
        "tool", "a",
    )  # fmt: skip
    assert done.status == 0, done.stderr
    assert done.stdout == ""
    found = [path.read_text() for path in logs.rglob("stdout.log")]
    assert found == ["__main__ tool ['a'] 2\n"] * 2


def test_a_program_that_is_no_python_is_started_as_ever(tmp_path):
    done = torchrun(tmp_path, "--nproc-per-node=2", "--no-python", "printenv", "RANK")
    assert sorted(done.stdout.split()) == ["0", "1"], done.stderr


ENDS = """
    import atexit, os, signal, sys, threading, time

    how = sys.argv[1]
    left = open("left.txt", "w")
    left.write("written")
    class Circle:
        def __del__(self):
            print("freed", flush=True)
    circle = Circle()
    circle.me = circle
    atexit.register(print, "at exit")
    threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
    if how == "text":
        sys.exit("no more")
    if how == "raise":
        raise ValueError("enough")
    if how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if how == "again":
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    "how, status, words",
    [
        ("well", 0, ""),
        ("text", 1, "no more\n"),
        ("raise", 1, "ValueError: enough"),
        ("interrupt", -2, "KeyboardInterrupt"),
        ("again", 0, "exitcode: -9"),
    ],
)
def test_a_rank_ends_as_python_does(tmp_path, how, status, words):
    write(tmp_path, "ends.py", ENDS)
    options = ["--max-restarts=1"] if how == "again" else []
    done = torchrun(tmp_path, "--nproc-per-node=1", *options, "ends.py", how)
    assert done.stdout == "thread\nat exit\nfreed\n", done.stderr
    assert (tmp_path / "left.txt").read_text() == "written"
    assert words in done.stderr
    assert done.status == (status and 1)
    if status:
        assert f"exitcode  : {status} " in done.stderr
    if how == "raise":
        first, _, _ = done.stderr.partition("Error: enough")
        assert first.count("  File ") == 1  # the program's own line


HOLDS = """
    import os, subprocess, sys, time
    wait = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(os.getpid(), flush=True)
    wait.wait()
"""


@pytest.fixture
def held(tmp_path):
    """A job whose ranks sleep: the command, the launcher, the server and the ranks."""
    write(tmp_path, "holds.py", HOLDS)
    environ = {k: v for k, v in os.environ.items() if k != "SIMGPU"}
    command = subprocess.Popen(
        [sys.executable, "-m", "simgpu", "--gpus", "2", "torchrun",
         "--nproc-per-node=2", "holds.py"],
        cwd=tmp_path, env=environ, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    late = threading.Timer(JOB, command.kill)
    late.start()
    every = [psutil.Process(command.pid)]
    try:
        ranks = [int(command.stdout.readline()) for _ in range(2)]
        (launcher,) = [child for child in every[0].children() if child.children()]
        (server,) = [p for p in launcher.children() if p.pid not in ranks]
        every += [launcher, server, *map(psutil.Process, ranks)]
        every += [child for rank in every[3:] for child in rank.children()]
        yield command, *every[1:5]
    finally:
        late.cancel()
        for process in every:
            if process.is_running():
                process.kill()
        command.wait(SHORT)
        command.stdout.close()


def test_a_signal_to_the_command_ends_launcher_server_and_ranks(held):
    command, *others = held
    command.send_signal(signal.SIGTERM)
    assert command.wait(SHORT) != 0
    _, alive = psutil.wait_procs(others, SHORT)
    assert alive == []


def test_a_command_that_is_killed_leaves_nothing_running(held):
    command, *others = held
    others += [child for rank in others[2:] for child in rank.children()]
    assert len(others) == 6
    command.kill()
    _, alive = psutil.wait_procs(others, SHORT)
    assert alive == []


def test_without_its_launcher_the_server_ends_and_the_ranks_live_on(held):
    command, launcher, server, *ranks = held
    launcher.kill()
    assert command.wait(SHORT) == 128 + signal.SIGKILL
    _, alive = psutil.wait_procs([launcher, server], 10)
    assert alive == [] and all(rank.is_running() for rank in ranks)


def test_the_loss_of_the_server_disturbs_nobody(held):
    command, launcher, server, *ranks = held
    server.kill()  # what is left of it, its launcher keeps to its own end
    ranks[0].kill()  # torchrun then ends the other one, and itself
    assert command.wait(SHORT) == 1
    _, alive = psutil.wait_procs([launcher, *ranks], 10)
    assert alive == []


def test_a_server_that_is_gone_leaves_the_work_to_python(capfd):
    here, there = socket.socketpair()
    there.close()
    server = RankServer(here)
    words = [sys.executable, "-u", "-c", "print('started')"]
    for _ in range(2):
        assert server.popen(words, start_new_session=True).wait() == 0
    assert capfd.readouterr().out == "started\n" * 2


def test_the_end_of_a_forked_process_is_noticed_once():
    child = subprocess.Popen(["sleep", "600"])
    rank = ForkedRank(["sleep", "600"], child.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(0.01)  # the limit is what is tested
    assert rank.poll() is None
    rank.terminate()
    assert rank.wait(SHORT) == rank.wait() == rank.poll() == -signal.SIGTERM
    rank.kill()  # nobody: the number may be another process's by now
    assert child.wait(SHORT) is not None  # it has been waited for


def test_what_cannot_run_in_a_forked_process_does_not(tmp_path):
    script = write(tmp_path, "train.py", "")
    write(tmp_path, "words", "no script")
    python = [sys.executable, "-u"]
    assert can_run([*python, str(script), "-x"], "/")
    assert can_run([*python, "train.py"], str(tmp_path))
    assert can_run([*python, "-m", "train"], str(tmp_path))
    for words in (
        [*python], [*python, "-m"], [*python, "missing.py"], [*python, "words"],
        [*python, "."], ["python", "-u", "train.py"], [sys.executable, "train.py"],
    ):  # fmt: skip
        assert not can_run(words, str(tmp_path)), words
    (tmp_path / "json").mkdir()  # no module: Python's own is found
    assert can_run([*python, "train.py"], str(tmp_path))
    write(tmp_path / "json", "__init__.py", "")
    assert not can_run([*python, "train.py"], str(tmp_path))
    assert not can_run([*python, "-m", "train"], str(tmp_path))
