"""What each process has in use on each card of one machine: shared by all of them.

The processes of one command, or of one job of ranks, see the same cards. They map one
small file with a row for each process and card. A process writes its row when CUDA
gives it memory or takes it back, which is rare, and reads the others' when it asks for
more, or how much is left. Nothing here needs PyTorch.

Who finds which file: `VARIABLE` names it to the processes that this one starts. Ranks
of a launcher that is not ours (`torchrun -m simgpu`) take the address at which they
meet. Everyone else makes a file of its own, on Linux one without a name.

A process that dies leaves its row; whoever reads it next knows by its number and its
start that it is gone, and clears it. The lock on the file goes with its holder. Leaves
out: Windows, which has no such lock; there each process has the cards to itself.
"""

import contextlib
import hashlib
import mmap
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import util
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

VARIABLE = "SIMGPU_CARDS"  # names the file to processes that this one starts
FILE = "cards"  # its name in a folder of a command or job
CARDS_OF_NODE = 64  # numbers of cards that are kept for each node
_HAS_PROC = os.path.exists("/proc/self/stat")
# That one waits for the lock. It is held for microseconds, by a process that may have
# to wait for a core.
_SECONDS = 60.0
_SHORTEST, _LONGEST = 2e-5, 1e-3  # seconds between two tries
_STOPPED = (
    "another process of this program has been stopped while it asked for memory of a "
    "simulated GPU; let it go on, or end it"
)
# words of the file: the head, then rows
_MACHINE, _ROWS, _JOINED = range(3)  # which machine; rows in use; that ever were
_PID, _START, _CARD, _BYTES = range(4)
_WIDTH, _MOST_ROWS = 8, 16384
_SIZE = _WIDTH * (1 + _MOST_ROWS) * 8  # bytes; pages count once they are used


def create(path: Path) -> None:
    """An empty file for processes that are going to be started."""
    with open(path, "wb") as file:
        file.truncate(_SIZE)


def start_of(pid: int) -> int | None:
    """When a process has started, as the system counts; None if it has ended.

    0 where the system does not say.
    """
    if not _HAS_PROC:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return 0
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            found = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if found[0] in (b"Z", b"X") else int(found[19])


def join(machine: tuple) -> "Ledger | None":
    """The ledger of the machine on which this process is; None on Windows.

    The environment names it from now on to processes that this one starts.

    Args:
        machine: what its cards are; with other cards it is another machine.
    """
    if fcntl is None:
        return None
    digest = hashlib.blake2b(repr(machine).encode(), digest_size=7).digest()
    number = int.from_bytes(digest, "big")
    before = os.environ.get(VARIABLE)
    path, name = before, None
    if path is None and (name := _meeting_place()) is not None:
        path = name
    file = None if path is None else _open(path, name is not None)
    if file is not None:
        found = Ledger(file, path, before, name)
        if found.is_of(number):
            return found
        found.leave()
    found = Ledger(*_new(), before)
    found.is_of(number)
    return found


def _meeting_place() -> str | None:
    """The file of ranks whose launcher gives them none: by where they meet."""
    names = ("RANK", "MASTER_ADDR", "MASTER_PORT")
    if not all(name in os.environ for name in names):
        return None
    where = "".join(
        letter if letter.isalnum() else "-"
        for letter in "-".join(os.environ[name] for name in names[1:])
    )
    return os.path.join(tempfile.gettempdir(), f"simgpu-{os.getuid()}-{where}")


