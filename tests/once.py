"""What the processes of a run share: one of them makes a value, the others read it."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Made = TypeVar("Made")


class Once:
    """Makes values that pickle can keep, each by one process of a run.

    Args:
        folder: for the values, the same one in all processes.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def __call__(self, name: str, make: Callable[[], Made]) -> Made:
        """The value of this name; whoever asks first makes it, the others wait."""
        import fcntl  # not on Windows, where nothing runs that is slow

        kept = self._folder / f"{name}.pickle"
        with open(kept.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                kept.write_bytes(pickle.dumps(make()))
        return pickle.loads(kept.read_bytes())
