"""Where values wait between ranks: memory that other processes of the machine can read.

Each rank has one arena and writes what it gives to a collective into it; its peers
read it there. On Linux it is a file without a name, which ends with the process.
Elsewhere values travel in the messages themselves.
"""

import contextlib
import mmap
import os

import torch

ROOM = 1 << 35  # addresses, not memory: pages count once they are used
_ALIGNED = 64
_SMALL = 1024  # bytes up to which a value travels in the message


class Parcel:
    """Values of a rank on their way: where they lie, or the values themselves."""

    __slots__ = ("pid", "file", "offset", "nbytes", "data")

    def __init__(self, pid=0, file=0, offset=0, nbytes=0, data=b""):
        self.pid, self.file = pid, file
        self.offset, self.nbytes, self.data = offset, nbytes, data

    def __reduce__(self):
        return Parcel, (self.pid, self.file, self.offset, self.nbytes, self.data)


class Arena:
    """The memory in which this process leaves values, and its view of the others'."""

    def __init__(self):
        self.pid = os.getpid()
        self.file = -1
        self.mine: torch.Tensor | None = None
        self._opened: dict[tuple[int, int], torch.Tensor] = {}
        self._taken: list[tuple[int, int]] = []  # (first, end), in order
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create("simgpu")
            os.ftruncate(self.file, ROOM)
            with contextlib.suppress(OSError):  # a limit on addresses (ulimit -v)
                self.mine = _map(self.file)

    def put(self, tensors: list[torch.Tensor]) -> Parcel:
        """Copy flat tensors, one after the other, to where peers can read them."""
        nbytes = sum(tensor.nbytes for tensor in tensors)
        inline = self.mine is None or nbytes <= _SMALL
        offset = 0 if inline else self._find_room(nbytes)
        room = torch.empty(nbytes, dtype=torch.uint8) if inline else self.mine[offset:]
        position = 0
        for tensor in tensors:
            end = position + tensor.nbytes
            room[position:end].copy_(tensor.view(torch.uint8))
            position = end
        if inline:
            return Parcel(nbytes=nbytes, data=room.numpy().tobytes())
        return Parcel(self.pid, self.file, offset, nbytes)

    def _find_room(self, nbytes: int) -> int:
        """The lowest place that is large enough."""
        first = 0
        for i, (start, end) in enumerate(self._taken):
            if start - first >= nbytes:
                self._taken.insert(i, (first, first + nbytes))
                return first
            first = -(-end // _ALIGNED) * _ALIGNED
        if first + nbytes > ROOM:
            raise MemoryError(f"{nbytes} bytes for a collective, of {ROOM} in all")
        self._taken.append((first, first + nbytes))
        return first

    def free(self, parcel: Parcel) -> None:
        """Nobody will read a parcel of this process again."""
        if not parcel.data and parcel.nbytes:
            self._taken.remove((parcel.offset, parcel.offset + parcel.nbytes))

    def close(self) -> None:
        """This process needs it no more; who has opened it can go on to read."""
        if self.file >= 0:
            os.close(self.file)
            self.file, self.mine = -1, None

    def inline(self, parcel: Parcel) -> Parcel:
        """The same values in a parcel that does not need this process."""
        return Parcel(nbytes=parcel.nbytes, data=self.read(parcel).numpy().tobytes())

    def read(self, parcel: Parcel) -> torch.Tensor:
        """The bytes of a parcel, of whichever rank.

        Raises:
            FileNotFoundError: if its process has ended, and it was not opened before.
        """
        if parcel.data:
            return torch.frombuffer(bytearray(parcel.data), dtype=torch.uint8)
        if not parcel.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        memory = self.mine
        if parcel.pid != self.pid:
            memory = self.look_at(parcel.pid, parcel.file)
        return memory[parcel.offset : parcel.offset + parcel.nbytes]

    @property
    def place(self) -> tuple[int, int]:
        """Where others find it: the process, and its file or -1."""
        return self.pid, self.file if self.mine is not None else -1

    def look_at(self, pid: int, file: int) -> torch.Tensor:
        """The memory of another process; once seen, it stays when that one ends.

        Raises:
            OSError: if that process has ended, or is on another machine.
        """
        memory = self._opened.get((pid, file))
        if memory is None:
            own = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
            memory = self._opened[pid, file] = _map(own)
            os.close(own)
        return memory


def _map(file: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, ROOM), dtype=torch.uint8)
