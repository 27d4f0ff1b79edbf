"""How far a dry run is, on one line of the screen that is written anew."""

import sys
import threading
import time

_EVERY = 1.0  # seconds


class Progress:
    """Says on stderr what a dry run does; on a terminal, once a second.

    Args:
        title: what is run.
    """

    def __init__(self, title: str = "dry run"):
        self.title = title
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._wide = 0

    def begin(self, dry) -> None:
        self._dry, self._since = dry, time.monotonic()
        if sys.stderr.isatty():
            self._thread = threading.Thread(target=self._go_on, daemon=True)
            self._thread.start()

    def end(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            print("\r" + " " * self._wide + "\r", end="", file=sys.stderr, flush=True)

    def _go_on(self) -> None:
        while not self._over.wait(_EVERY):
            dry = self._dry
            done, most = len(dry.moments), dry.job.steps
            where = f"step {done + 1} of {most}" if done else "building, first step"
            held = dry.gpu.memory.both.allocated_bytes.current / 2**30
            line = (
                f"{self.title}: {where}, {time.monotonic() - self._since:.0f} s; "
                f"{len(dry.events):,} kernels and messages so far, {held:.1f} GiB"
            )
            self._wide = max(self._wide, len(line))
            print(f"\r{line:{self._wide}}", end="", file=sys.stderr, flush=True)
