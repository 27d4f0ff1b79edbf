"""Training on two hosts really run: network namespaces, their cards, a slow cable.

The weights are those of one machine, the bytes on the cable are those of the rings, a
slow cable is felt, a host dies and the other goes on, and nothing stays behind.
"""

import contextlib
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

from helpers.elastic import Job

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "notebooks/scripts/two_hosts.py"
SCRIPT = str(ROOT / "notebooks/scripts/train_elastic.py")
STEPS, ROWS, BATCH = 20, 1437, 120

sys.path.insert(0, str(ROOT / "notebooks"))
from scripts import train_elastic, two_hosts  # noqa: E402
from scripts.two_hosts import HostsError, TwoHosts  # noqa: E402


def cannot() -> str | None:
    """Why hosts cannot be made here, also where root may do less than usual."""
    try:
        with TwoHosts():
            return None
    except HostsError as error:
        return str(error)


REASON = cannot()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def spaces_of(pid: int) -> list[str]:
    return [name for name in two_hosts._spaces() if f"two-hosts-{pid}-" in name]


def processes_of(folder: Path) -> list[psutil.Process]:
    """All that have a folder in their command, but for zombies."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait(condition, what: str, hosts: TwoHosts | None = None, seconds: float = 120):
    end = time.monotonic() + seconds
    while not (value := condition()):
        words = "\n".join(host.words for host in hosts or ())
        assert time.monotonic() < end, f"{what} has not come. {words}"
        time.sleep(0.02)
    return value


def read(folder: Path) -> list[dict]:
    """What the ranks have noted so far."""
    try:
        lines = (folder / "log.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:  # half a line, of a rank that was killed
            continue
    return sorted(found, key=lambda entry: entry["time"])


def reach(folder: Path, step: int, hosts: TwoHosts, ranks: int = 2) -> list[float]:
    """Wait until so many ranks together have done a step; when each had."""

    def times() -> list[float] | None:
        found = {
            entry["rank"]: entry["time"]
            for entry in read(folder)
            if (entry["event"], entry.get("step")) == ("step", step)
            and entry["ranks"] == ranks
        }
        return list(found.values()) if len(found) == ranks else None

    return wait(times, f"step {step} of {ranks} ranks", hosts)


def check_rows(folder: Path, steps: int = STEPS) -> None:
    """Every row of every step, once."""
    rows = train_elastic.rows_that_count(read(folder))
    assert sorted(rows) == list(range(steps))
    for step, used in rows.items():
        expected = train_elastic.rows_of_step(step, BATCH, ROWS)
        assert used == sorted(expected.tolist()), step


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "weights.pt", weights_only=True)


@pytest.fixture(scope="module")
def one_machine() -> dict[str, torch.Tensor]:
    """The weights of two ranks on one machine."""
    with Job(SCRIPT, "--folder={folder}", f"--steps={STEPS}", ranks=2) as job:
        job.add()
        assert job.finish() == [0]
        return weights(job.folder)


def finish(hosts: TwoHosts, seconds: float = 120) -> list[int]:
    try:
        return [host.started[0].wait(seconds) for host in hosts]
    except subprocess.TimeoutExpired:
        pytest.fail("\n".join(host.words for host in hosts))


# -- training --------------------------------------------------------------------------

NUMBERS = sum(p.numel() for p in train_elastic.make_model().parameters())


def check_bytes(hosts: TwoHosts, before: list, payload: float) -> None:
    """What each card has carried since, each way.

    More than the payload by headers and acknowledgements (7 %), and by what the agents
    say to each other to keep alive.
    """
    for host, (sent, received) in zip(hosts, before, strict=True):
        assert payload < host.sent - sent < 1.12 * payload + 30_000
        assert payload < host.received - received < 1.12 * payload + 30_000


@needs_hosts
def test_one_rank_each_and_a_slow_cable(one_machine, tmp_path: Path):
    """The weights of one machine to the bit, the ring's bytes, and their seconds."""
    rate, payload = 2, 10 * 4 * NUMBERS  # Mbit/s: slower than any machine computes
    script = (SCRIPT, f"--folder={tmp_path}", f"--steps={STEPS}", "--hold", "5", "15")
    with TwoHosts(rate=1000) as hosts:
        for host in hosts:
            host.launch(*script)
        reach(tmp_path, 4, hosts)
        before = [(host.sent, host.received) for host in hosts]
        hosts.limit(rate)
        begin = time.time()
        (tmp_path / "go-5").touch()
        end = max(reach(tmp_path, 14, hosts))
        check_bytes(hosts, before, payload)
        hosts.limit(None)
        (tmp_path / "go-15").touch()
        assert finish(hosts) == [0, 0]
        assert all(host.words == "" for host in hosts)
    burst = 2_000
    assert end - begin > (payload - burst) * 8 / (rate * 1e6)  # 0.76 s
    check_rows(tmp_path)
    for name, expected in one_machine.items():
        assert torch.equal(weights(tmp_path)[name], expected), name


