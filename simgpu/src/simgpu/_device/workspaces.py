"""The memory that PyTorch takes for cuBLAS at its first use, and keeps.

Each thread has a handle of cuBLAS on a GPU, and each stream on which a handle is used
a workspace, from the caching allocator. Autograd's thread of the GPU has its own, so
there are two after a step of training. A thread that ends leaves its handles to the
next one.

Models: the size by card, CUBLAS_WORKSPACE_CONFIG, a size that the program sets. Leaves
out: cuSOLVER's and cuDNN's memory, and the 1 MiB that PyTorch 2.11 takes for cuBLASLt
at the first `addmm` with a bias (later versions share cuBLAS's).

Source: aten/src/ATen/cuda/CublasHandlePool.cpp and detail/DeviceThreadHandles.h of
PyTorch, where Blackwell has Hopper's size since 2.12 (pull request 175344); 8519680
bytes for each thread are in `tests/recordings/alloc_training.json`.
"""

import os
import re
import warnings

from simgpu._compat import is_torch
from simgpu._device.cards import KIB, Card

WORKSPACE = (2 * 4096 + 8 * 16) * KIB  # bytes: CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8
WORKSPACE_OF_HOPPER = 8 * 4096 * KIB  # :4096:8
_HOPPER, _BLACKWELL = 9, (10, 12)  # major compute capabilities
OF_AUTOGRAD = 0  # the handle of autograd's thread, which never ends
_CONFIG = re.compile(":([0-9]+):([0-9]+)")  # KiB, how many


def default_size(card: Card) -> int:
    """Bytes of a workspace, as the environment or else the card has it."""
    major = card.capability[0]
    large = major == _HOPPER or (major in _BLACKWELL and is_torch((2, 12)))
    size = WORKSPACE_OF_HOPPER if large else WORKSPACE
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if config is None:
        return size
    found = _CONFIG.findall(config)
    if not found:
        warnings.warn(
            "Could not parse CUBLAS_WORKSPACE_CONFIG, using default workspace size "
            f"of {size} bytes.",
            stacklevel=2,
        )
        return size
    return sum(int(kib) * int(count) * KIB for kib, count in found)


class Handles:
    """The handles of one thread; they go back when it ends."""

    def __init__(self):
        self.of: dict[Workspaces, int] = {}

    def on(self, workspaces: "Workspaces") -> int:
        """The thread's handle on a GPU."""
        handle = self.of.get(workspaces)
        if handle is None:
            handle = self.of[workspaces] = workspaces.reserve()
        return handle

    def __del__(self):
        for workspaces, handle in self.of.items():
            workspaces.unused.append(handle)


class Workspaces:
    """Those of one GPU.

    Args:
        memory: its allocator.
    """

    def __init__(self, memory):
        self.memory = memory
        self.unused: list[int] = []  # handles whose thread has ended
        self.ready: set[tuple[int, int]] = set()  # (handle, stream), large enough
        self._last = OF_AUTOGRAD  # handle that was made
        self._blocks: dict[tuple[int, int], tuple] = {}  # to (block, bytes)

    def reserve(self) -> int:
        """A handle for a thread that has none."""
        if self.unused:
            return self.unused.pop()
        self._last += 1
        return self._last

    def take(self, key: tuple[int, int], size: int) -> None:
        """Make sure that a handle has `size` bytes on a stream.

        Raises:
            torch.OutOfMemoryError: if they do not fit.
        """
        __tracebackhide__ = True
        block, has = self._blocks.get(key, (None, -1))
        if has < size:
            self._blocks[key] = self.memory.malloc(size, key[1]), size
            self._free(block)
        self.ready.add(key)

    def clear(self) -> None:
        """Give all of them back."""
        blocks, self._blocks = self._blocks, {}
        self.ready.clear()
        for block, _ in blocks.values():
            self._free(block)

    def _free(self, block) -> None:
        if block is not None:
            self.memory.free(block)
