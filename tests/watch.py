"""What the processes of one notebook take, sampled while they run: Linux only.

A process belongs to a notebook if it carries its mark in its environment (see
nbplus.py), whatever session it moved to. Five times a second a `Watch` adds up resident
memory, which is cheap; where that could mean a new peak, and every second or so, it
reads the share of each process in the memory that they have in common (PSS), and its
sockets. It takes about a fiftieth of a core.

Leaves out: memory and sockets that come and go between two looks. `no network at all`
in faults.py shows what no sample can, that nothing outside is needed.
"""

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import psutil

# whether all that is read here is there; Linux in a sandbox may lack it, too
SOUND = sys.platform == "linux" and Path("/proc/self/smaps_rollup").exists()
LOOK = 0.2  # seconds between two looks at resident memory
SHARE = 1 / 100  # of a core, for the looks that come round by time
STEP = 16 * 10**6  # bytes: so much more than the peak is worth a close look
PAGE = os.sysconf("SC_PAGE_SIZE") if SOUND else 0
# where two processes may leave memory that they shared
SHARED = Path("/dev/shm")
# what others write in a repository while tests run: git, caches, editors
PASSED_OVER = (
    ".git", ".hypothesis", ".ipynb_checkpoints", ".pytest_cache", ".ruff_cache",
    ".venv", ".virtual_documents", "__pycache__",
)  # fmt: skip

# what IPython and matplotlib keep in a home folder, whatever a notebook does
KEPT_AT_HOME = (".ipython", ".cache/matplotlib", ".config/matplotlib")


class Watch(threading.Thread):
    """Looks at the processes with a mark until `stop`.

    Args:
        mark: `NAME=value`, as it stands in their environments. The first of them must
            start after this.

    Attributes:
        peak: bytes; the most that they had at once, by PSS.
        outward: sockets that another machine could reach or that reach one, in words.
        stores: the same of torchrun, which always listens on all addresses.
        questions: sockets that ask a name server. `TCPStore` wants to know the name of
            whoever calls, also of ::ffff:127.0.0.1, which /etc/hosts cannot tell it;
            nothing can keep it from asking, and it goes on without an answer.
    """

    def __init__(self, mark: str) -> None:
        super().__init__(name=f"watch {mark}", daemon=True)
        self.peak = 0
        self.outward: set[str] = set()
        self.stores: set[str] = set()
        self.questions: set[str] = set()
        self._mark = mark.encode()
        self._others = _pids()
        self._stopped = threading.Event()
        self._error: Exception | None = None
        self._near = 0  # resident bytes for which there can be no new peak
        self._due = 0.0  # when the next close look is, by the clock of the system
        self.start()

    def stop(self) -> None:
        """End the watch; raises what has ended it before."""
        self._stopped.set()
        self.join()
        if self._error is not None:
            raise self._error

    def note_sockets(self) -> None:
        """Look at the sockets now: before what a notebook has left is ended."""
        for pid in self._members():
            self._note_sockets_of(pid)

    def run(self) -> None:
        try:
            self._look()
            while not self._stopped.wait(LOOK):
                self._look()
        except Exception as error:
            self._error = error

    def _look(self) -> None:
        members = self._members()
        resident = sum(map(_resident, members))
        if resident < self._near and time.monotonic() < self._due:
            return
        start = time.thread_time()
        shares = sum(map(_share, members))
        self.peak = max(self.peak, shares)
        self._near = resident + self.peak - shares + STEP
        if time.monotonic() >= self._due:
            for pid in members:
                self._note_sockets_of(pid)
            spent = time.thread_time() - start
            self._due = time.monotonic() + max(1, spent / SHARE)

    def _members(self) -> list[int]:
        pids = _pids()
        self._others &= pids
        return [pid for pid in pids - self._others if self._mark in _environment(pid)]

    def _note_sockets_of(self, pid: int) -> None:
        # who it is first: a process that ends still has sockets when it has no name
        name, environment = _command(pid), set(_environment(pid))
        for connection in _connections(pid) if name else []:
            ends = [end for end in (connection.laddr, connection.raddr) if end]
            if all(_is_loopback(end.ip) for end in ends):
                continue
            kind = connection.status
            if connection.type == socket.SOCK_DGRAM:
                kind = "UDP"
            where = " to ".join(f"{end.ip} port {end.port}" for end in ends)
            found = self.outward
            if kind == psutil.CONN_LISTEN:
                if _is_store(connection.laddr.port, name, environment):
                    found = self.stores
            elif kind == "UDP" and _is_name_server(connection.raddr):
                found = self.questions
            found.add(f"{kind} {where}, process {pid}: {name[:200]}")