@needs_hosts
def test_two_ranks_each(one_machine, tmp_path: Path):
    """A ring of 4 passes 2 · 3/4 of the gradients from each rank to the next.

    One rank of a host has its next one on the other host. The sums of four are rounded
    otherwise than those of two.
    """
    script = (SCRIPT, f"--folder={tmp_path}", f"--steps={STEPS}", "--hold", "5", "15")
    with TwoHosts() as hosts:
        for host in hosts:
            host.launch(*script, ranks=2)
        reach(tmp_path, 4, hosts, ranks=4)
        before = [(host.sent, host.received) for host in hosts]
        (tmp_path / "go-5").touch()
        reach(tmp_path, 14, hosts, ranks=4)
        check_bytes(hosts, before, 10 * 3 / 2 * 4 * NUMBERS)
        (tmp_path / "go-15").touch()
        assert finish(hosts) == [0, 0]
    check_rows(tmp_path)
    for name, expected in one_machine.items():
        torch.testing.assert_close(weights(tmp_path)[name], expected, rtol=0, atol=1e-5)


@needs_hosts
def test_host_1_dies_and_host_0_goes_on(one_machine, tmp_path: Path):
    """No row is lost; the sums of one are rounded otherwise than those of two."""
    script = (SCRIPT, f"--folder={tmp_path}", f"--steps={STEPS}", "--hold", "0", "12")

    def starts() -> list[tuple[int, int]]:
        begun = [e for e in read(tmp_path) if e["event"] == "loaded"]
        return [(e["ranks"], e["step"]) for e in begun if e["rank"] == 0]

    with TwoHosts() as hosts:
        for host in hosts:
            host.launch(*script, nodes="1:2", restarts=3)
        # host 0 may have begun alone, and is started again as the other comes
        wait(lambda: (2, 0) in starts(), "a start of both", hosts)
        (tmp_path / "go-0").touch()
        reach(tmp_path, 11, hosts)
        assert len(hosts[1].processes) >= 2
        hosts[1].kill()
        assert hosts[1].processes == []
        (tmp_path / "go-12").touch()
        assert finish(hosts) == [0, -9]
    assert starts()[-2:] == [(2, 0), (1, 10)]
    check_rows(tmp_path)
    for name, expected in one_machine.items():
        torch.testing.assert_close(weights(tmp_path)[name], expected, rtol=0, atol=1e-5)


@needs_hosts
def test_an_unplugged_cable_carries_nothing():
    with TwoHosts() as hosts:
        ping = ("bash", "-c", "echo hello >/dev/tcp/host0/5000")
        listen = "import socket; s = socket.create_server(('10.99.7.1', 5000)); "
        listen += "print('ready', flush=True); print(s.accept()[0].recv(9), flush=True)"
        hosts[0].start(sys.executable, "-c", listen)
        wait(lambda: "ready" in hosts[0].words, "the server", hosts)
        hosts[1].unplug()
        before = hosts[0].received
        assert hosts[1].start(*ping).wait(30) != 0
        assert hosts[0].received == before and "hello" not in hosts[0].words


# -- what a host is --------------------------------------------------------------------


