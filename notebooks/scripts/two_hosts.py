#!/usr/bin/env python3
"""Run a training script on two hosts that are this one machine.

    sudo python two_hosts.py [--rate 100] [--ranks 1] -- ddp_digits.py

A host is a network namespace of Linux with its own card, address, loopback, ports,
host name and process numbers; a pair of virtual cards (veth) is the cable between the
two. In each runs `torchrun --nnodes=2`. So nothing is simulated: what goes from host to
host is TCP over a card that counts its bytes, and `tc` can make it slow (`--rate`, in
Mbit/s each way). Needs root, Linux, and the commands `ip`, `tc`, `setpriv`, `unshare`.

Nothing of the machine's own network is touched. While hosts exist, their names are in
/run/netns, a folder that `ip netns` makes and leaves; all else goes. A host's processes
die with this program, also when it is killed; the namespaces of one that was killed
are removed by the next that starts. Leaves out: latency (a veth has nearly none), and
all that hosts share here, such as the disk, the processor and the memory.
Used in lesson 25.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

CARD = "eth0"  # the same name in both, as two machines of a cluster have it
PORT = 29500  # of the rendezvous; all ports are free on a host of our own
# Of the rendezvous, in seconds and attempts: quick, because both hosts are here.
CONF = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 10}
# Inside a host only: files of its own, that go with it, and the names of both. The
# second spelling is how torch's stores see an address; without it they warn. Where a
# host may not have a name of its own, it has the machine's: nothing needs it.
_TEMPORARY = "/var/run/netns"  # of all hosts; a host sees its own files there
_PREPARE = """set -e
mount -t tmpfs none $0
echo 127.0.0.1 localhost >$0/hosts
for n in 1 2; do
    for form in 10.99.7 ::ffff:10.99.7; do echo $form.$n host$((n - 1)); done
