"""Files that a notebook wrote, and shared memory that it left: Linux only."""

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from support.limits import SHORT

# where two processes may leave memory that they shared
SHARED_MEMORY = Path("/dev/shm")
# what others write in a repository while tests run: git, caches, editors
PASSED_OVER = (
    ".git", ".hypothesis", ".ipynb_checkpoints", ".pytest_cache", ".ruff_cache",
    ".venv", ".virtual_documents", "__pycache__",
)  # fmt: skip
# what IPython and matplotlib keep in a home folder, whatever a notebook does
KEPT_AT_HOME = (".ipython", ".cache/matplotlib", ".config/matplotlib")


def files(folder: str | Path) -> dict[str, tuple[int, int]]:
    """Returns when each file under a folder was written, and its bytes, by path."""
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:  # it has gone meanwhile
        return {}
    found = {}
    for entry in entries:
        if entry.name in PASSED_OVER:
            continue
        if entry.is_dir(follow_symlinks=False):
            found |= files(entry.path)
            continue
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            found[entry.path] = (status.st_mtime_ns, status.st_size)
    return found


def files_at_home(home: Path) -> dict[str, tuple[int, int]]:
    """Returns the same of the home folder of notebooks, less `KEPT_AT_HOME`."""
    return {
        path: written
        for path, written in files(home).items()
        if not path.removeprefix(f"{home}/").startswith(KEPT_AT_HOME)
    }


def changed(before: dict[str, tuple], after: dict[str, tuple]) -> list[str]:
    """Returns the files that were written, made or removed."""
    paths = sorted(before.keys() | after.keys())
    return [path for path in paths if before.get(path) != after.get(path)]


def shared_memory() -> list[str]:
    """Returns what is in /dev/shm now, of whatever process."""
    return [entry.path for entry in os.scandir(SHARED_MEMORY)]


def used_by(pids: Iterable[int]) -> set[tuple[int, int]]:
    """Returns device and inode of all files that these have open or mapped."""
    used = set()  # by inode: a semaphore is mapped under a name that it no longer has
    for pid in pids:
        process = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_bytes().splitlines():
                device, inode = line.split()[3:5]
                major, minor = (int(number, 16) for number in device.split(b":"))
                used.add((os.makedev(major, minor), int(inode)))
        with contextlib.suppress(OSError):
            for link in os.scandir(process / "fd"):
                used.add(identity(link.path))
    return used - {None}


def unused(paths: list[str]) -> list[str]:
    """Returns the files that are there and that no process has open or mapped."""
    used = {None, *used_by(psutil.pids())} if paths else set()
    return [path for path in paths if identity(path) not in used and not _is_kept(path)]


def owner(path: str) -> int | None:
    """Returns the process that PyTorch names in the file that it shares."""
    found = re.match(r"torch_(\d+)_", os.path.basename(path))
    return int(found[1]) if found else None


def _is_kept(path: str) -> bool:
    """Whether PyTorch removes it when the process ends that shared it, and which runs.

    A process of a notebook that is left running is reported by itself.
    """
    pid = owner(path)
    return pid is not None and os.path.exists(f"/proc/{pid}")


def identity(path: str) -> tuple[int, int] | None:
    """Returns device and inode of a file; None if it has gone."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def still_unused(paths: list[str], seconds: float = SHORT) -> list[str]:
    """Returns the files that stay unused.

    A tensor in a queue, for example, is nobody's until it arrives.

    Args:
        paths: files that have appeared, of whatever process.
        seconds: after which what is still there has been left behind.
    """
    late = time.monotonic() + seconds
    while (paths := unused(paths)) and time.monotonic() < late:
        time.sleep(0.1)
    return paths