@needs_hosts
def test_a_host_has_its_own_of_everything_but_the_disk():
    cards = set(psutil.net_if_addrs())
    with TwoHosts() as hosts:
        seen = []
        for host in hosts:
            words = "hostname; ls /sys/class/net; echo $$; pwd; echo $TMPDIR; "
            words += "touch $TMPDIR/mine; ls $TMPDIR"
            assert host.start("sh", "-c", words, cwd=ROOT).wait(30) == 0
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
        assert pair[1].start("timeout", "20", "bash", "-c", knock).wait(30) == 0
        assert pair[0].received > 0
        # a card that has come up may still say hello (IPv6), but to nobody of the pair
        assert other[0].received - before[1] < 1_000


# -- nothing stays ---------------------------------------------------------------------


def program(*words: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *words], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


@needs_hosts
def test_the_program_prints_by_host_and_leaves_nothing(tmp_path: Path):
    script = tmp_path / "who.py"
    script.write_text(
        "import os, socket\n"
        "print(socket.gethostname(), os.environ['RANK'], os.environ['MASTER_ADDR'])\n"
    )
    running = program("--ranks=1", "--rate=500", "--", str(script), "--folder=x")
    out, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (0, "")
    lines = out.splitlines()
    for number, line in enumerate(lines[:2]):
        assert line.startswith(f"host{number}$ torchrun --nnodes=2 --nproc-per-node=1")
        assert line.endswith(f"{script} --folder=x")
    said = [re.sub(r"[\d,]+ bytes", "N bytes", line) for line in lines[2:]]
    assert said[::2] == [f"host{r} sent N bytes and said:" for r in range(2)]
    # c10d gives the ranks in the order of arrival
    assert sorted(line.split()[1] for line in said[1::2]) == ["0", "1"]
    assert [line.split()[0] for line in said[1::2]] == ["host0", "host1"]
    assert spaces_of(running.pid) == [] and processes_of(tmp_path) == []


@needs_hosts
@pytest.mark.parametrize("how", ["fails", "SIGTERM", "SIGKILL"])
def test_nothing_stays(how: str, tmp_path: Path):
    """Its ranks start children of their own, as data loaders do."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, pathlib, subprocess, sys\n"
        "sleep = 'import time; time.sleep(1000)'\n"
        "child = subprocess.Popen([sys.executable, '-c', sleep, sys.argv[1]])\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).touch()\n"
        "child.wait() if sys.argv[2] != 'fails' else sys.exit(3)\n"
    )
    running = program("--", str(script), str(tmp_path), how)
    if how != "fails":
        wait(lambda: {"0", "1"} <= set(os.listdir(tmp_path)), "both ranks")
        assert len(spaces_of(running.pid)) == 2
        assert len(processes_of(tmp_path)) >= 7  # program, agents, ranks, children
        running.send_signal(getattr(signal, how))
        if how == "SIGTERM":
            running.send_signal(signal.SIGINT)  # must not stop the cleaning up
    out, err = running.communicate(timeout=120)
    if how == "fails":
        assert err == "torchrun ended with [1, 1]\n" and running.returncode == 1
        assert out.count("exitcode  : 3") == 2
    elif how == "SIGTERM":
        assert err == "stopped\n" and running.returncode == 1
    else:
        assert running.returncode == -9
        # the system ends the hosts' processes; the next to start removes the hosts
        wait(lambda: not processes_of(tmp_path), "the end of all", seconds=20)
        with TwoHosts():
            pass
    assert processes_of(tmp_path) == [] and spaces_of(running.pid) == []


@needs_hosts
def test_leaving_early_leaves_nothing():
    with pytest.raises(KeyError), TwoHosts() as hosts:
        hosts[1].start("sh", "-c", "setsid sleep 1000 & sleep 1000")
        wait(lambda: len(hosts[1].processes) >= 3, "three processes", hosts)
        left = hosts[1].processes
        raise KeyError
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            assert process.status() == psutil.STATUS_ZOMBIE  # dead; init has not looked
    assert not any(host.space in two_hosts._spaces() for host in hosts)


# -- where it cannot run ---------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("sys.platform", "darwin", "use a Linux machine"),
        ("os.geteuid", lambda: 1000, "run it with `sudo .*python"),
        ("shutil.which", lambda name: None, "Not found: ip and tc and unshare; inst"),
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
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "a container must be privileged" in done.stderr


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
