"""The process that keeps the store at which the ranks of a job on GPUs meet.

torchrun's agent keeps one, too: so `dist.init_process_group("nccl")` finds it by the
same variables of the environment. It is a process of its own, because a store is served
by a thread of C++, and neither the notebook nor the fork server is to have one. Only
this machine can reach it.
"""

import contextlib
import os
from typing import NoReturn

from simgpu._loopback import loopback_store
from simgpu._ranks.listener import connect
from simgpu._ranks.process import exit_with_stdin
from simgpu._ranks.worker import WorkerSettings

KEEPER = -1  # in place of a rank, where it reports to the notebook


def keep_store(settings: WorkerSettings) -> NoReturn:
    """Keep the store until the notebook hangs up."""
    notebook = connect(settings.address, settings.key)
    store = loopback_store()
    notebook.send((KEEPER, os.getpid()))
    notebook.send(store.port)
    with contextlib.suppress(EOFError, OSError):
        notebook.recv()
    os._exit(0)


def keep_store_spawned(settings: WorkerSettings) -> NoReturn:
    """The same in a new Python process, where there is no fork."""
    exit_with_stdin()
    keep_store(settings)
