"""The processes of a job: one for each rank, and the one that keeps their store.

`Ranks` and `run_ranks` start theirs here. On Linux the fork server forks them;
elsewhere each is a new Python process. Each calls one function, which first reports to
the process that has started it (`Rendezvous.report`).
"""

import contextlib
import faulthandler
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

from simgpu._device import ledger
from simgpu._ranks import fork_server, store
from simgpu._ranks.listener import Listener, Rendezvous
from simgpu._ranks.python_process import START_SECONDS, PythonProcess, spawned
from simgpu._ranks.rank_error import Frame, parse_stack


def stack_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its stack."""
    return folder / f"{rank}.stack"


def dump_stack_when_asked(folder: Path, rank: int) -> None:
    """In a rank: at SIGUSR1, write the stack of the main thread."""
    if hasattr(signal, "SIGUSR1"):
        file = open(stack_file(folder, rank), "w")
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)


class RankProcesses:
    """One process for each rank, and the connections to them.

    Attributes:
        folder: of their files; `close` removes it.
        connections: rank -> leads to it.
        pids: rank -> its process.

    Raises:
        RankError: by `start`, if they do not come up.
    """

    def __init__(self) -> None:
        self._server = fork_server.running() if fork_server.CAN_FORK else None
        inside = self._server.folder if self._server else None
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=inside))
        ledger.create(self.folder / ledger.FILE)
        self.connections: dict[int, Connection] = {}
        self.pids: dict[int, int] = {}
        self._spawned: dict[int, PythonProcess] = {}
        # of the process that keeps the store
        self._store: Connection | None = None
        self._store_pid = 0

    def start(
        self, function: Callable, size: int, *args: object, with_store: bool
    ) -> None:
        """Start the ranks.

        Args:
            function: that each rank calls with its number, the `Rendezvous` and `args`;
                it is pickled by name.
            size: how many ranks.
            args: the same for all.
            with_store: whether they meet at a store; each is sent its port.
        """
        with Listener() as listener:
            rendezvous = Rendezvous(listener.address, listener.key, self.folder)
            calls = {
                rank: (function, (rank, rendezvous, *args)) for rank in range(size)
            }
            if with_store:
                calls[store.KEEPER] = (store.keep_store, (rendezvous,))
            if self._server:
                self._server.fork(list(calls.values()))
            else:
                for number, (target, own) in calls.items():
                    process = PythonProcess(spawned, (target, *own), self.folder)
                    self._spawned[number] = process
            for _ in calls:
                self._accept(listener)
        self.connections = dict(sorted(self.connections.items()))
        if self._store is not None:
            port = self._store.recv()
            for connection in self.connections.values():
                connection.send(port)

    def _accept(self, listener: Listener) -> None:
        processes = [*self._spawned.values()] or [self._server.process]
        connection = listener.accept(START_SECONDS, processes)
        number, pid = connection.recv()
        if number == store.KEEPER:
            self._store, self._store_pid = connection, pid
        else:
            self.connections[number], self.pids[number] = connection, pid
        if self._server:  # one that ended earlier may have had the same number
            self._server.exit_statuses.pop(pid, None)

    def exit_status(self, rank: int) -> int | None:
        """How a rank's process ended; negative for a signal; None while it lives."""
        if self._spawned:
            return self._spawned[rank].exit_status()
        self._server.read_exit_statuses()
        return self._server.exit_statuses.get(self.pids[rank])

    def wait_for_exit(self, rank: int) -> str:
        """How the process of a rank that has hung up ended, in words."""
        end = time.monotonic() + 2
        while (status := self.exit_status(rank)) is None and time.monotonic() < end:
            if self._server and self._server.hung_up:
                break
            time.sleep(0.01)
        if status is None:
            return "ended, and the one that forks ranks did too"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def send_signal(self, rank: int, number: int) -> None:
        with contextlib.suppress(OSError):
            os.kill(self.pids[rank], number)

    def stack(self, rank: int, outermost: str) -> list[Frame]:
        """Where a rank is, outermost first; empty if it cannot tell.

        Args:
            rank: one that has called `dump_stack_when_asked`.
            outermost: the file of the function that the rank runs.
        """
        if not hasattr(signal, "SIGUSR1"):
            return []
        path = stack_file(self.folder, rank)
        self.send_signal(rank, signal.SIGUSR1)
        end, found = time.monotonic() + 1, []
        while time.monotonic() < end:
            found = parse_stack(path.read_text(encoding="utf-8", errors="replace"))
            if any(frame.file == outermost for frame in found):
                break  # the outermost function is written last
            time.sleep(0.01)
        return found

    def close(self) -> None:
        """End every process, with all that it has started, and leave nothing behind."""
        for connection in filter(None, [*self.connections.values(), self._store]):
            connection.close()
        for process in self._spawned.values():
            process.kill()
        if self._server:
            self._kill_forked()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill_forked(self) -> None:
        alive = [pid for pid in (*self.pids.values(), self._store_pid) if pid]
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        end = time.monotonic() + 5
        while time.monotonic() < end and not self._server.hung_up:
            self._server.read_exit_statuses()
            if all(pid in self._server.exit_statuses for pid in alive):
                return
            wait([self._server.connection], 0.05)
