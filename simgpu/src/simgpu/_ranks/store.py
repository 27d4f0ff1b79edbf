"""The process that keeps the store at which the ranks of a job on GPUs meet.

torchrun's agent keeps one, too: so `dist.init_process_group("nccl")` finds it by the
same variables of the environment. It is a process of its own, because a store is served
by a thread of C++, and neither the fork server nor the process that starts the ranks is
to have one. Only this machine can reach it.
"""

import contextlib
import os
from typing import NoReturn

from simgpu._loopback import loopback_store
from simgpu._ranks.listener import Rendezvous

KEEPER = -1  # in place of a rank, where it reports


def keep_store(rendezvous: Rendezvous) -> NoReturn:
    """Keep the store until the process that has started the ranks hangs up."""
    starter = rendezvous.report(KEEPER)
    store = loopback_store()
    starter.send(store.port)
    with contextlib.suppress(EOFError, OSError):
        starter.recv()
    os._exit(0)
