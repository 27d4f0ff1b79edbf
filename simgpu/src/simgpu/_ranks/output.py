"""Shows in the notebook what a rank prints, each line under the rank's number.

A rank writes to a file, so it never waits for the notebook to read. The rank appends,
and the notebook empties the file between calls.
"""

import os
from pathlib import Path

SHOWN = 10**7  # bytes of each rank's output that a call shows


class Output:
    """What one rank has printed, and how much of it has been shown."""

    def __init__(self, rank: int, path: Path):
        self.rank = rank
        self.path = path
        self._read = 0  # bytes of the file
        self._partial = b""  # the beginning of a line whose end has not come
        self._left = SHOWN  # bytes that this call may still show

    def begin_call(self) -> None:
        """Let another `SHOWN` bytes be shown."""
        self._left = SHOWN

    def show(self) -> None:
        """Print the lines that have come since the last time."""
        self._read_on()
        self._print(self._partial.rfind(b"\n") + 1)

    def finish_call(self, empty: bool) -> None:
        """Print the rest, also a line without an end.

        Args:
            empty: whether to empty the file; only when the rank has answered.
        """
        self._read_on()
        self._print(len(self._partial))
        if self._left == 0:
            print(f"[{self.rank}] ... (more than {SHOWN // 10**6} MB in all)")
        if empty and self._read:
            os.truncate(self.path, 0)
            self._read = 0

    def _read_on(self) -> None:
        if not self.path.exists() or self.path.stat().st_size <= self._read:
            return
        with open(self.path, "rb") as file:
            file.seek(self._read)
            new = file.read(self._left)
        self._read += len(new)
        self._left -= len(new)
        self._partial += new
        if self._left == 0:  # the rest is not shown
            self._read = self.path.stat().st_size

    def _print(self, length: int) -> None:
        text, self._partial = self._partial[:length], self._partial[length:]
        for line in text.decode("utf-8", "replace").splitlines():
            print(f"[{self.rank}] {line}")
