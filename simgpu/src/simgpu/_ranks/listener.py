"""A listening socket of this machine alone, where new processes report with a key.

Python's `multiprocessing.connection.Listener` has a key, too, but its `accept` waits
without end, and one client that says nothing keeps all others waiting.
"""

import contextlib
import os
import queue
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    answer_challenge,
    deliver_challenge,
)
from pathlib import Path

from simgpu._ranks.python_process import PythonProcess
from simgpu._ranks.rank_error import RankError

BACKLOG = 64  # clients that may wait at once; all ranks connect together


@dataclass(frozen=True)
class Rendezvous:
    """Where the processes of a job report.

    Attributes:
        address: host and port of the listener.
        key: what it asks for.
        folder: of the job's files.
    """

    address: tuple[str, int]
    key: bytes
    folder: Path

    def report(self, number: int) -> Connection:
        """From a new process: say which one it is, and have a connection.

        Args:
            number: the rank, or `store.KEEPER`.
        """
        connection = connect(self.address, self.key)
        connection.send((number, os.getpid()))
        return connection


class Listener:
    """Accepts clients that have its key.

    Others may come, such as a program that looks for another one at a port it has had.
    They have no key; they are turned away, and nobody waits for them.

    Attributes:
        address: host and port.
        key: what a client must have.
    """

    def __init__(self):
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self._socket.settimeout(0.1)
        self._clients: list[socket.socket] = []
        self._authenticated: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self.address = self._socket.getsockname()
        self.key = secrets.token_bytes(16)

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *exc_info) -> None:
        self._socket.close()
        for client in self._clients:  # those that have neither given a key nor gone
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def accept(self, seconds: float, processes: list[PythonProcess]) -> Connection:
        """The next client that has the key.

        Args:
            seconds: to wait.
            processes: those that should connect, or fork the ones that do.

        Raises:
            RankError: if none comes, or a process has ended.
        """
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(TimeoutError):
                client, _ = self._socket.accept()
                self._clients.append(client)
                # a thread, because a client may be long in giving its key
                threading.Thread(
                    target=self._authenticate, args=[client], daemon=True
                ).start()
            with contextlib.suppress(queue.Empty):
                return self._authenticated.get(timeout=0.1)
            for process in processes:
                process.raise_if_ended()
            if time.monotonic() > end:
                raise RankError(f"no answer from a new process after {seconds:.0f} s")

    def _authenticate(self, client: socket.socket) -> None:
        connection = Connection(client.dup().detach())
        try:
            _send_without_delay(client)
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
        except (AuthenticationError, EOFError, OSError):
            connection.close()
            client.close()
        else:
            client.close()  # first, so that `__exit__` leaves the connection alone
            self._authenticated.put(connection)


def connect(address: tuple[str, int], key: bytes) -> Connection:
    """Connect to a `Listener`, from another process."""
    connection = Client(address, authkey=key)
    client = socket.socket(fileno=connection.fileno())
    _send_without_delay(client)
    client.detach()
    return connection


def _send_without_delay(client: socket.socket) -> None:
    """Or a message behind another one waits 40 ms for the system's acknowledgement."""
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
