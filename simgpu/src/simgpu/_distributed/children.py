"""Processes that the program spawns have the same GPUs; and how such a process ends."""

import atexit
import functools
import json
import multiprocessing.spawn
import os
import sys
import threading
from multiprocessing.process import BaseProcess

from simgpu import _runtime as state
from simgpu._dispatch import shared_memory

TO_CHILDREN = "SIMGPU_SPAWNED"  # the variable that tells them what they are

_raw_preparation = multiprocessing.spawn.get_preparation_data
_raw_bootstrap = BaseProcess._bootstrap


@functools.wraps(_raw_preparation)
def preparation_data(name: str) -> dict:
    """What multiprocessing tells a new process: its main module is `_spawn_main`."""
    data = _raw_preparation(name)
    for kind in ("path", "name"):
        main = data.get(f"init_main_from_{kind}")
        if main is not None and state.current().for_children is not None:
            del data[f"init_main_from_{kind}"]
            # where objects of its classes, pickled in a child, are looked for
            sys.modules["__mp_main__"] = sys.modules["__main__"]
            word = {kind: main, "gpus": state.current().for_children}
            os.environ[TO_CHILDREN] = json.dumps(word)
            data["init_main_from_name"] = "simgpu._spawn_main"
            break
    return data


def bootstrap(process, *args, **kwargs) -> int:
    """The life of a child of multiprocessing, which must not abort at its end."""
    status = _raw_bootstrap(process, *args, **kwargs)
    shared_memory.end_of_process()  # a child need not end as Python does
    if state.running is not None:
        if state.running.cluster is not None:
            state.running.cluster.end()  # a forked process runs no atexit functions
        if state.running.gloo_groups:
            leave(status)
    return status


def leave(status: int) -> None:
    """End a process in which gloo has run.

    Its threads may want Python's lock while Python takes itself down, which aborts the
    process: so end it before that, with all that a program may expect done.
    """
    threading._shutdown()  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
