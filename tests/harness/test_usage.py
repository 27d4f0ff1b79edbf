"""Memory and sockets of marked processes are seen, and told from those of others."""

import contextlib
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator

import psutil
import pytest

from support.limits import SHORT
from support.ports import free_port
from support.waiting import wait
from tests.harness import files, usage
from tests.harness.processes import MARK
from tests.harness.usage import Sampler

pytestmark = pytest.mark.skipif(not usage.MEASURABLE, reason="read from /proc")
WAITS = "import sys\nprint(flush=True)\nx = sys.stdin.readline()\n"


@contextlib.contextmanager
def running(program: str, mark: str, **environment: str) -> Iterator[subprocess.Popen]:
    """A Python process with a mark that has run a program, and waits for a line."""
    with subprocess.Popen(
        [sys.executable, "-c", f"{program}\n{WAITS}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, MARK: mark, **environment},
    ) as process:
        process.stdout.readline()
        yield process
        process.communicate(timeout=SHORT)


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def sampler(mark: str) -> Iterator[Sampler]:
    sampler = Sampler(mark)
    yield sampler
    sampler.stop()


def test_memory_is_that_of_the_marked_and_counts_once_what_is_shared(mark, sampler):
    forks = "import os\nblock = b'x' * 200_000_000\nx = os.fork()"
    with running("block = b'x' * 300_000_000", "another"), running(forks, mark):
        wait(lambda: sampler.peak > 200e6, "the peak")
    sampler.stop()
    assert sampler.peak < 300e6


def test_memory_that_was_touched_later_is_seen(mark, sampler):
    with running(f"{WAITS}\nblock = b'x' * 200_000_000", mark) as process:
        wait(lambda: sampler.peak > 0, "a peak")
        small = sampler.peak
        process.stdin.write(b"\n")
        process.stdin.flush()
        wait(lambda: sampler.peak > 200e6, "the peak")
    assert small < 100e6


SOCKETS = """
from socket import AF_INET6, SOCK_DGRAM, create_connection, create_server, socket
any_ipv4 = create_server(("0.0.0.0", 0))
any_ipv6 = create_server(("::", 0), family=AF_INET6)
any_udp = socket(type=SOCK_DGRAM)
any_udp.bind(("0.0.0.0", 0))
# from here on all but `both` is on loopback, which `both` sees as ::ffff:127.0.0.1
both = create_server(("::", 0), family=AF_INET6, dualstack_ipv6=True)
client = create_connection(("127.0.0.1", both.getsockname()[1]))
accepted, address = both.accept()
local = create_server(("127.0.0.1", 0))
unbound = socket(type=SOCK_DGRAM)
"""


def test_libraries_count_the_same_with_and_without_a_neighbour(mark, sampler):
    loads = "import numpy, torch"
    with running(loads, mark):
        alone = usage._memory(sampler._members())
        with running(loads, "another"):
            beside = usage._memory(sampler._members())
    assert alone > 100e6 and beside == pytest.approx(alone, rel=0.02)


def test_the_quick_look_is_no_less_than_the_close_one_and_has_files_once(mark, sampler):
    with running("import os, numpy, torch\nx = os.fork()", mark):
        members = sampler._members()
        close, quick = usage._memory(members), usage._resident(members)
        infos = [member.memory_info() for member in members]
    least = min(info.shared for info in infos)  # of files
    assert len(members) == 2 and least > 5e6
    assert close <= quick <= sum(info.rss for info in infos) - least


def test_shared_memory_is_that_of_the_marked(mark, sampler):
    made = {who: f"{files.SHARED_MEMORY}/{who}-{mark}" for who in (mark, "another")}
    try:
        for who, path in made.items():
            with running(f"file = open({path!r}, 'w')", who):
                wait(
                    lambda path=path: (
                        sampler._looks.get(path) or path in sampler.shared
                    ),
                    "a look",
                )
        assert sampler.shared & set(made.values()) == {made[mark]}
    finally:
        for path in made.values():
            os.unlink(path)


def test_sockets_on_all_addresses_are_seen_and_those_on_loopback_are_not(mark, sampler):
    with running(SOCKETS, mark) as process:
        wait(lambda: sampler.outward, "the sockets")
    found = sorted(sampler.outward)
    assert [words.partition(" port ")[0] for words in found] == [
        "LISTEN 0.0.0.0", "LISTEN ::", "LISTEN ::", "UDP 0.0.0.0"
    ]  # fmt: skip
    assert all(f"process {process.pid}: " in words for words in found)
    assert not sampler.stores and not sampler.questions


def test_the_store_of_torchrun_is_told_from_other_sockets(mark, sampler):
    port = str(free_port())
    servers = "from socket import create_server\n"
    servers += f"store, other = create_server(('', {port})), create_server(('', 0))"
    with running(servers, mark, RANK="0", MASTER_PORT=port):
        sampler.note_sockets()
    (store,), (other,) = sampler.stores, sampler.outward
    assert f" port {port}," in store and f" port {port}," not in other


def test_who_asks_a_name_server_is_told_from_others(
    mark, sampler, tmp_path, monkeypatch
):
    monkeypatch.setattr(usage, "_is_loopback", lambda address: False)
    monkeypatch.setattr(usage, "RESOLVER", tmp_path / "resolv.conf")
    usage.RESOLVER.write_text("# ours\nnameserver 127.0.0.1\n")
    ends = [("127.0.0.1", 53), ("127.0.0.1", 54), ("127.0.0.2", 53)]
    program = "from socket import SOCK_DGRAM, socket\n"
    program += f"sockets = [(socket(type=SOCK_DGRAM), end) for end in {ends}]\n"
    program += "for one, end in sockets:\n    one.connect(end)"
    with running(program, mark):
        sampler.note_sockets()
    (question,) = sampler.questions
    assert " to 127.0.0.1 port 53," in question
    assert len(sampler.outward) == 2


def test_the_sockets_of_who_has_ended_meanwhile_are_nobodys(sampler, monkeypatch):
    this = psutil.Process()
    sampler._note_sockets_of(this)
    before = set(sampler.outward)  # of tests that this process has run
    with socket.create_server(("0.0.0.0", 0)):
        sampler._note_sockets_of(this)
        (found,) = sampler.outward - before
        sampler.outward.clear()
        monkeypatch.setattr(this, "cmdline", lambda: [])
        sampler._note_sockets_of(this)
    assert f"process {this.pid}: " in found and not sampler.outward


def test_what_breaks_a_sampler_is_raised(monkeypatch):
    def breaks(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(Sampler, "_look", breaks)
    with pytest.raises(ZeroDivisionError):
        Sampler("a").stop()
