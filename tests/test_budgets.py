"""What the lessons may take is measured right, and what is too much is found."""

import contextlib
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell

from helpers.elastic import free_port
from tests import budgets, watch
from tests.test_harness import Course, outcomes
from tests.waiting import wait

pytestmark = pytest.mark.skipif(not watch.SOUND, reason="read from /proc")
NAME = "WATCH_TEST"
WAITS = "import sys\nprint(flush=True)\nx = sys.stdin.read()\n"
TOOK = {
    "peak": 1.1e9, "cpu": 30.0, "clock": 40.0, "others": 5.0, "left": [],
    "sockets": [], "stores": ["a store"], "questions": ["a question"],
    "uses_store": True, "files": [],
}  # fmt: skip
LEAVES_A_SERVER = """
import subprocess, sys
server = "import socket, time; s = socket.create_server(('', 0)); "
server += "print('listens', flush=True); time.sleep(170)"
words = [sys.executable, "-c", server]
child = subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE)
assert child.stdout.readline() == b"listens\\n"
"""
TOO_MUCH = f"""{LEAVES_A_SERVER}
from pathlib import Path
for folder in (Path.home(), Path(".")):
    size = (folder / "written.txt").write_text("here")
"""


@contextlib.contextmanager
def running(program: str, mark: str, **environment: str) -> Iterator[int]:
    """A Python process with a mark that has run a program, and waits."""
    with subprocess.Popen(
        [sys.executable, "-c", f"{program}\n{WAITS}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, NAME: mark, **environment},
    ) as process:
        process.stdout.readline()
        yield process.pid
        process.communicate(timeout=60)


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def watching(mark: str) -> Iterator[watch.Watch]:
    watched = watch.Watch(f"{NAME}={mark}")
    yield watched
    watched.stop()


# Measured


def test_memory_is_that_of_the_marked_and_counts_once_what_is_shared(mark, watching):
    forks = "import os\nblock = b'x' * 200_000_000\nx = os.fork()"
    with running("block = b'x' * 300_000_000", "another"), running(forks, mark):
        wait(lambda: watching.peak > 200e6, "the peak", 60)
    watching.stop()
    assert watching.peak < 300e6


def test_memory_that_was_touched_later_is_seen(mark, watching):
    later = "print(flush=True)\nx = input()\nblock = b'x' * 200_000_000"
    with subprocess.Popen(
        [sys.executable, "-c", f"{later}\n{WAITS}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, NAME: mark},
    ) as process:
        wait(lambda: watching.peak > 0, "a peak", 60)
        small = watching.peak
        process.stdin.write(b"\n")
        process.stdin.flush()
        wait(lambda: watching.peak > 200e6, "the peak", 60)
        process.communicate(timeout=60)
    assert small < 100e6


SERVER = "import socket\ns = socket.create_server({}, family=socket.{})"


@pytest.mark.parametrize(
    "program, found",
    [
        (SERVER.format("('0.0.0.0', 0)", "AF_INET"), "LISTEN 0.0.0.0 port"),
        (SERVER.format("('::', 0)", "AF_INET6"), "LISTEN :: port"),
        ("import socket\ns = socket.socket(type=socket.SOCK_DGRAM)\n"
         "s.bind(('0.0.0.0', 0))", "UDP 0.0.0.0 port"),
    ],
)  # fmt: skip
def test_sockets_on_all_addresses_are_seen(program, found, mark, watching):
    with running(program, mark) as pid:
        wait(lambda: watching.outward, "the socket", 60)
    (words,) = watching.outward
    assert words.startswith(found)
    assert f"process {pid}: " in words


def test_sockets_on_loopback_are_not_complained_of(mark, watching):
    """A server for both kinds of addresses sees loopback as ::ffff:127.0.0.1."""
    talks = SERVER.format("('::', 0), dualstack_ipv6=True", "AF_INET6")
    talks += "\nc = socket.create_connection(('127.0.0.1', s.getsockname()[1]))"
    talks += "\na, b = s.accept()\nu = socket.socket(type=socket.SOCK_DGRAM)"
    talks += "\nlocal = socket.create_server(('127.0.0.1', 0))"
    with running(talks, mark):
        wait(lambda: watching.outward, "the server", 60)
    assert all(words.startswith("LISTEN :: ") for words in watching.outward)
    assert len(watching.outward) == 1


def test_the_store_of_torchrun_is_told_from_other_sockets(mark, watching):
    port = str(free_port())
    server = SERVER.format(f"('', {port})", "AF_INET")
    with running(server, mark, RANK="0", MASTER_PORT=port):
        wait(lambda: watching.stores, "the store", 60)
    assert not watching.outward


@pytest.mark.parametrize("port, asks", [(53, True), (54, False)])
def test_who_asks_a_name_server_is_told_from_others(
    port, asks, mark, watching, monkeypatch
):
    monkeypatch.setattr(watch, "_is_loopback", lambda address: False)
    known, read = b"# ours\nnameserver 127.0.0.1\n", watch._read
    monkeypatch.setattr(
        watch, "_read", lambda path: known if "resolv" in path else read(path)
    )
    program = "import socket\ns = socket.socket(type=socket.SOCK_DGRAM)\n"
    with running(f"{program}s.connect(('127.0.0.1', {port}))", mark):
        wait(lambda: watching.questions or watching.outward, "the socket", 60)
    assert bool(watching.questions) is asks
    assert bool(watching.outward) is not asks


def test_the_sockets_of_who_has_ended_meanwhile_are_nobodys(watching, monkeypatch):
    monkeypatch.setattr(watch, "_read", lambda path: b"")
    with socket.create_server(("0.0.0.0", 0)):
        assert watch._connections(os.getpid())
        watching._note_sockets_of(os.getpid())
    assert not watching.outward


def test_what_breaks_a_watch_is_raised(monkeypatch):
    def breaks(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(watch.Watch, "_look", breaks)
    with pytest.raises(ZeroDivisionError):
        watch.Watch("a=b").stop()


def test_files_that_change(tmp_path):
    for name in ("kept", "written", "removed"):
        (tmp_path / name).touch()
    before = watch.files(tmp_path)
    (tmp_path / "written").write_text("1")
    (tmp_path / "removed").unlink()
    for folder in ("new", "__pycache__"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "made").touch()
    changed = watch.changed(before, watch.files(tmp_path))
    names = [path.removeprefix(f"{tmp_path}/") for path in changed]
    assert names == ["new/made", "removed", "written"]


def test_a_semaphore_that_somebody_has():
    lock = multiprocessing.get_context("spawn").Lock()  # with a name, for the child
    path = f"{watch.SHARED}/sem.{lock._semlock.name.lstrip('/')}"
    assert os.path.exists(path) and watch.unused([path]) == []


def test_shared_memory_that_nobody_has():
    block = SharedMemory(create=True, size=4096)
    path = f"{watch.SHARED}/{block.name.lstrip('/')}"
    try:
        assert watch.unused([path]) == []
        block.close()
        assert watch.unused([path]) == [path]
        assert watch.left([path], seconds=0.3) == [path]
        threading.Timer(0.3, block.unlink).start()
        assert watch.left([path], seconds=30) == []  # it was there for a moment only
    finally:
        with contextlib.suppress(FileNotFoundError):
            block.unlink()


# Judged


def test_what_is_allowed():
    assert budgets.over(TOOK) == []
    assert budgets.over({**TOOK, "clock": 500.0, "others": 450.0}) == []


@pytest.mark.parametrize(
    "more, said",
    [
        ({"peak": 0}, "none of its processes was seen"),
        ({"peak": 1.3e9}, "its processes had 1300 MB; 1200 MB is the most"),
        ({"cpu": 500.0}, "computed for 500 s"),
        ({"clock": 500.0}, "it took 500 s, 5 of them for others"),
        ({"left": ["process 7: sleep"]}, "left running: process 7: sleep"),
        ({"sockets": ["LISTEN 0.0.0.0"]}, "a socket not on loopback: LISTEN 0.0.0.0"),
        ({"uses_store": False}, "asked a name server: a question"),
        ({"files": ["a.txt"]}, "not in the temporary folder: a.txt"),
    ],
)
def test_what_is_too_much(more, said):
    (complaint,) = budgets.over({**TOOK, **more})
    assert said in complaint


def test_a_notebook_that_takes_too_much(tmp_path):
    course = Course(tmp_path)
    course.add("01", TOO_MUCH, "a = 1")
    course.add("02", "a = 1", "import os\nos._exit(1)")
    code, printed = course.pytest()
    assert code == 1
    assert outcomes(printed)["01 Cell 1"] == "PASSED"
    assert "FAILED notebooks/01.ipynb::budget" in printed
    assert "FAILED notebooks/02.ipynb::budget" not in printed
    for line in (
        r"left running: process \d+: .*time\.sleep\(170\)",
        r"a socket not on loopback: LISTEN 0\.0\.0\.0 port \d+",
        r"not in the temporary folder: .*/home-\w+/written\.txt",
        r"not in the temporary folder: .*/notebooks/written\.txt",
    ):
        assert re.search(line, printed), line
    assert "peak MB" in printed


def test_the_row_of_a_notebook_says_what_it_used_of_the_network():
    row = budgets.row({**TOOK, "notebook": "13"}, 4)
    assert row.startswith("13       1100        30.0     40.0  ")
    assert row.endswith("  1 stores of torchrun on all addresses  asked a name server")
    quiet = {**TOOK, "notebook": "01", "stores": [], "questions": []}
    assert budgets.row(quiet, 2) == "01     1100        30.0     40.0"


@pytest.mark.parametrize(
    "cell, uses",
    [
        (new_code_cell("words = ['-m', 'torch.distributed.run']"), True),
        (new_code_cell("!torchrun a.py"), True),
        (new_code_cell("store = TCPStore('127.0.0.1', port)"), True),
        (new_code_cell("import torch.distributed"), False),
        (new_markdown_cell("In practice: `torchrun`"), False),
    ],
)
def test_only_code_that_uses_a_store_may_ask_a_name_server(cell, uses):
    assert budgets.uses_store([new_code_cell("a = 1"), cell]) is uses


def test_a_part_of_a_notebook_is_not_judged(tmp_path):
    course = Course(tmp_path)
    course.add("01", "a = 1", "a")
    cells = ["notebooks/01.ipynb::Cell 0", "notebooks/01.ipynb::budget"]
    code, printed = course.pytest(*cells)
    assert code == 0
    assert "1 of 2 cells were run" in printed
    assert "1 passed, 1 skipped" in printed