def _open(path: str, make: bool) -> int | None:
    """The file at a path; None if it is gone, or another one by now."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    if make:  # in a folder where others write, too
        flags |= os.O_CREAT | os.O_NOFOLLOW
    try:
        file = os.open(path, flags, 0o600)
    except OSError:
        return None
    found = os.fstat(file)
    ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
    if make and ours and found.st_size == 0:
        os.ftruncate(file, _SIZE)
    elif not ours or found.st_size != _SIZE:
        os.close(file)
        return None
    return file


def _new() -> tuple[int, str]:
    """A file of this process, and its path."""
    if hasattr(os, "memfd_create"):
        file, path = os.memfd_create("simgpu-cards"), ""
    else:
        file, path = tempfile.mkstemp(prefix="simgpu-cards-")
        _remove_at_end(path)
    os.ftruncate(file, _SIZE)
    return file, path


def _identity(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_dev, found.st_ino


def _remove_at_end(path: str) -> Callable[[], None]:
    """Remove a file when this process ends, or now, if what is returned is called."""
    return util.Finalize(None, _remove, (path,), exitpriority=0)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


class Ledger:
    """The file, as this process reads and writes it.

    Args:
        file: its descriptor, which is this object's from now on.
        path: where others find it, should the system not show them this process's.
        before: what `VARIABLE` was.
        made: the path, if whoever ends first is to remove it.
    """

    def __init__(
        self, file: int, path: str, before: str | None, made: str | None = None
    ):
        self._file, self._path, self._before = file, path, before
        self._identity = _identity(file)
        self._map = mmap.mmap(file, _SIZE)
        self._words = memoryview(self._map).cast("q")
        self.entries: list[Entry] = []
        self._remove = None if made is None else _remove_at_end(made)
        self._begin()

    def _begin(self) -> None:
        """This process has no rows yet."""
        self.pid, self._claims = os.getpid(), 0
        self._start = start_of(self.pid) or 0
        self._threads = threading.RLock()
        if _HAS_PROC:  # also a path that is removed
            self._path = f"/proc/{self.pid}/fd/{self._file}"
        os.environ[VARIABLE] = self._path

    def is_of(self, number: int) -> bool:
        """Whether it is this machine's; nobody's becomes so."""
        with self.locked():
            if self._words[_MACHINE] == 0:
                self._words[_MACHINE] = number
            return self._words[_MACHINE] == number

    def entry(self, ordinal: int) -> "Entry":
        """What this process has on a card of its node.

        Args:
            ordinal: of the card in its node.
        """
        node = int(os.environ.get("GROUP_RANK") or 0)  # as torchrun counts
        entry = Entry(self, node * CARDS_OF_NODE + ordinal)
        self.entries.append(entry)
        return entry

    def leave(self) -> None:
        """This process uses the cards no more; the environment is as it was."""
        for entry in self.entries:
            entry.clear()
        if os.environ.get(VARIABLE) == self._path:
            if self._before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = self._before
        self._words.release()
        self._map.close()
        if self._is_open():
            os.close(self._file)
        if self._remove is not None:
            self._remove()

    def after_fork(self) -> None:
        """In a forked child: the rows are its parent's."""
        for entry in self.entries:
            entry.row = None
        self._begin()

    def _is_open(self) -> bool:
        """Whether the program, as a daemon may, has not closed the file."""
        try:
            return _identity(self._file) == self._identity
        except OSError:
            return False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """No other process writes meanwhile.

        Raises:
            RuntimeError: if another one holds the lock for seconds.
        """
        with self._threads:
            if not self._is_open():  # what is mapped can be read and written yet
                yield
                return
            end, pause = time.monotonic() + _SECONDS, _SHORTEST
            while not self._lock():
                if time.monotonic() > end:
                    raise RuntimeError(_STOPPED)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 8)

    def _lock(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 8)
        except (BlockingIOError, PermissionError):
            return False
        return True

    @property
    def is_alone(self) -> bool:
        """Whether no other process has ever used these cards."""
        return self._words[_JOINED] == self._claims

    def others_on(self, card: int) -> dict[int, int]:
        """Process -> bytes, of those others that are alive; under the lock."""
        found: dict[int, int] = {}
        words = self._words
        for row in range(1, 1 + words[_ROWS]):
            first = row * _WIDTH
            pid = words[first + _PID]
            if not pid or words[first + _CARD] != card or pid == self.pid:
                continue
            if start_of(pid) == words[first + _START]:
                found[pid] = words[first + _BYTES]
            else:
                words[first + _PID] = 0
        return found

    def claim(self, card: int, nbytes: int) -> int:
        """A row of this process for a card, under the lock; returns its number.

        Raises:
            RuntimeError: if there is none left.
        """
        words = self._words
        row = self._free_row()
        first = row * _WIDTH
        words[first + _START], words[first + _CARD] = self._start, card
        words[first + _BYTES] = nbytes
        words[first + _PID] = self.pid  # from here on it counts
        words[_JOINED] += 1
        self._claims += 1
        return row

    def _free_row(self) -> int:
        words = self._words
        for row in range(1, 1 + words[_ROWS]):
            if not words[row * _WIDTH + _PID]:
                return row
        if words[_ROWS] == _MOST_ROWS:
            raise RuntimeError(f"{_MOST_ROWS} processes use the simulated GPUs already")
        words[_ROWS] += 1
        return words[_ROWS]

    def write(self, row: int, word: int, value: int) -> None:
        """One word of a row: who reads it finds the old value or the new one."""
        self._words[row * _WIDTH + word] = value


class Entry:
    """What this process has on one card.

    Args:
        ledger: in which it is.
        card: its number in the ledger.
    """

    def __init__(self, ledger: Ledger, card: int):
        self.ledger, self.card = ledger, card
        self.row: int | None = None

    def others(self) -> dict[int, int]:
        """Process -> bytes, of all others on the card."""
        if self.ledger.is_alone:
            return {}
        with self.ledger.locked():
            return self.ledger.others_on(self.card)

    def grow(self, nbytes: int, capacity: int) -> bool:
        """Have `nbytes` in all, unless the card has too few for all processes."""
        ledger = self.ledger
        with ledger.locked():
            if not ledger.is_alone:
                others = ledger.others_on(self.card)
                if others and nbytes + sum(others.values()) > capacity:
                    return False
            if self.row is None:
                self.row = ledger.claim(self.card, nbytes)
            else:
                ledger.write(self.row, _BYTES, nbytes)
        return True

    def shrink(self, nbytes: int) -> None:
        """Have no more than `nbytes` in all."""
        if self.row is not None:
            self.ledger.write(self.row, _BYTES, nbytes)

    def clear(self) -> None:
        """This process is not on the card any more."""
        if self.row is not None:
            self.ledger.write(self.row, _PID, 0)
            self.row = None
