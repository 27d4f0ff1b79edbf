"""What this process has of the memory of one card, beside other processes.

Counts what CUDA has given: PyTorch's segments, and what others of this process take
(`outside`): its context, NCCL's buffers. What other processes have on the card stands
in the machine's ledger (`ledger.py`). Leaves out: what the driver keeps for itself.
"""

import os

import torch

from simgpu._cuda_errors import words_of_cuda
from simgpu._device.ledger import Entry


class CardShare:
    """The memory of one card, as this process takes it and gives it back.

    Args:
        total: bytes of the card.

    Attributes:
        reserved: bytes of PyTorch's segments.
        most: bytes that this process had at a time, its context among them.
        outside: who else of this process has how many bytes.
        most_outside: the same when that was most.
        has_context: whether CUDA has been used on the card; nobody else sees this
            process there before.
    """

    def __init__(self, total: int):
        self.total = total
        self.reserved = self.most = 0
        self.outside: dict[str, int] = {}
        self.most_outside: dict[str, int] = {}
        self.has_context = False
        self.entry: Entry | None = None  # None: no other process has the card

    @property
    def used(self) -> int:
        """Bytes that this process has, its context among them."""
        return self.reserved + sum(self.outside.values())

    def others(self) -> dict[int, int]:
        """Process -> bytes that it has, of all others on the card."""
        return {} if self.entry is None else self.entry.others()

    @property
    def free(self) -> int:
        """Bytes of the card that nobody has taken."""
        return self.total - self.used - sum(self.others().values())

    @property
    def for_segments(self) -> int:
        """Bytes that PyTorch could have of the card in all."""
        return self.free + self.reserved

    def processes(self) -> dict[int, int]:
        """Process -> bytes that it has, in the order of their numbers."""
        found = self.others()
        if self.has_context:
            found[os.getpid()] = self.used
        return dict(sorted(found.items()))

    def open_context(self) -> None:
        """Use CUDA on the card; the first time, the context takes its memory.

        Raises:
            torch.AcceleratorError: if other processes have left too little.
        """
        if not self.has_context and not self._have(self.used):
            words = words_of_cuda("out of memory", "cudaErrorMemoryAllocation")
            raise torch.AcceleratorError(words)

    def take(self, nbytes: int) -> bool:
        """Take a segment; whether there was room."""
        if self.used + nbytes > self.total or not self._have(self.used + nbytes):
            return False
        self.reserved += nbytes
        self.most = max(self.most, self.used)
        return True

    def give_back(self, nbytes: int) -> None:
        """A segment goes back to CUDA."""
        self.reserved -= nbytes
        self._shrink()

    def take_outside(self, name: str, nbytes: int) -> bool:
        """Take memory that is not PyTorch's; whether there was room."""
        if self.used + nbytes > self.total or not self._have(self.used + nbytes):
            return False
        self.outside[name] = nbytes
        self.most = max(self.most, self.used)
        self._note_outside()
        return True

    def give_back_outside(self, name: str) -> None:
        """Give it back, if there is any of this name."""
        if self.outside.pop(name, None) is not None:
            self._shrink()

    def _have(self, nbytes: int) -> bool:
        if self.entry is not None and not self.entry.grow(nbytes, self.total):
            return False
        self.has_context = True
        self._note_outside()
        return True

    def _note_outside(self) -> None:
        if sum(self.outside.values()) > sum(self.most_outside.values()):
            self.most_outside = dict(self.outside)

    def _shrink(self) -> None:
        if self.entry is not None:
            self.entry.shrink(self.used)
