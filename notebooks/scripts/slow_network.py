"""A slow network on one machine. Used in 15-talk-between-ranks.

Linux paces what goes through the connections of a process; every message of `late`
sets out 10 ms after it was sent. Elsewhere only the 10 ms are slow.
"""

import os
import socket
import sys
import time

import psutil
import torch
import torch.distributed as dist

SO_MAX_PACING_RATE = 47  # from Linux's asm-generic/socket.h; Python has no name for it


def late(x: torch.Tensor, to: int) -> dist.Work:
    """What `dist.isend` does, 10 ms later."""
    time.sleep(0.01)
    return dist.isend(x, to)


def slow_down(rate: int) -> bool:
    """Let at most `rate` bytes a second through each connection of this process.

    The buffer is made small too, or it would take in a whole message at once. Nothing
    takes the pacing off again: it ends with the process.

    Returns:
        Whether this system can do it.
    """
    if sys.platform != "linux":
        return False
    for connection in psutil.Process().net_connections("tcp"):
        with socket.socket(fileno=os.dup(connection.fd)) as link:
            link.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
    return True
