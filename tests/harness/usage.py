"""Memory, sockets and shared memory of a notebook's processes, while they run.

Linux only. A process belongs to a notebook if it has the notebook's mark in its
environment (processes.py). Five times a second a `Sampler` adds up resident memory,
which is cheap. Where that could mean a new peak, and every second or so, it reads the
memory that is theirs, with what they share counted once, and their sockets. It takes
about a fiftieth of a core. Pages of files are no reason for a close look but in the
process that has most of them: each fork has them again as it runs.

Other programs on this machine, such as the notebook beside it, change none of this:
pages of files, which libraries are, count once, as in the process that has most of
them, however many others have the same ones (a plain PSS falls with each neighbour and
rises again when that ends). A file in /dev/shm is the notebook's if one of its
processes has been seen to have it, or is named in it.

Leaves out: memory, sockets and files in /dev/shm that come and go between two samples,
and pages of files that another than the largest process has. The fault `network` of
tests/tools/faults.py shows what no sample can, that nothing outside is needed.
"""

import socket
import sys
import threading
import time
from ipaddress import ip_address
from pathlib import Path

import psutil

from tests.harness import files
from tests.harness.processes import describe, find_processes

# whether all that is read here is there; Linux in a sandbox may lack it, too
MEASURABLE = sys.platform == "linux" and Path("/proc/self/smaps_rollup").exists()
INTERVAL = 0.2  # seconds between two looks at resident memory
RESOLVER = Path("/etc/resolv.conf")
SHARE = 1 / 100  # of a core, for the close looks that come round by time
STEP = 16 * 10**6  # bytes: so much more than the peak is worth a close look
LOOKS = 3  # at who has a new file in /dev/shm; who makes one has it at once


class Sampler(threading.Thread):
    """Looks at the processes with a mark until `stop`.

    Args:
        mark: in the environment of each, see processes.py. The first of them must
            start after this.

    Attributes:
        peak: bytes; the most that they had at once.
        shared: files in /dev/shm that one of them has had, or that were made by one.
        outward: sockets that another machine could reach or that reach one, in words.
        stores: the same of torchrun, which always listens on all addresses.
        questions: sockets that ask a name server. `TCPStore` wants to know the name of
            whoever calls, also of ::ffff:127.0.0.1, which /etc/hosts cannot tell it;
            nothing can keep it from asking, and it goes on without an answer.
    """

    def __init__(self, mark: str) -> None:
        super().__init__(name=f"sampler of {mark}", daemon=True)
        self.peak = 0
        self.outward: set[str] = set()
        self.stores: set[str] = set()
        self.questions: set[str] = set()
        self.shared: set[str] = set()
        self._looks = dict.fromkeys(files.shared_memory(), LOOKS)  # at each such file
        self._mark = mark
        self._others = set(psutil.pids())  # those that cannot have the mark
        self._stopped = threading.Event()
        self._error: Exception | None = None
        self._no_peak_below = 0  # resident bytes
        self._due = 0.0  # when the next close look is, by `time.monotonic`
        self.start()

    def stop(self) -> None:
        """Ends the sampling; raises what has ended it before."""
        self._stopped.set()
        self.join()
        if self._error is not None:
            raise self._error

    def note_sockets(self) -> None:
        """Looks at sockets and files now: before what a notebook has left is ended."""
        members = self._members()
        self._note_shared(members)
        for process in members:
            self._note_sockets_of(process)

    def run(self) -> None:
        try:
            self._look()
            while not self._stopped.wait(INTERVAL):
                self._look()
        except Exception as error:
            self._error = error

    def _look(self) -> None:
        members = self._members()
        self._note_shared(members)
        resident = _resident(members)
        if resident < self._no_peak_below and time.monotonic() < self._due:
            return
        start = time.thread_time()
        shares = _memory(members)
        self.peak = max(self.peak, shares)
        self._no_peak_below = resident + self.peak - shares + STEP
        if time.monotonic() >= self._due:
            for process in members:
                self._note_sockets_of(process)
            spent = time.thread_time() - start
            self._due = time.monotonic() + max(1, spent / SHARE)

    def _members(self) -> list[psutil.Process]:
        self._others &= set(psutil.pids())
        return find_processes(self._mark, self._others)

    def _note_shared(self, members: list[psutil.Process]) -> None:
        """Finds whose the files are that have appeared in /dev/shm."""
        pids = {process.pid for process in members}
        new = {p for p in files.shared_memory() if self._looks.get(p, 0) < LOOKS}
        if not new - self.shared:
            return
        used = files.used_by(pids)
        for path in new - self.shared:
            self._looks[path] = self._looks.get(path, 0) + 1
            if files.owner(path) in pids or files.identity(path) in used:
                self.shared.add(path)

    def _note_sockets_of(self, process: psutil.Process) -> None:
        try:
            # first its name: a process that ends loses that before its sockets
            command, environment = process.cmdline(), process.environ()
            # the old name is all that psutil 5 has
            ask = getattr(process, "net_connections", None) or process.connections
            connections = ask("inet") if command else []
        except (psutil.Error, OSError):
            return
        for connection in connections:
            ends = [end for end in (connection.laddr, connection.raddr) if end]
            if all(_is_loopback(end.ip) for end in ends):
                continue
            kind = connection.status
            if connection.type == socket.SOCK_DGRAM:
                kind = "UDP"
            found = self.outward
            if kind == psutil.CONN_LISTEN:
                if _is_store(connection.laddr.port, command, environment):
                    found = self.stores
            elif kind == "UDP" and _is_name_server(connection.raddr):
                found = self.questions
            where = " to ".join(f"{end.ip} port {end.port}" for end in ends)
            found.add(f"{kind} {where}, process {process.pid}: {describe(command)}")


