"""The fork server: a process that has imported PyTorch and forks ranks when asked.

PyTorch is imported once, so that a rank costs a few hundredths of a second and shares
the server's memory. Python's multiprocessing has a fork server, too; this one also says
how the ranks end. A process that starts ranks (a notebook, a run of pytest, a script)
has one, on Linux only; elsewhere each rank is a new Python process. The ranks of a
launcher that is a command are forked by another one: `_launch/server.py`.

`ForkServer` is the starter's side; `serve` is what runs in the server.
"""

import atexit
import contextlib
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

from simgpu._ranks.listener import Listener, connect
from simgpu._ranks.python_process import START_SECONDS, PythonProcess, exit_with_parent

CAN_FORK = sys.platform == "linux"
PRELOAD = (
    "torch", "torch.distributed", "torch.nn.parallel.distributed", "torch.optim",
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint",
    "torch.distributed.pipelining", "numpy", "simgpu._startup",
    "torch.testing._internal.distributed.fake_pg",
)  # fmt: skip
_running: "ForkServer | None" = None  # that of this process


# -- in the process that starts ranks --------------------------------------------------


class ForkServer:
    """The fork server of this process.

    Attributes:
        folder: of all temporary files; the server removes it if the starter is killed.
        exit_statuses: process -> how it ended, of ranks; negative for a signal.
        hung_up: whether the server has ended.
    """

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.exit_statuses: dict[int, int] = {}
        self.hung_up = False
        self.process: PythonProcess | None = None
        self.connection: Connection | None = None
        self._reading = threading.Lock()
        try:
            with Listener() as listener:
                args = (listener.address, listener.key, os.getpid(), str(self.folder))
                self.process = PythonProcess(serve, args, self.folder)
                self.connection = listener.accept(START_SECONDS, [self.process])
        except BaseException:
            self.close()
            raise

    def fork(self, calls: list[tuple[Callable, tuple]]) -> None:
        """Ask for new processes, each of which calls a function with its arguments."""
        self.connection.send(calls)

    def is_alive(self) -> bool:
        """Whether it answers."""
        with self._reading, contextlib.suppress(EOFError, OSError):
            self.connection.send(None)
            while self.connection.poll(START_SECONDS):
                if self._receive() is None:
                    return True
        return False

    def read_exit_statuses(self) -> None:
        """Read what the server has reported of ranks that ended."""
        try:
            with self._reading:
                while self.connection.poll():
                    self._receive()
        except (EOFError, OSError):
            self.hung_up = True

    def _receive(self) -> tuple[int, int] | None:
        report = self.connection.recv()
        if report is not None:
            pid, status = report
            self.exit_statuses[pid] = status
        return report

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        if self.process is not None:
            self.process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def running() -> ForkServer:
    """The fork server of this process, a new one if there is none that answers."""
    global _running
    if _running is not None and not _running.is_alive():
        stop()
    if _running is None:
        _running = ForkServer()
    return _running


def stop() -> None:
    """End the fork server of this process, if there is one."""
    global _running
    if _running is not None:
        _running.close()
        _running = None


def forget() -> None:
    """Leave the server alone, in a forked child of its starter: it is the parent's."""
    global _running
    _running = None


atexit.register(stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)


# -- in the server ---------------------------------------------------------------------


def serve(address: tuple[str, int], key: bytes, starter_pid: int, folder: str) -> None:
    """Fork ranks as asked, and report how they end, until the starter ends.

    Args:
        address: where the starter listens.
        key: of its listener.
        starter_pid: its process.
        folder: of all temporary files; it goes when the starter does.
    """
    starter = connect(address, key)
    _preload()
    with contextlib.suppress(EOFError, ConnectionError):
        # A dying starter hangs up before it is dead: also a send may find that out.
        _serve_until_hang_up(starter, starter_pid)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # and the ranks with it


def _preload() -> None:
    gc.disable()  # a quarter of the time of these imports is the collector's
    for module in PRELOAD:
        importlib.import_module(module)
    gc.freeze()  # so that a rank's collector leaves the shared pages alone
    gc.enable()


def _serve_until_hang_up(starter: Connection, starter_pid: int) -> None:
    """Returns when the starter's process is gone; raises when it hangs up."""
    rank_ended, wakeup = os.pipe()  # Python writes to it at each SIGCHLD
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the starter tells the ranks
    while True:
        ready = wait([starter, rank_ended], 0.5)
        if os.getppid() != starter_pid:
            return
        if rank_ended in ready:
            os.read(rank_ended, 4096)
            for report in _reap():
                starter.send(report)
        elif starter in ready:
            calls = starter.recv()
            if calls is None:  # is the server alive?
                starter.send(None)
                continue
            close = (starter.fileno(), rank_ended, wakeup)
            for function, args in calls:
                _fork(function, *args, close=close)


def _fork(function: Callable, *args, close: tuple[int, ...]) -> None:
    """Fork a process, which closes these files of the server, for a function."""
    server = os.getpid()
    if os.fork() != 0:
        return
    try:
        exit_with_parent(server)
        os.setpgid(0, 0)  # what a rank starts ends with it
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.modules["numpy"].random.seed()  # or all would draw the same
        for fd in close:
            os.close(fd)
        function(*args)
    finally:
        os._exit(1)


def _reap() -> list[tuple[int, int]]:
    """(process, exit status) of every rank that has ended; negative for a signal."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended
