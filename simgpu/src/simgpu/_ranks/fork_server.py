"""The fork server: a process that has imported PyTorch and forks ranks when asked.

PyTorch is imported once, so that a rank costs a few hundredths of a second and shares
the server's memory. Python's multiprocessing has a fork server, too; this one also says
how the ranks end. There is one for each notebook, on Linux only; elsewhere each rank is
a new Python process.

`ForkServer` is the notebook's side; `serve` is what runs in the server.
"""

import contextlib
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

from simgpu._ranks.listener import Listener, connect
from simgpu._ranks.process import START_SECONDS, PythonProcess, exit_with_parent
from simgpu._ranks.store import keep_store
from simgpu._ranks.worker import WorkerSettings, run_worker

CAN_FORK = sys.platform == "linux"
PRELOAD = (
    "torch", "torch.distributed", "torch.nn.parallel.distributed", "torch.optim",
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint",
    "torch.distributed.pipelining", "numpy", "simgpu._startup",
    "torch.testing._internal.distributed.fake_pg",
)  # fmt: skip
_running: "ForkServer | None" = None  # that of this notebook


# -- in the notebook -------------------------------------------------------------------


class ForkServer:
    """The notebook's fork server.

    Attributes:
        folder: of all temporary files; the server removes it if the notebook is killed.
        exit_statuses: process -> how it ended, of ranks; negative for a signal.
        hung_up: whether the server has ended.
    """

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.exit_statuses: dict[int, int] = {}
        self.hung_up = False
        self.process: PythonProcess | None = None
        self.connection: Connection | None = None
        try:
            with Listener() as listener:
                args = (listener.address, listener.key, os.getpid(), str(self.folder))
                self.process = PythonProcess(serve, args, self.folder)
                self.connection = listener.accept(START_SECONDS, [self.process])
        except BaseException:
            self.close()
            raise

    def fork(self, settings: WorkerSettings) -> None:
        """Ask for the ranks of a new process group."""
        self.connection.send(settings)

    def is_alive(self) -> bool:
        """Whether it answers."""
        with contextlib.suppress(EOFError, OSError):
            self.connection.send(None)
            while self.connection.poll(START_SECONDS):
                if self._receive() is None:
                    return True
        return False

    def read_exit_statuses(self) -> None:
        """Read what the server has reported of ranks that ended."""
        try:
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
    """The notebook's fork server, a new one if there is none that answers."""
    global _running
    if _running is not None and not _running.is_alive():
        stop()
    if _running is None:
        _running = ForkServer()
    return _running


def stop() -> None:
    """End the notebook's fork server, if there is one."""
    global _running
    if _running is not None:
        _running.close()
        _running = None


def forget() -> None:
    """Leave the server alone, in a forked child of the notebook: it is the parent's."""
    global _running
    _running = None


# -- in the server ---------------------------------------------------------------------


def serve(address: tuple[str, int], key: bytes, notebook_pid: int, folder: str) -> None:
    """Fork ranks as asked, and report how they end, until the notebook ends.

    Args:
        address: where the notebook listens.
        key: of its listener.
        notebook_pid: its process.
        folder: of all temporary files; it goes when the notebook does.
    """
    notebook = connect(address, key)
    _preload()
    with contextlib.suppress(EOFError, ConnectionError):
        # A dying notebook hangs up before it is dead: also a send may find that out.
        _serve_until_hang_up(notebook, notebook_pid)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # and the ranks with it


def _preload() -> None:
    gc.disable()  # a quarter of the time of these imports is the collector's
    for module in PRELOAD:
        importlib.import_module(module)
    gc.freeze()  # so that a rank's collector leaves the shared pages alone
    gc.enable()


def _serve_until_hang_up(notebook: Connection, notebook_pid: int) -> None:
    """Returns when the notebook's process is gone; raises when it hangs up."""
    rank_ended, wakeup = os.pipe()  # Python writes to it at each SIGCHLD
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the notebook tells the ranks
    while True:
        ready = wait([notebook, rank_ended], 0.5)
        if os.getppid() != notebook_pid:
            return
        if rank_ended in ready:
            os.read(rank_ended, 4096)
            for report in _reap():
                notebook.send(report)
        elif notebook in ready:
            settings = notebook.recv()
            if settings is None:  # is the server alive?
                notebook.send(None)
                continue
            close = (notebook.fileno(), rank_ended, wakeup)
            if settings.gpus is not None:
                _fork(keep_store, settings, close=close)
            for rank in range(settings.world_size):
                _fork(run_worker, rank, settings, close=close)


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
