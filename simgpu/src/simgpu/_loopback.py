"""The loopback network card of this machine, on which ranks of one machine talk."""

import socket
import sys

LOOPBACK = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)  # its name, if known
HOST = "127.0.0.1"
_BACKLOG = 128  # ranks that may call at once


def listen() -> socket.socket:
    """At any free port, which only this machine can reach."""
    return socket.create_server((HOST, 0), backlog=_BACKLOG)


def loopback_store(listening: socket.socket | None = None):
    """A `TCPStore` that only this machine can reach.

    With an address alone, a store listens at every address of the machine. PyTorch is
    imported here, because who asks for a name only may do without it.

    Args:
        listening: where it is to be, which it takes over; None is any free port.
    """
    from torch.distributed import TCPStore

    listening = listening or listen()
    port = listening.getsockname()[1]
    return TCPStore(
        HOST, port, is_master=True, wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )  # fmt: skip
