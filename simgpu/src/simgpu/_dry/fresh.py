"""A dry run of a script in a new Python, of which nothing stays."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


class FreshRun:
    """`simgpu dry-run` under way, in a session of processes.

    Args:
        words: after `simgpu dry-run`.
        json: where it leaves its report.
        threads: that PyTorch may use; None: as many as it likes.
    """

    def __init__(self, words: Sequence[str], json: Path, threads: int | None = None):
        environ = dict(os.environ)
        if threads is not None:
            environ.setdefault("OMP_NUM_THREADS", str(threads))
        # a file, since a pipe that nobody reads would stop it
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this
        self._said = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "simgpu", "dry-run", "--json", str(json), *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._stderr,
            env=environ, start_new_session=True,
        )  # fmt: skip

    def status(self, wait: float = 0.0) -> int | None:
        """Its exit status; None if it is still under way after so many seconds."""
        try:
            return self._process.wait(wait)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End all processes of it that there are."""
        if hasattr(os, "killpg"):
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # there is none any more
                pass
        else:
            self._process.kill()
        self._process.wait()
        if not self._stderr.closed:
            self._stderr.seek(0)
            self._said = self._stderr.read().decode(errors="replace").rstrip()
            self._stderr.close()

    def said(self) -> str:
        """What it has written to stderr, once it has been ended by `kill`."""
        return self._said
