"""Training on two hosts really run: network namespaces, their cards, a slow cable.

The weights are those of one machine, the bytes on the cable are those of the rings, a
slow cable is felt, a host dies and the other goes on, and nothing stays behind.
"""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from helpers.job_log import noted
from helpers.processes import MARK, processes
from support.limits import JOB, SHORT
from support.waiting import wait
from tests.launching import NOTEBOOKS, ROOT, SCRIPTS, environment, starts
from tests.scripts import train_on_hosts

sys.path.insert(0, str(NOTEBOOKS))
from scripts import two_hosts  # noqa: E402
from scripts.two_hosts import HostsError, TwoHosts  # noqa: E402

pytestmark = pytest.mark.slow

PROGRAM = SCRIPTS / "two_hosts.py"
SCRIPT = train_on_hosts.__file__
STEPS = 20


@pytest.fixture(autouse=True)
def handlers():
    """What the program does at a signal must not outlive a test that runs it here."""
    before = {number: signal.getsignal(number) for number in two_hosts._SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def hosts_can_be_made() -> None:
    """Skips where they cannot: also where root may do less than usual."""
    try:
        with TwoHosts(rate=1000) as hosts:
            status = hosts[1].start("true").wait(SHORT)
            words = hosts[1].words
    except HostsError as error:
        pytest.skip(str(error))
    if status:
        pytest.skip(f"what runs on a host ends with {status}: {words}")


needs_hosts = pytest.mark.usefixtures("hosts_can_be_made")


def spaces_of(pid: int) -> list[str]:
    return [name for name in two_hosts._spaces() if f"two-hosts-{pid}-" in name]


def wait_for(condition, what: str, hosts: TwoHosts):
    return wait(condition, what, words=lambda: "\n".join(h.words for h in hosts))


@functools.cache
def one_process(steps: int) -> dict[str, torch.Tensor]:
    """The weights of one process, which adds up the gradients of two ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = train_on_hosts.make_model()
    optimizer = train_on_hosts.make_optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in (0, 1):
            train_on_hosts.loss_of(model, step, rank, 2).backward()
        optimizer.step()
    torch.set_num_threads(threads)
    return model.state_dict()


def check_weights(state: dict, steps: int, tolerance: float = 0) -> None:
    assert state["step"] == steps
    for name, right in one_process(steps).items():
        mine = state["model"][name]
        torch.testing.assert_close(mine, right, rtol=0, atol=tolerance)


def checkpoint(folder: Path) -> dict:
    return torch.load(folder / train_on_hosts.NAME, weights_only=True)


def reach(folder: Path, step: int, hosts: TwoHosts, ranks: int = 2) -> list[float]:
    """Wait until so many ranks together have done a step; when each had."""

    def times() -> list[float] | None:
        found = {
            entry["rank"]: entry["time"]
            for entry in noted(folder)
            if (entry["event"], entry.get("step")) == ("step", step)
            and entry["ranks"] == ranks
        }
        return list(found.values()) if len(found) == ranks else None

    return wait_for(times, f"step {step} of {ranks} ranks", hosts)


def check(folder: Path) -> None:
    """The sums of one rank or four are rounded otherwise than those of two."""
    done = {entry["step"] for entry in noted(folder) if entry["event"] == "step"}
    assert done == set(range(STEPS))
    check_weights(checkpoint(folder), STEPS, tolerance=1e-5)


def finish(hosts: TwoHosts) -> list[int]:
    try:
        return [host.started[0].wait(JOB) for host in hosts]
    except subprocess.TimeoutExpired:
        pytest.fail("\n".join(host.words for host in hosts))


# -- training --------------------------------------------------------------------------

NUMBERS = sum(p.numel() for p in train_on_hosts.make_model().parameters())


def carried(hosts: TwoHosts) -> tuple[float, list[tuple[int, int]]]:
    """Now, and what each card has sent and received."""
    return time.monotonic(), [(host.sent, host.received) for host in hosts]


def check_bytes(hosts: TwoHosts, before: tuple, payload: float) -> None:
    """What each card has carried since, each way.

    More than the payload by headers and acknowledgements (7 %), and by what the agents
    say to each other to keep alive, the more the longer it takes.
    """
    (begin, old), (end, new) = before, carried(hosts)
    most = 1.12 * payload + 30_000 + 3_000 * (end - begin)
    for counts in zip(old, new, strict=True):
        for first, last in zip(*counts, strict=True):
            assert payload < last - first < most


@pytest.mark.long
@needs_hosts
def test_one_rank_each_a_slow_cable_and_a_death(tmp_path: Path):
    """The weights of one machine to the bit, the ring's bytes, and their seconds.

    Then host 1 dies, and host 0 goes on: no row is lost.
    """
    rate, payload = 2, 10 * 4 * NUMBERS  # Mbit/s: slower than any machine computes
    script = (SCRIPT, str(tmp_path), str(STEPS), "0", "5", "15", "17")
    patient = {"last_call_timeout": 3}

    def begun() -> list[tuple[int, int]]:
        return starts(noted(tmp_path))

    with TwoHosts(rate=1000) as hosts:
        for host in hosts:
            host.launch(*script, nodes="1:2", restarts=3, conf=patient)
        # host 0 may have begun alone, and is started again as the other comes
        wait_for(lambda: (2, 0) in begun(), "a start of both", hosts)
        (tmp_path / "go-0").touch()
        reach(tmp_path, 4, hosts)
        before = carried(hosts)
        hosts.limit(rate)
        begin = time.time()
        (tmp_path / "go-5").touch()
        end = max(reach(tmp_path, 14, hosts))
        check_bytes(hosts, before, payload)
        hosts.limit(None)
        wait_for(lambda: checkpoint(tmp_path)["step"] == 15, "the checkpoint", hosts)
        check_weights(checkpoint(tmp_path), 15)
        (tmp_path / "go-15").touch()
        reach(tmp_path, 16, hosts)
        assert len(hosts[1].processes) >= 2
        hosts[1].kill()
        assert hosts[1].processes == []
        (tmp_path / "go-17").touch()
        assert finish(hosts) == [0, -9]
    burst = 2_000
    assert end - begin > (payload - burst) * 8 / (rate * 1e6)  # 0.76 s
    assert begun()[-2:] == [(2, 0), (1, 15)]
    check(tmp_path)


@needs_hosts
def test_two_ranks_each(tmp_path: Path):
    """A ring of 4 passes 2 · 3/4 of the gradients from each rank to the next.

    One rank of a host has its next one on the other host.
    """
    script = (SCRIPT, str(tmp_path), str(STEPS), "5", "15")
    with TwoHosts() as hosts:
        for host in hosts:
            host.launch(*script, ranks=2)
        reach(tmp_path, 4, hosts, ranks=4)
        before = carried(hosts)
        (tmp_path / "go-5").touch()
        reach(tmp_path, 14, hosts, ranks=4)
        check_bytes(hosts, before, 10 * 3 / 2 * 4 * NUMBERS)
        (tmp_path / "go-15").touch()
        assert finish(hosts) == [0, 0]
    check(tmp_path)


# -- what a host is --------------------------------------------------------------------


@needs_hosts
def test_a_host_has_its_own_of_everything_but_the_disk():
    cards = set(psutil.net_if_addrs())
    with TwoHosts() as hosts:
        seen = []
        for host in hosts:
            words = "hostname; ls /sys/class/net; echo $$; pwd; echo $TMPDIR; "
            words += "touch $TMPDIR/mine; ls $TMPDIR"
            assert host.start("sh", "-c", words, cwd=ROOT).wait(JOB) == 0
            seen.append(host.words.splitlines())
        assert set(psutil.net_if_addrs()) == cards
    expected = ["eth0", "lo", "1", str(ROOT), "/var/run/netns", "hosts", "mine"]
    assert seen == [["host0", *expected], ["host1", *expected]]
    assert not Path("/var/run/netns/mine").exists()
    assert "host0" not in Path("/etc/hosts").read_text()


@needs_hosts
def test_two_pairs_do_not_know_of_each_other():
    with TwoHosts() as pair, TwoHosts() as other:
        names = [host.space for two in (pair, other) for host in two]
        assert len(set(names)) == 4 and set(names) <= set(two_hosts._spaces())
        assert not set(two_hosts.remove_abandoned()) & set(names)
        before = other[0].sent, other[0].received
        talk = "import socket; socket.create_server(('10.99.7.1', 29500)).accept()"
        pair[0].start(sys.executable, "-c", talk)
        knock = "until echo >/dev/tcp/host0/29500; do sleep 0.1; done"
        assert pair[1].start("timeout", "120", "bash", "-c", knock).wait(JOB) == 0
        assert pair[0].received > 0
        # a card that has come up may still say hello (IPv6), but to nobody of the pair
        assert other[0].received - before[1] < 1_000


# -- nothing stays ---------------------------------------------------------------------


# stands for torchrun, which is slow to start
AGENT = """
import subprocess, sys
words = [word for word in sys.argv[1:] if word[:2] != "--"]
sys.exit(subprocess.call([sys.executable, *words]))
"""
# starts a child of its own, as data loaders do
RANK = """
import pathlib, socket, subprocess, sys
print(socket.gethostname(), *sys.argv[2:])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
pathlib.Path(sys.argv[1], socket.gethostname()).touch()
status = {"ends": 0, "fails": 3}.get(sys.argv[2])
sys.exit(child.wait() if status is None else status)
"""


@needs_hosts
@pytest.mark.parametrize("how", ["ends", "fails", "SIGTERM", "SIGKILL"])
def test_the_program_prints_by_host_and_leaves_nothing(how: str, tmp_path: Path):
    agent, script = tmp_path / "torch/distributed/run.py", tmp_path / "rank.py"
    agent.parent.mkdir(parents=True)
    (tmp_path / "torch/__init__.py").touch()  # or the real one is found
    agent.write_text(AGENT)
    script.write_text(RANK)
    words = ("--ranks=1", "--rate=500", "--", str(script), str(tmp_path), how)
    with environment(PYTHONPATH=str(tmp_path)) as environ:
        mark = environ[MARK]
        running = subprocess.Popen(
            [sys.executable, str(PROGRAM), *words], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=environ,
        )  # fmt: skip
        if how.startswith("SIG"):
            both = {"host0", "host1"}
            wait(lambda: both <= set(os.listdir(tmp_path)), "both ranks")
            assert len(spaces_of(running.pid)) == 2
            assert len(processes(mark)) >= 7  # program, agents, ranks, children
            running.send_signal(getattr(signal, how))
        if how == "SIGTERM":
            running.send_signal(signal.SIGINT)  # must not stop the cleaning up
        out, err = running.communicate(timeout=JOB)
        assert (running.returncode, err) == {
            "ends": (0, ""),
            "fails": (1, "torchrun ended with [3, 3]\n"),
            "SIGTERM": (1, "stopped\n"),
            "SIGKILL": (-9, ""),
        }[how]
        if how == "SIGKILL":
            # the system ends the hosts' processes; the next to start removes the hosts
            wait(lambda: not processes(mark), "the end of all")
            with TwoHosts():
                pass
        assert processes(mark) == [] and spaces_of(running.pid) == []
    commands, said = out.splitlines()[:2], out.splitlines()[2:]
    for number, line in enumerate(commands):
        assert line.startswith(f"host{number}$ torchrun --nnodes=2 --nproc-per-node=1")
        assert line.endswith(f"{script} {tmp_path} {how}")
    if how in ("ends", "fails"):
        assert [re.sub(r"[\d,]+ bytes", "N bytes", line) for line in said] == [
            "host0 sent N bytes and said:", f"  host0 {how}",
            "host1 sent N bytes and said:", f"  host1 {how}",
        ]  # fmt: skip


@needs_hosts
def test_leaving_early_leaves_nothing():
    with pytest.raises(KeyError), TwoHosts() as hosts:
        hosts[1].start("sh", "-c", "setsid sleep 1000 & sleep 1000")
        wait_for(lambda: len(hosts[1].processes) >= 3, "three processes", hosts)
        left = hosts[1].processes
        raise KeyError
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            assert process.status() == psutil.STATUS_ZOMBIE  # dead; init has not looked
    assert not any(host.space in two_hosts._spaces() for host in hosts)


@needs_hosts
def test_a_host_that_cannot_be_ended_does_not_keep_the_other(monkeypatch):
    def fails() -> None:
        raise HostsError("does not die")

    with pytest.raises(HostsError, match="does not die"), TwoHosts() as hosts:
        monkeypatch.setattr(hosts[1], "kill", fails)
        process = hosts[0].start("sleep", "1000")
    assert process.poll() is not None
    assert not any(host.space in two_hosts._spaces() for host in hosts)


# -- where it cannot run ---------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("sys.platform", "darwin", "use a Linux machine"),
        ("os.geteuid", lambda: 1000, "run it with `sudo .*python"),
        ("shutil.which", lambda name: None, "Not found: ip and tc and .*; install"),
    ],
)
def test_one_sentence_where_it_cannot_run(name, value, reason, monkeypatch, capsys):
    monkeypatch.setattr(two_hosts.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(two_hosts.sys, "platform", "linux")
    monkeypatch.setattr(f"scripts.two_hosts.{name}", value)
    with pytest.raises(HostsError, match=reason), TwoHosts():
        pass
    with pytest.raises(SystemExit, match="2"):
        two_hosts.main(["--", "x.py"])
    said = capsys.readouterr().err
    assert re.search(reason, said) and said.count("\n") == 1


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs root")
def test_root_that_may_not_make_hosts(monkeypatch):
    """As in a container without privileges."""
    if two_hosts.why_not():
        pytest.skip(two_hosts.why_not())
    lacking = ("capsh", "--drop=cap_sys_admin", "--")
    if two_hosts.shutil.which("capsh") is None:
        pytest.skip("capsh is not here")
    done = subprocess.run(
        [*lacking, "-c", f"{sys.executable} {PROGRAM} -- x.py"],
        capture_output=True, text=True, timeout=JOB,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "a container must be privileged" in done.stderr


COMMAND = ("ip", "netns", "list")


@pytest.mark.skipif(os.name != "posix", reason="signals cannot be held there")
@pytest.mark.parametrize(
    "error, said",
    [
        (subprocess.CalledProcessError(1, COMMAND, "", "File exists\n"),
         "`ip netns list` says 'File exists'."),
        (subprocess.CalledProcessError(1, COMMAND, "", "Permission denied\n"),
         "`ip netns list` says 'Permission denied' (a container must be privileged)."),
        (subprocess.TimeoutExpired(COMMAND, 60),
         "`ip netns list` has not ended in 60 s."),
        (OSError(24, "Too many open files"), "[Errno 24] Too many open files."),
    ],
)  # fmt: skip
def test_one_sentence_when_a_command_fails(error, said, monkeypatch):
    def fails(*command: str) -> str:
        raise error

    monkeypatch.setattr(two_hosts, "why_not", lambda: None)
    monkeypatch.setattr(two_hosts, "_do", fails)
    with pytest.raises(HostsError) as caught, TwoHosts():
        pass
    assert str(caught.value) == f"Hosts cannot be made here: {said}"


# -- the stored measurement ------------------------------------------------------------


def test_the_stored_measurement_is_of_bytes_as_predicted():
    stored = json.loads((PROGRAM.parent / "two_hosts.json").read_text())
    assert {"hardware", "torch", "backend", "link", "how", "rounds"} <= set(stored)
    sent = {}
    for run in stored["runs"]:
        payload = run["predicted_sent"]
        assert payload < run["sent"] < 1.1 * payload, run
        assert run["seconds"] > 0.9 * payload * 8 / run["mbit"] / 1e6, run
        sent[run["ranks"], run["way"]] = payload / (4 * stored["parameters"])
    assert sent == {
        (2, "ddp"): 1, (2, "ddp-bf16"): 0.5, (2, "fsdp"): 2, (2, "fsdp-half"): 1.5,
        (4, "ddp"): 1.5, (4, "fsdp"): 3, (4, "hsdp"): 1,
    }  # fmt: skip