def _pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _read(path: str) -> bytes:
    """A file of a process; nothing if the process is gone or somebody else's."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _environment(pid: int) -> list[bytes]:
    return _read(f"/proc/{pid}/environ").split(b"\0")


def _resident(pid: int) -> int:
    """Bytes of memory, those that are shared with others included."""
    words = _read(f"/proc/{pid}/statm").split()
    return int(words[1]) * PAGE if words else 0


def _share(pid: int) -> int:
    """Bytes of memory (PSS): of what n processes share, each has a part in n."""
    found = re.search(rb"^Pss: +(\d+) kB", _read(f"/proc/{pid}/smaps_rollup"), re.M)
    return int(found[1]) * 1024 if found else 0


def _connections(pid: int) -> list:
    try:
        process = psutil.Process(pid)
        # the old name is all that psutil 5 has
        ask = getattr(process, "net_connections", None) or process.connections
        return ask("inet")
    except (psutil.Error, OSError):
        return []


def _is_loopback(address: str) -> bool:
    known = ip_address(address)
    return (getattr(known, "ipv4_mapped", None) or known).is_loopback


def _is_store(port: int, name: str, environment: set[bytes]) -> bool:
    """Whether torchrun meets here: an agent, or rank 0 at the port that agents chose.

    `TCPStore` listens on all addresses, and nothing that torchrun has can change it.
    """
    agent = "torch.distributed.run" in name.split()
    return agent or {b"RANK=0", f"MASTER_PORT={port}".encode()} <= environment


def _is_name_server(end) -> bool:
    """Whether this end of a connection is where this machine asks for names."""
    lines = _read("/etc/resolv.conf").decode(errors="replace").splitlines()
    return (
        bool(end)
        and end.port == 53
        and ["nameserver", end.ip] in [line.split() for line in lines]
    )


def _command(pid: int) -> str:
    """What a process was started as; nothing if it has ended."""
    words = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ")
    return " ".join(words.decode(errors="replace").split())


# -- files -----------------------------------------------------------------------------


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """When each file under a folder was written, and its bytes."""
    found = {}
    for entry in _walk(str(folder)):
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            found[entry.path] = (status.st_mtime_ns, status.st_size)
    return found


def files_at_home(home: Path) -> dict[str, tuple[int, int]]:
    """The same of a home folder that is a notebook's alone, less `KEPT_AT_HOME`."""
    return {
        path: written
        for path, written in files(home).items()
        if not path.removeprefix(f"{home}/").startswith(KEPT_AT_HOME)
    }


def _walk(folder: str) -> Iterator[os.DirEntry]:
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:  # gone meanwhile
        return
    for entry in entries:
        if entry.name in PASSED_OVER:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path)
        else:
            yield entry


def changed(before: dict[str, tuple], after: dict[str, tuple]) -> list[str]:
    """Files that were written, made or removed."""
    paths = sorted(before.keys() | after.keys())
    return [path for path in paths if before.get(path) != after.get(path)]


def unused(paths: list[str]) -> list[str]:
    """Those of these files that are there, and that no process has open or mapped."""
    used = set()  # by inode: a semaphore is mapped under a name that it no longer has
    for pid in _pids():
        for line in _read(f"/proc/{pid}/maps").splitlines():
            device, inode = line.split()[3:5]
            major, minor = device.split(b":")
            used.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
        with contextlib.suppress(OSError):
            for link in os.scandir(f"/proc/{pid}/fd"):
                used.update(_identity(link.path))
    return [path for path in paths if _identity(path) - used]


def _identity(path: str) -> set[tuple[int, int]]:
    """Device and inode of a file; nothing if it is gone."""
    try:
        status = os.stat(path)
    except OSError:
        return set()
    return {(status.st_dev, status.st_ino)}


def left(paths: list[str], seconds: float = 60) -> list[str]:
    """Those that stay unused. A tensor in a queue, say, is nobody's until it arrives.

    Args:
        paths: files that have appeared, of whatever process.
        seconds: after which what is still there has been left behind.
    """
    late = time.monotonic() + seconds
    while (paths := unused(paths)) and time.monotonic() < late:
        time.sleep(0.1)
    return paths
