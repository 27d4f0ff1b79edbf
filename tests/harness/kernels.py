"""A kernel that notices its own death, says how it died, and leaves no process.

Its sockets are files of its own where there are such sockets. Jupyter's usual ports are
chosen before the kernel binds them, and a suite that opens hundreds of connections
meanwhile takes one of them now and then.
"""

import os
import signal
import site
import tempfile
import time
from pathlib import Path
from queue import Empty

from jupyter_client.manager import KernelManager
from nbval.kernel import (
    CURRENT_ENV_KERNEL_NAME,
    NbvalKernelspecManager,
    RunningKernel,
)

from support.limits import GRACE
from tests.harness.processes import end_processes, kernel_environment

SECONDS_TO_STOP = GRACE  # that a kernel gets to end by itself


def kernel_settings(folder: Path) -> dict:
    """Returns the arguments of Jupyter's kernel managers for a kernel of this Python.

    Args:
        folder: an empty one, with a short name: a socket's may have 107 characters.
    """
    sockets = {"transport": "ipc", "ip": str(folder / "socket")}
    return {
        "kernel_name": CURRENT_ENV_KERNEL_NAME,
        "kernel_spec_manager": NbvalKernelspecManager(),
        **(sockets if os.name == "posix" else {}),
    }


class KernelDied(Exception):
    """The kernel's process ended while it was needed."""


class Kernel(RunningKernel):
    """A kernel of this Python.

    Args:
        folder: its working directory.
        startup_timeout: in seconds.
        mark: in the environment of all its processes, see processes.py.
        home: its home folder; None for that of this process.

    Attributes:
        left: after `stop`, a description of each process that had to be killed.
    """

    def __init__(
        self, folder: Path, startup_timeout: float, mark: str, home: Path | None
    ) -> None:
        self.mark = mark
        self.left: list[str] = []
        environment = kernel_environment(mark)
        if home is not None:
            # packages of `pip install --user` are still found
            environment |= {"HOME": str(home), "PYTHONUSERBASE": site.getuserbase()}
        self.log = tempfile.TemporaryFile()
        self.sockets = tempfile.TemporaryDirectory(prefix="kernel-")
        try:
            self.km = KernelManager(**kernel_settings(Path(self.sockets.name)))
            self.km.start_kernel(
                cwd=str(folder),
                env=environment,
                stdout=self.log,
                stderr=self.log,
                extra_arguments=["--HistoryManager.hist_file=:memory:"],
            )
            self.kc = self.km.client()
            self.kc.start_channels()
            self.kc.wait_for_ready(timeout=startup_timeout)
            self._ensure_iopub_up()
        except Exception as error:
            what = f"the kernel did not start: {error}\n{self.last_lines()}"
            self.stop()
            raise KernelDied(what) from error

    def last_lines(self) -> str:
        """Returns the last lines that the kernel's process wrote."""
        self.log.seek(0)
        return "\n".join(self.log.read().decode(errors="replace").splitlines()[-15:])

    def get_message(self, stream: str, timeout: float | None = None) -> dict:
        """As in nbval, but raises KernelDied as soon as no message can come."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while True:
            alive = self.is_alive()
            left = max(0.0, deadline - time.monotonic())
            try:
                return super().get_message(stream, min(0.5, left) if alive else 0.1)
            except Empty:
                if not alive:
                    raise self.death() from None
                if left == 0:
                    raise

    def death(self) -> KernelDied:
        """Returns an error that says how the dead kernel ended."""
        status = self.km.provisioner.process.poll()
        how = f"exit status {status}"
        if status < 0:
            how += f", {signal.Signals(-status).name}"
        return KernelDied(f"the kernel died ({how})\n{self.last_lines()}".rstrip())

    def stop(self) -> None:
        """Asks the kernel to end, then ends what is left."""
        if hasattr(self, "kc"):
            self.kc.shutdown()
            deadline = time.monotonic() + SECONDS_TO_STOP
            while self.is_alive() and time.monotonic() < deadline:
                time.sleep(0.05)
            self.kc.stop_channels()
            del self.kc
        if hasattr(self, "km"):
            self.km.shutdown_kernel(now=True)
            del self.km
        self.sockets.cleanup()
        self.left += end_processes(self.mark)