done >>$0/hosts
mount --bind $0/hosts /etc/hosts
hostname "$1" 2>/dev/null || true
shift
exec "$@"
"""
_NAME = re.compile(r"two-hosts-(\d+)-(\d+)-\d+-[01]")  # owner, its start, which, host
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows lacks one; it is told so later
_SIGNALS = {getattr(signal, name) for name in _NAMES if hasattr(signal, name)}
_number = itertools.count()
_FAILURES = (subprocess.SubprocessError, OSError)  # of `_do`


class HostsError(RuntimeError):
    """Two hosts cannot be made here; the message says why, and what to do."""


def why_not() -> str | None:
    """One sentence on what is missing here, and what to do; None if nothing is."""
    if sys.platform != "linux":
        return "Network namespaces are a feature of Linux: use a Linux machine."
    needed = ("ip", "tc", "setpriv", "unshare")
    if missing := [name for name in needed if shutil.which(name) is None]:
        what = " and ".join(missing)
        return f"Not found: {what}; install the packages iproute2 and util-linux."
    if os.geteuid() != 0:
        return f"Only root may make hosts: run it with `sudo {sys.executable}`."
    return None


class Host:
    """One of the two: a network namespace, and what runs in it.

    Attributes:
        number: 0 or 1; host 0 holds the rendezvous.
        name, address: of the host and of its card.
        space: the name of its namespace, for `ip netns exec` and `ip -n`.
        started: the processes that `start` has returned.
    """

    def __init__(self, number: int, space: str):
        self.number, self.space = number, space
        self.name, self.address = f"host{number}", f"10.99.7.{number + 1}"
        self.started: list[subprocess.Popen] = []
        self._output = tempfile.TemporaryFile()  # has no name, so it cannot stay

    def start(self, *command: str, **options) -> subprocess.Popen:
        """Start a command here; it dies with this process, and so do its children.

        Args:
            command: and its arguments.
            options: of `Popen`. What it prints goes to `words` unless they say else.
        """
        enter = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self.space]
        # Process 1 of a process namespace takes all others in it with it.
        enter += ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
        enter += ["sh", "-c", _PREPARE, _TEMPORARY, self.name]
        environ = {
            **os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": _TEMPORARY,
            "GLOO_SOCKET_IFNAME": CARD, "TP_SOCKET_IFNAME": CARD,
            "NCCL_SOCKET_IFNAME": CARD,
            # or a restarted rank may find the address of the one before it
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        process = subprocess.Popen(
            [*enter, *command], start_new_session=True,
            **{"env": environ, "stdin": subprocess.DEVNULL, "stdout": self._output,
               "stderr": subprocess.STDOUT, **options},
        )  # fmt: skip
        self.started.append(process)
        return process

    def torchrun(self, *script: str, ranks: int = 1, nodes: str | int = 2,
                 restarts: int = 0, conf: dict | None = None) -> list[str]:  # fmt: skip
        """The command for this host; it is the same on both but for two words.

        Args:
            script: and its arguments.
            ranks: of this host.
            nodes: how many hosts: 2, or from and to: "1:2".
            restarts: how often the ranks may be started anew.
            conf: of the rendezvous, over those that make it quick here (`CONF`).
        """
        conf = {"is_host": int(self.number == 0), **CONF, **(conf or {})}
        return [
            "torchrun", f"--nnodes={nodes}", f"--nproc-per-node={ranks}",
            f"--max-restarts={restarts}", "--rdzv-backend=c10d",
            f"--rdzv-endpoint=host0:{PORT}", "--rdzv-id=two-hosts",
            "--rdzv-conf=" + ",".join(f"{name}={conf[name]}" for name in conf),
            f"--local-addr={self.address}", "--monitor-interval=0.1", *script,
        ]  # fmt: skip

    def launch(self, *script: str, **options) -> subprocess.Popen:
        """Start torchrun here, with the arguments of `torchrun`."""
        command = self.torchrun(*script, **options)
        return self.start(sys.executable, "-m", "torch.distributed.run", *command[1:])

    @property
    def words(self) -> str:
        """What its processes have printed so far."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    @property
    def processes(self) -> list[psutil.Process]:
        """All that run here."""
        listed = _do("ip", "netns", "pids", self.space).split()
        found = []
        for pid in listed:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    @property
    def sent(self) -> int:
        """Bytes that have left through its card, with the headers of TCP/IP."""
        return self._counted("tx")

    @property
    def received(self) -> int:
        """Bytes that have come in through its card, with the headers of TCP/IP."""
        return self._counted("rx")

    def _counted(self, way: str) -> int:
        shown = _do("ip", "-n", self.space, "-s", "-j", "link", "show", "dev", CARD)
        return json.loads(shown)[0]["stats64"][way]["bytes"]

    def kill(self) -> None:
        """Kill all that runs here: agent and ranks are gone, as if by a crash.

        Raises:
            HostsError: if some of them are there still after 30 s.
        """
        for process in self.started:
            first = []  # process 1 of its own; all others there go with it
            if process.poll() is None:
                first = psutil.Process(process.pid).children()
            process.kill()
            process.wait(30)
            psutil.wait_procs(first, 5)
        for _ in range(6):
            if not (left := self.processes):
                return
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, 5)
        raise HostsError(f"host {self.number}: {self.processes} do not die")


class TwoHosts:
    """Two hosts and the cable between them, from `__enter__` to `__exit__`.

    Use it in the main thread: the processes of a host die with the thread that has
    started them. `hosts[0]` and `hosts[1]` are the hosts.

    Args:
        rate: Mbit/s that the cable lets through, each way; None: as it is.

    Raises:
        HostsError: by `__enter__`, if hosts cannot be made here.
    """

    def __init__(self, rate: int | None = None):
        self.rate = rate
        name = f"two-hosts-{os.getpid()}-{_begin(os.getpid())}-{next(_number)}"
        self.hosts = [Host(number, f"{name}-{number}") for number in range(2)]

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def __iter__(self):
        return iter(self.hosts)

    def __enter__(self) -> "TwoHosts":
        if reason := why_not():
            raise HostsError(reason)
        try:
            remove_abandoned()
            self._make()
        except BaseException as error:
            with contextlib.suppress(*_FAILURES, HostsError):
                self.__exit__()
            if isinstance(error, _FAILURES):
                raise HostsError(_why(error)) from None
            raise
        return self

    def _make(self) -> None:
        for host in self.hosts:
            _do("ip", "netns", "add", host.space)
        one, other = (host.space for host in self.hosts)
        # both ends are made where they belong: the machine never sees them
        veth = ("link", "add", CARD, "type", "veth", "peer", "name", CARD)
        _do("ip", "-n", one, *veth, "netns", other)
        for host in self.hosts:
            inside = ("ip", "-n", host.space)
            _do(*inside, "addr", "add", f"{host.address}/24", "dev", CARD)
            _do(*inside, "link", "set", CARD, "up")
            _do(*inside, "link", "set", "lo", "up")
        if self.rate is not None:
            self.limit(self.rate)

    def __exit__(self, *exc_info) -> None:
        # a Ctrl-C must not stop this; it arrives afterwards
        held = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            existing = _spaces()
            # from the last to the first, and all of them, whichever fails
            with contextlib.ExitStack() as stack:
                for host in self.hosts:
                    if host.space in existing:
                        # its card goes with it
                        stack.callback(_do, "ip", "netns", "del", host.space)
                        stack.callback(host.kill)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    def limit(self, rate: int | None) -> None:
        """Let no more than `rate` Mbit/s through, each way; None: as it is."""
        for host in self.hosts:
            tc = ("tc", "-n", host.space, "qdisc")
            with contextlib.suppress(subprocess.CalledProcessError):  # there is none
                _do(*tc, "del", "dev", CARD, "root")
            if rate is not None:
                # Bytes that pass at full speed after a pause: less than the messages
                # that are measured. Above 1 Gbit/s so few would slow the link further.
                burst = max(2_000, rate * 8)  # what passes in 64 us
                shape = ("tbf", "rate", f"{rate}mbit", "burst", str(burst))
                # room for 2 s in the queue, so that nothing is dropped
                _do(*tc, "add", "dev", CARD, "root", *shape, "latency", "2s")


