"""Where values wait between ranks: memory that other processes of the machine can read.

Each rank has one arena and writes what it gives to a collective into it; its peers
read it there. On Linux it is a file without a name, which ends with the process.
Elsewhere values travel in the messages themselves.
"""

import contextlib
import mmap
import os
import threading

import torch

from simgpu._locking import one_at_a_time

_STEP = 1 << 26  # bytes: memory is mapped in multiples of it, as far as it is used
_ALIGNED = 64
_SMALL = 1024  # bytes up to which a value travels in the message
_TOO_LITTLE = (
    "{:,} bytes of shared memory for values between ranks are not to be had here: {}. "
    "Each rank needs room for what it gives, and addresses for what the others give. "
    "Give the container more memory, raise the limit (ulimit -v, ulimit -f), or let "
    "fewer or smaller collectives be under way."
)
_CLOSED = (
    "what process {} gives to a collective cannot be read: {}. All ranks must run as "
    "one user, and each must see the others under /proc."
)


class Parcel:
    """Values of a rank on their way: where they lie, or the values themselves."""

    __slots__ = ("pid", "file", "offset", "nbytes", "data")

    def __init__(self, pid=0, file=0, offset=0, nbytes=0, data=b""):
        self.pid, self.file = pid, file
        self.offset, self.nbytes, self.data = offset, nbytes, data

    def __reduce__(self):
        return Parcel, (self.pid, self.file, self.offset, self.nbytes, self.data)


class Memory:
    """The memory of one process as this one sees it, which grows as it is used.

    Args:
        file: open here, so that it stays when its process ends.
    """

    def __init__(self, file: int):
        self.file = file
        self.lock = threading.RLock()
        self._mapped: torch.Tensor | None = None

    @one_at_a_time
    def upto(self, end: int) -> torch.Tensor:
        """At least its first `end` bytes, which the file has."""
        if self._mapped is None or len(self._mapped) < end:
            self._mapped = None  # its addresses are free before others are taken
            size = os.fstat(self.file).st_size
            with _saying_what_is_missing(size):
                self._mapped = torch.frombuffer(
                    mmap.mmap(self.file, size), dtype=torch.uint8
                )
        return self._mapped

    def grow(self, end: int, filled: int) -> None:
        """Have memory from `filled` to `end`, so that writing there cannot fail."""
        with _saying_what_is_missing(end - filled):
            if os.fstat(self.file).st_size < end:
                os.ftruncate(self.file, -(-end // _STEP) * _STEP)
            os.posix_fallocate(self.file, filled, end - filled)


class Arena:
    """The memory in which this process leaves values, and its view of the others'."""

    def __init__(self):
        self.pid = os.getpid()
        self.lock = threading.RLock()  # one thread puts, another one frees
        self.mine: Memory | None = None
        self._filled = 0  # bytes of it that have been used so far
        self._opened: dict[tuple[int, int], Memory] = {}
        self._taken: list[tuple[int, int]] = []  # (first, end), in order
        if hasattr(os, "memfd_create"):
            self.mine = Memory(os.memfd_create("simgpu"))

    def put(self, tensors: list[torch.Tensor]) -> Parcel:
        """Copy flat tensors, one after the other, to where peers can read them.

        Raises:
            MemoryError: if there is no room for them.
        """
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if self.mine is None or nbytes <= _SMALL:
            room, offset = torch.empty(nbytes, dtype=torch.uint8), -1
        else:
            offset = self._find_room(nbytes)
            room = self.mine.upto(offset + nbytes)[offset:]
        position = 0
        for tensor in tensors:
            end = position + tensor.nbytes
            room[position:end].copy_(tensor.view(torch.uint8))
            position = end
        if offset < 0:
            return Parcel(nbytes=nbytes, data=room.numpy().tobytes())
        return Parcel(self.pid, self.mine.file, offset, nbytes)

    @one_at_a_time
    def _find_room(self, nbytes: int) -> int:
        """The lowest place that is large enough."""
        first = 0
        place = len(self._taken)
        for i, (start, end) in enumerate(self._taken):
            if start - first >= nbytes:
                place = i
                break
            first = -(-end // _ALIGNED) * _ALIGNED
        end = first + nbytes
        if end > self._filled:
            self.mine.grow(end, self._filled)
            self._filled = end
        self._taken.insert(place, (first, end))
        return first

    @one_at_a_time
    def free(self, parcel: Parcel) -> None:
        """Nobody will read a parcel of this process again."""
        if not parcel.data and parcel.nbytes:
            self._taken.remove((parcel.offset, parcel.offset + parcel.nbytes))

    def close(self) -> None:
        """This process needs it no more; who has opened it can go on to read."""
        for memory in (self.mine, *self._opened.values()):
            if memory is not None:
                os.close(memory.file)
        self.mine, self._opened = None, {}

    def inline(self, parcel: Parcel) -> Parcel:
        """The same values in a parcel that does not need this process."""
        return Parcel(nbytes=parcel.nbytes, data=self.read(parcel).numpy().tobytes())

    def read(self, parcel: Parcel) -> torch.Tensor:
        """The bytes of a parcel, of whichever rank.

        Raises:
            ProcessLookupError: if its process has ended, and it was not opened before.
            PermissionError: if it cannot be opened.
            MemoryError: if there are no addresses for it.
        """
        if parcel.data:
            return torch.frombuffer(bytearray(parcel.data), dtype=torch.uint8)
        if not parcel.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        memory = self.mine
        if parcel.pid != self.pid:
            memory = self.look_at(parcel.pid, parcel.file)
        end = parcel.offset + parcel.nbytes
        return memory.upto(end)[parcel.offset : end]

    @property
    def place(self) -> tuple[int, int]:
        """Where others find it: the process, and its file or -1."""
        return self.pid, self.mine.file if self.mine is not None else -1

    @one_at_a_time
    def look_at(self, pid: int, file: int) -> Memory:
        """The memory of another process; once seen, it stays when that one ends.

        Raises:
            ProcessLookupError: if that process has ended, or is on another machine.
            PermissionError: if it cannot be opened.
        """
        memory = self._opened.get((pid, file))
        if memory is None:
            try:
                own = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
            except (FileNotFoundError, ProcessLookupError) as error:
                raise ProcessLookupError(*error.args) from None
            except OSError as error:
                raise PermissionError(_CLOSED.format(pid, error.strerror)) from None
            memory = self._opened[pid, file] = Memory(own)
        return memory


@contextlib.contextmanager
def _saying_what_is_missing(nbytes: int):
    """Inside, an error of the system means that there is too little memory."""
    try:
        yield
    except OSError as error:
        raise MemoryError(_TOO_LITTLE.format(nbytes, error.strerror)) from None
