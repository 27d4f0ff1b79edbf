"""The server that forks ranks, and how a launcher asks it for one.

The server is forked before the launcher has threads. It is the launcher's child, and
its ranks are to be so, too, because a launcher waits for its children: the server forks
a process that forks the rank and ends, and the launcher adopts the orphan.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import threading
import time
from typing import Any, NamedTuple

from simgpu._launch import program, shown

_SUBREAPER, _DEATH_SIGNAL = 36, 1  # PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG
_LENGTH = 8  # bytes of a number that is sent


class Asked(NamedTuple):
    """A process that a launcher starts: its words, environment and folder.

    It ignores those signals that the launcher ignores when it starts it.
    """

    words: list[str]
    environ: dict[str, str]
    folder: str
    ignored: set[int]


# -- in the launcher -------------------------------------------------------------------


class RankServer:
    """The launcher's side of the server.

    Args:
        connection: to the server.
    """

    def __init__(self, connection: socket.socket):
        self._connection: socket.socket | None = connection
        self._lock = threading.Lock()

    def popen(self, args, *, env=None, stdout=None, stderr=None, **more) -> Any:
        """In place of `subprocess.Popen`: a rank that was forked, if it can be."""
        words = list(map(str, args))
        if set(more) <= {"start_new_session"} and more.get("start_new_session"):
            files = [1 if stdout is None else stdout.fileno(),
                     2 if stderr is None else stderr.fileno()]  # fmt: skip
            environ = dict(os.environ if env is None else env)
            ignored = {number for number in signal.valid_signals()
                       if signal.getsignal(number) is signal.SIG_IGN}  # fmt: skip
            with self._lock:
                pid = self._fork(Asked(words, environ, os.getcwd(), ignored), files)
            if pid:
                return ForkedRank(words, pid)
        return subprocess.Popen(args, env=env, stdout=stdout, stderr=stderr, **more)

    def _fork(self, asked: Asked, files: list[int]) -> int:
        """The new process; 0 if this is none for the server, or there is no server."""
        if self._connection is None:
            return 0
        data = pickle.dumps(asked)
        libc = ctypes.CDLL(None)
        libc.prctl(_SUBREAPER, 1)
        try:
            length = len(data).to_bytes(_LENGTH, "big")
            socket.send_fds(self._connection, [length], files)
            self._connection.sendall(data)
            answer = _receive(self._connection, _LENGTH)
        except OSError:
            answer = b""
        finally:
            libc.prctl(_SUBREAPER, 0)
        if not answer:
            self._connection = None
        return int.from_bytes(answer, "big")


class ForkedRank:
    """A process that the server has forked, as `subprocess.Popen` is one.

    Attributes:
        args: its words.
        pid: its number.
        returncode: its exit status; negative for a signal; None while it runs.
    """

    def __init__(self, args: list[str], pid: int):
        self.args, self.pid = args, pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._look(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: if it is not there in so many seconds.
        """
        if timeout is None:
            return self._look(0)
        end, pause = time.monotonic() + timeout, 0.0005
        while self.poll() is None:
            left = end - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(pause := min(pause * 2, left, 0.05))
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _look(self, how: int) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, how)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


# -- in the server ---------------------------------------------------------------------


def serve(connection: socket.socket, launcher: int, preload: list[str]) -> Asked:
    """Fork ranks, as long as the launcher is there. Returns in each rank.

    Args:
        connection: to the launcher.
        launcher: its process.
        preload: modules that the ranks will want.
    """
    os.setsid()  # Ctrl-C at a terminal is for the launcher
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(0)
    gc.disable()
    for module in preload:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    while True:
        asked, files = _receive_request(connection)
        pid = 0
        if program.can_run(asked.words, asked.folder):
            pid = _fork_for(launcher)
            if pid is None:
                connection.close()
                _take_place(asked, files)
                return asked
        for file in files:
            os.close(file)
        try:
            connection.sendall(pid.to_bytes(_LENGTH, "big"))
        except OSError:
            os._exit(0)


def _receive_request(connection: socket.socket) -> tuple[Asked, list[int]]:
    """What the launcher asks for; the process ends if it is gone."""
    try:
        head, files, _, _ = socket.recv_fds(connection, _LENGTH, 2)
        head += _receive(connection, _LENGTH - len(head)) if head else b""
        data = head and _receive(connection, int.from_bytes(head, "big"))
    except OSError:
        data = b""
    if not data:
        os._exit(0)
    return pickle.loads(data), files


def _receive(connection: socket.socket, length: int) -> bytes:
    """So many bytes; none if the other end is gone."""
    found = bytearray()
    while len(found) < length:
        part = connection.recv(length - len(found))
        if not part:
            return b""
        found += part
    return bytes(found)


def _fork_for(launcher: int) -> int | None:
    """Fork a process that is the launcher's child.

    Returns:
        In the server, the process, or 0 if that cannot be; in the process, None.
    """
    told, tell = os.pipe()
    wait, go = os.pipe()
    between = os.fork()
    if between == 0:
        os.close(told)
        os.close(go)
        rank = _fork_or_end()
        if rank:
            os.write(tell, rank.to_bytes(_LENGTH, "big"))
            os._exit(0)
        os.close(tell)
        os.read(wait, 1)  # until the server lets go: somebody else is the parent then
        os.close(wait)
        return None
    os.close(tell)
    os.close(wait)
    rank = int.from_bytes(os.read(told, _LENGTH), "big")
    os.waitpid(between, 0)
    if rank and _parent_of(rank) != launcher:
        os.kill(rank, signal.SIGKILL)
        rank = 0
    os.close(told)
    os.close(go)
    return rank


def _fork_or_end() -> int:
    try:
        return os.fork()
    except OSError:
        os._exit(1)


def _parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except FileNotFoundError:
        return 0


def _take_place(asked: Asked, files: list[int]) -> None:
    """In a new rank: have the files, folder and environment that were asked for."""
    os.setsid()
    _take_signals(asked.ignored)
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.chdir(asked.folder)
    shown.take(asked.words, asked.environ)


def _take_signals(ignored: set[int]) -> None:
    """Handle signals as a new Python does.

    The server ignores what the launcher ignored at first; torchrun handles some of
    these later, and then `exec` leaves none of them ignored. Python itself ignores two.
    """
    its_own = dict.fromkeys((signal.SIGPIPE, signal.SIGXFSZ), signal.SIG_IGN)
    its_own[signal.SIGINT] = signal.default_int_handler
    for number in signal.valid_signals():
        wanted = its_own.get(number, signal.SIG_DFL)
        if number in ignored:
            wanted = signal.SIG_IGN
        if signal.getsignal(number) not in (wanted, None):
            signal.signal(number, wanted)