def _resident(members: list[psutil.Process]) -> int:
    """Returns the bytes of these, with what they share counted in each (quick).

    Of files, the most that one has: so `_memory` grows by no more than this does, as
    long as no page that was shared is written to.
    """
    own, of_files = 0, 0
    for process in members:
        kB = _status(process)
        own += _number(kB.get("RssAnon", "0")) + _number(kB.get("RssShmem", "0"))
        of_files = max(of_files, _number(kB.get("RssFile", "0")))
    return 1024 * (own + of_files)


def _memory(members: list[psutil.Process]) -> int:
    """Returns the bytes of these together: what they share is counted once.

    Of memory that is no file's, each has its share in what it shares with n - 1 others
    of these (PSS); with programs that are not of these, it shares none. Of files, the
    most that one has.
    """
    own, of_files = 0, 0
    for process in members:
        kB = _fields(process, "smaps_rollup") | _status(process)
        if "Pss" not in kB:
            continue  # it has ended
        if "Pss_Anon" not in kB:  # Linux before 5.4 does not tell them apart
            own += _number(kB["Pss"])
            continue
        own += _number(kB["Pss_Anon"]) + _number(kB["Pss_Shmem"])
        of_files = max(of_files, _number(kB.get("RssFile", "0")))
    return 1024 * (own + of_files)


def _status(process: psutil.Process) -> dict[str, str]:
    return _fields(process, "status")


def _fields(process: psutil.Process, file: str) -> dict[str, str]:
    """Returns the lines "name: words" of a file in /proc; none if it has ended."""
    try:
        with open(f"/proc/{process.pid}/{file}", encoding="utf-8") as lines:
            return {name: words for name, _, words in (x.partition(":") for x in lines)}
    except OSError:
        return {}


def _number(words: str) -> int:
    return int(words.split()[0])


def _is_loopback(address: str) -> bool:
    known = ip_address(address)
    return (getattr(known, "ipv4_mapped", None) or known).is_loopback


def _is_store(port: int, command: list[str], environment: dict[str, str]) -> bool:
    """Whether torchrun meets here: an agent, or rank 0 at the port that agents chose.

    `TCPStore` listens on all addresses, and nothing that torchrun has can change it.
    """
    first = (environment.get("RANK"), environment.get("MASTER_PORT")) == (
        "0",
        str(port),
    )
    agent = {"torch.distributed.run", "torchrun"}
    return first or any(Path(word).name in agent for word in command)


def _is_name_server(end) -> bool:
    """Whether this end of a connection is where this machine asks for names."""
    try:
        lines = RESOLVER.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    known = [line.split() for line in lines]
    return bool(end) and end.port == 53 and ["nameserver", end.ip] in known
