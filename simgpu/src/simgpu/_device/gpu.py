"""One simulated GPU: its card, its memory, its random numbers, its streams."""

import itertools

import torch

from simgpu._device.allocator import CachingAllocator
from simgpu._device.cards import Card
from simgpu._device.workspaces import Workspaces

PRIORITIES = (0, -1, -2, -3)  # of streams, from the least to the greatest


class Gpu:
    """One simulated GPU.

    Args:
        index: as the program counts.
        card: the model of the card.
        total: bytes of its memory.
        ordinal: as the machine counts, before CUDA_VISIBLE_DEVICES.
        settings: of the allocators of this process.
    """

    def __init__(self, index: int, card: Card, total: int, ordinal: int, settings=None):
        self.card = card
        self.memory = CachingAllocator(index, total, settings=settings)
        self.workspaces: Workspaces | None = None  # of cuBLAS, where they are counted
        self.generator = None  # of its random numbers
        # priority -> counts its streams; `next` of a count is one step for all threads
        self.stream_counts = {p: itertools.count() for p in PRIORITIES}
        self.external_streams = itertools.count()  # not of PyTorch's pools
        # False once the simulator has stopped, and while shapes alone are worked out
        self.alive = True
        self.renumber(index, ordinal)

    def renumber(self, index: int, ordinal: int) -> None:
        """Give it another number, where CUDA_VISIBLE_DEVICES hides or reorders GPUs."""
        self.index = self.memory.index = index
        self.ordinal = ordinal
        self.device = torch.device("cuda", index)
        self.name = f"cuda:{index}"

    def __repr__(self) -> str:
        return f"Gpu({self.name}, {self.card.name})"
