"""All processes of a notebook: what they see, how they are found and ended.

A kernel has a mark in its environment. Whatever it starts inherits the mark, and keeps
it in any session.
"""

import os
import time
from collections.abc import Set

import psutil

from support import limits

MARK = "NOTEBOOK_KERNEL"
GRACE = limits.GRACE  # in which a process should notice that its notebook has ended
LIMIT = limits.SHORT  # more, after which a process cannot be killed


def fix_environment(real_gpus: bool = False) -> None:
    """Set what changes the numbers, for this process and all that it starts."""
    if not real_gpus:
        os.environ["HELPERS_GPUS"] = "simulated"
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # more are in each other's way


def kernel_environment(mark: str) -> dict[str, str]:
    """Returns the environment of a kernel, which then acts as it does in JupyterLab.

    With PYTEST_CURRENT_TEST ipykernel would not show what child processes print; with
    MPLBACKEND figures might not be shown.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTEST") and name != "MPLBACKEND"
    }
    return {**kept, "NO_COLOR": "1", MARK: mark}


def find_processes(mark: str, others: Set[int] = frozenset()) -> list[psutil.Process]:
    """Returns every process that has the mark.

    Args:
        mark: what it has in its environment.
        others: process ids in which there is no need to look.
    """
    found = []
    for pid in set(psutil.pids()) - others:
        try:
            if _has_mark(pid, mark):
                found.append(psutil.Process(pid))
        except (psutil.Error, OSError):
            continue  # it has ended, or belongs to another user
    return found


def _has_mark(pid: int, mark: str) -> bool:
    if not psutil.LINUX:
        return psutil.Process(pid).environ().get(MARK) == mark
    with open(f"/proc/{pid}/environ", "rb") as file:  # a tenth of psutil's time
        return f"{MARK}={mark}".encode() in file.read().split(b"\0")


def end_processes(mark: str) -> list[str]:
    """Waits `GRACE` seconds for the processes with the mark, then kills them.

    Returns:
        A description of each that was killed.
    """
    start = time.monotonic()
    killed: dict[int, str] = {}
    while left := find_processes(mark):
        waited = time.monotonic() - start
        if waited > GRACE + LIMIT:
            raise RuntimeError(f"processes that cannot be killed: {left}")
        for process in left if waited > GRACE else []:
            try:
                command = describe(process.cmdline())
                process.kill()
                killed[process.pid] = f"process {process.pid}: {command}"
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.05)
    return list(killed.values())


def describe(command: list[str]) -> str:
    """Returns what a process was started as, on one line."""
    return " ".join(" ".join(command).split())[:200]