def remove_abandoned() -> list[str]:
    """Remove the namespaces whose makers were killed, and what may still run there.

    Returns:
        Their names.
    """
    removed = []
    for name in _spaces():
        match = _NAME.fullmatch(name)
        if match and _begin(int(match[1])) != match[2]:
            with contextlib.suppress(subprocess.CalledProcessError):  # another did it
                Host(int(name[-1]), name).kill()
                _do("ip", "netns", "del", name)
                removed.append(name)
    return removed


def _spaces() -> list[str]:
    """The names of all network namespaces."""
    return [line.split()[0] for line in _do("ip", "netns", "list").splitlines()]


def _begin(pid: int) -> str | None:
    """When a process began, in ticks since the boot; None if there is none.

    A number is given again to later processes; number and time together are not.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _do(*command: str) -> str:
    done = subprocess.run(
        command, check=True, capture_output=True, timeout=60, text=True
    )
    return done.stdout


def _why(error: Exception) -> str:
    """One sentence on a command of `_do` that has failed."""
    said = str(error)
    if isinstance(error, subprocess.CalledProcessError):
        said = f"`{shlex.join(error.cmd)}` says {error.stderr.strip()!r}"
    elif isinstance(error, subprocess.TimeoutExpired):
        said = f"`{shlex.join(error.cmd)}` has not ended in {error.timeout:.0f} s"
    if re.search("not permitted|denied", said, re.IGNORECASE):
        said += " (a container must be privileged)"
    return f"Hosts cannot be made here: {said}."


def _stop(*_) -> None:
    for number in _SIGNALS:  # a second one must not stop the cleaning up
        signal.signal(number, lambda *_: None)
    sys.exit("stopped")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Run a training script on two hosts that are this one machine.",
        usage="sudo python two_hosts.py [options] -- script.py [its options]",
    )
    parser.add_argument("--rate", type=int, help="Mbit/s of the link, each way")
    parser.add_argument("--ranks", type=int, default=1, help="of each host")
    parser.add_argument("--nodes", default="2", help="or 1:2, to go on with one")
    parser.add_argument("--restarts", type=int, default=0, help="of the ranks")
    parser.add_argument("script", nargs="+", help="and its options, after --")
    args = parser.parse_args(arguments)
    for number in _SIGNALS:
        signal.signal(number, _stop)
    options = {"ranks": args.ranks, "nodes": args.nodes, "restarts": args.restarts}
    try:
        with TwoHosts(args.rate) as hosts:
            try:
                for host in hosts:
                    command = shlex.join(host.torchrun(*args.script, **options))
                    print(f"{host.name}$ {command}", flush=True)
                    host.launch(*args.script, **options)
                statuses = [host.started[0].wait() for host in hosts]
            finally:
                before = [host.sent for host in hosts]
                for host, sent in zip(hosts, before, strict=True):
                    print(f"{host.name} sent {sent:,} bytes and said:")
                    for line in host.words.splitlines():
                        print(f"  {line}")
    except HostsError as reason:
        parser.exit(2, f"{reason}\n")
    if any(statuses):
        sys.exit(f"torchrun ended with {statuses}")


if __name__ == "__main__":
    main()
