"""Memory of a simulated GPU: what lives on it now, and the most that ever did.

Models: one block a storage, rounded up to 512 bytes as PyTorch's allocator does, and
an error when a card is full. Leaves out: the caching allocator (segments, reserved
memory, fragmentation) and what CUDA itself takes, so `memory_reserved` and the
statistics are refused rather than guessed.
"""

import threading

import torch

from helpers.simgpu.cards import show_bytes

ROUND = 512  # PyTorch's allocator hands out multiples of this many bytes


def round_up(nbytes: int) -> int:
    """Bytes that a block for `nbytes` takes."""
    return -(-nbytes // ROUND) * ROUND


class Memory:
    """Counts the bytes of one simulated GPU."""

    def __init__(self, index: int, total: int):
        self.index = index
        self.total = total  # bytes
        self.allocated = 0  # bytes that live now
        self.peak = 0  # the most that lived since the last reset
        self._lock = threading.RLock()  # storages die in any thread, even in take()

    def take(self, nbytes: int) -> None:
        """Count a block of `nbytes`.

        Raises:
            torch.OutOfMemoryError: if it does not fit, in PyTorch's words.
        """
        size = round_up(nbytes)
        with self._lock:
            if self.allocated + size > self.total:
                raise torch.OutOfMemoryError(self._full(size))
            self.allocated += size
            self.peak = max(self.peak, self.allocated)

    def give_back(self, nbytes: int) -> None:
        """The block of `nbytes` has died."""
        with self._lock:
            self.allocated -= round_up(nbytes)

    def _full(self, size: int) -> str:
        free, used = self.total - self.allocated, show_bytes(self.allocated)
        return (
            f"CUDA out of memory. Tried to allocate {show_bytes(size)}. "
            f"GPU {self.index} has a total capacity of {show_bytes(self.total)} of "
            f"which {show_bytes(free)} is free. Of the allocated memory {used} is "
            "allocated by PyTorch. (simulated GPU)"
        )
