"""Starts a new Python process that calls one function; ends one with its parent."""

import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from simgpu._loopback import LOOPBACK
from simgpu._ranks.rank_error import RankError

# That a new process may take to report. It imports PyTorch, which takes a minute from a
# cold disk, or beside many others; one that ends instead is noticed at once.
START_SECONDS = 300.0
# The package is found before the function is unpickled, which imports its module.
MAIN = (
    "import pickle, sys; sys.path.insert(0, sys.argv[1]); "
    "target, args = pickle.load(sys.stdin.buffer); target(*args)"
)


class PythonProcess:
    """A new Python process that calls a function of this package.

    Args:
        target: the function; it is pickled by name.
        args: for it.
        folder: for what the process writes to stderr before it has a better place.
    """

    def __init__(self, target: Callable, args: tuple, folder: Path):
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }  # fmt: skip
        # what C++ logs has times and addresses; errors arrive as errors anyway
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        if LOOPBACK:
            environment["GLOO_SOCKET_IFNAME"] = LOOPBACK
        root = str(Path(__file__).absolute().parents[2])  # of this very package
        self._errors = folder / "start.err"
        with open(self._errors, "ab") as errors:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", MAIN, root],
                stdin=subprocess.PIPE,  # stays open: see `spawned`
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the notebook alone
            )
        self.pid = self._popen.pid
        pickle.dump((target, args), self._popen.stdin)
        self._popen.stdin.flush()

    def exit_status(self) -> int | None:
        """Negative for a signal; None while the process lives."""
        return self._popen.poll()

    def raise_if_ended(self) -> None:
        """Raises RankError, with the last line that the process has written."""
        if (status := self.exit_status()) is None:
            return
        lines = self._errors.read_text(errors="replace").splitlines()
        raise RankError(
            f"a process ended while it started, with status {status}: "
            f"{lines[-1] if lines else 'it said nothing'}"
        )

    def wait(self, seconds: float) -> int:
        return self._popen.wait(seconds)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait(10)
        with contextlib.suppress(OSError):
            self._popen.stdin.close()


def exit_with_parent(parent: int) -> None:
    """End this forked process when its parent ends, whatever it is doing then."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; we fork on Linux
    if os.getppid() != parent:  # it has ended meanwhile
        os._exit(1)


def spawned(target: Callable, *args: object) -> None:
    """Call a function in a new process that ends with the one that has started it.

    That one holds the other end of stdin.
    """

    def watch():
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    target(*args)
