"""Ports for what a test starts: no two tests of this machine get the same one."""

import contextlib
import random
import socket

_KEPT = []  # sockets; each keeps its port for this process, until that ends


def free_port() -> int:
    """A port that nobody uses, below those that the system gives to connections.

    Who asks gets it for TCP, and keeps it: from now on this process has it for UDP, in
    which nobody else is interested, but for this function in other processes. So two
    tests that ask at once, of one run or of two, never get the same.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        mark = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with socket.socket() as door, contextlib.suppress(OSError):
            mark.bind(("127.0.0.1", port))
            door.bind(("", port))
            _KEPT.append(mark)
            return port
        mark.close()
