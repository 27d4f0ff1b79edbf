"""The processes of all ranks, from one start to their end.

They start together and form one process group, so if one is lost all are ended and a
new `WorkerGroup` takes their place.
"""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

from simgpu._ranks import fork_server, store, worker
from simgpu._ranks.call import Call
from simgpu._ranks.gpus import Gpus
from simgpu._ranks.listener import Listener
from simgpu._ranks.output import Output
from simgpu._ranks.process import START_SECONDS, PythonProcess
from simgpu._ranks.report import Frame, RankError, parse_stack
from simgpu._ranks.worker import WorkerSettings


class WorkerGroup:
    """One process for each rank, and the connections to them.

    Args:
        size: how many ranks.
        gpus: of the ranks; None: they are on the CPU.
        timeout: seconds before a collective gives up.
        threads: of PyTorch in each rank.

    Attributes:
        connections: item r leads to rank r.
        pids: item r is the process of rank r; 0 as long as it has not reported.
        outputs: item r is what rank r prints.
        folder: of their files.

    Raises:
        RankError: if the ranks do not come up.
    """

    def __init__(self, size: int, gpus: Gpus | None, timeout: float, threads: int):
        self.size = size
        self.connections: list[Connection | None] = [None] * size
        self.pids = [0] * size
        self._spawned: list[PythonProcess] = []
        # of the process that keeps the store of ranks on GPUs
        self._store: Connection | None = None
        self._store_pid = 0
        self._server = fork_server.running() if fork_server.CAN_FORK else None
        inside = self._server.folder if self._server else None
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=inside))
        try:
            with Listener() as listener:
                self._settings = WorkerSettings(
                    address=listener.address,
                    key=listener.key,
                    folder=self.folder,
                    world_size=size,
                    gpus=gpus,
                    timeout=timeout,
                    threads=threads,
                    module_path=sys.path,
                    cwd=os.getcwd(),
                    environ=dict(os.environ),
                )
                self._start_processes()
                self._accept_connections(listener)
            self.outputs = [
                Output(rank, self._settings.output_file(rank)) for rank in range(size)
            ]
            self._wait_for_process_group()
        except BaseException:
            self.close()
            raise

    def _start_processes(self) -> None:
        if self._server:
            self._server.fork(self._settings)
        else:
            for rank in range(self.size):
                args = (rank, self._settings)
                self._spawned.append(
                    PythonProcess(worker.run_spawned_worker, args, self.folder)
                )
            if self._settings.gpus is not None:
                args = (self._settings,)
                self._spawned.append(
                    PythonProcess(store.keep_store_spawned, args, self.folder)
                )

    def _accept_connections(self, listener: Listener) -> None:
        needs_store = self._settings.gpus is not None
        for _ in range(self.size + needs_store):
            processes = self._spawned or [self._server.process]
            connection = listener.accept(START_SECONDS, processes)
            rank, pid = connection.recv()
            if rank == store.KEEPER:
                self._store, self._store_pid = connection, pid
            else:
                self.connections[rank], self.pids[rank] = connection, pid
            if self._server:  # one that ended earlier may have had the same number
                self._server.exit_statuses.pop(pid, None)
        if needs_store:
            port = self._store.recv()
            for connection in self.connections:
                connection.send(port)

    def _wait_for_process_group(self) -> None:
        call = Call(self)  # of nothing: each rank answers once when it is up
        call.wait(START_SECONDS)
        if report := call.finish():
            raise RankError(f"the ranks did not come up:\n{report}")

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

    def stack(self, rank: int) -> list[Frame]:
        """Where a rank is, outermost first; empty if it cannot tell."""
        if not hasattr(signal, "SIGUSR1"):
            return []
        path = self._settings.stack_file(rank)
        self.send_signal(rank, signal.SIGUSR1)
        end, found = time.monotonic() + 1, []
        while time.monotonic() < end:
            found = parse_stack(path.read_text(encoding="utf-8", errors="replace"))
            if any(frame.file == worker.__file__ for frame in found):
                break  # the outermost function is written last
            time.sleep(0.01)
        return found

    def close(self) -> None:
        """End every process of it and leave nothing behind."""
        for connection in filter(None, [*self.connections, self._store]):
            connection.close()
        for process in self._spawned:
            process.kill()
        if self._server:
            self._kill_forked()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill_forked(self) -> None:
        """End the ranks, with all that they have started, and see them gone."""
        alive = [pid for pid in (*self.pids, self._store_pid) if pid]
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        end = time.monotonic() + 5
        while time.monotonic() < end and not self._server.hung_up:
            self._server.read_exit_statuses()
            if all(pid in self._server.exit_statuses for pid in alive):
                return
            wait([self._server.connection], 0.05)
