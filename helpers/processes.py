"""The processes of a job, wherever they have gone: found, listed, ended.

All that a job starts has a mark in its environment, and so has what those start. Used
by `helpers.elastic`, which starts the jobs of lessons 24 and 28, and by tests.
"""

import contextlib
import os
import random
import signal
import socket
import time

import psutil

MARK = "HELPERS_ELASTIC_JOB"  # in the environment of all that a job starts


class JobError(RuntimeError):
    """A job did not do what was waited for; the message has its last words."""


def processes(job: str) -> list[psutil.Process]:
    """Every process that a job has started: it has `MARK=job` in its environment."""
    return [p for p in psutil.process_iter() if environment(p).get(MARK) == job]


def end(job: str) -> None:
    """Kill every process that a job has started.

    Raises:
        JobError: if some of them are there still after five minutes.
    """
    late = time.monotonic() + 300
    while found := processes(job):
        for process in found:
            kill(process.pid)
        psutil.wait_procs(found, 5)
        if time.monotonic() > late:
            raise JobError(f"these processes do not die: {[p.pid for p in found]}")


def free_port() -> int:
    """A port that nobody uses now.

    From 20000 to 29999: the system gives ports above these to whoever asks for any.

    Raises:
        JobError: if none of 100 is free.
    """
    for _ in range(100):
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as door, contextlib.suppress(OSError):
            door.bind(("", port))
            return port
    raise JobError("no port is free between 20000 and 30000")


def kill(pid: int) -> None:
    """Kill a process that may have gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[psutil.Process]:
    """The processes that one has started; none of one that has gone."""
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def command_line(pid: int) -> list[str]:
    """The command line of a process; empty if it has gone."""
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


def environment(process: psutil.Process) -> dict[str, str]:
    """Of a process that may be gone, or somebody else's: then nothing."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return {}
        return process.environ()
    except (psutil.Error, OSError):
        return {}
