"""The allocator explorer: where does one more tensor find room?"""

import torch

from helpers import draw
from helpers.explore.explorer import Explorer, choice, slider
from simgpu import CachingAllocator

MIB = 2**20
CARD = 64 * MIB
_FREE = ("none", "every second", "first half", "all")


def allocator() -> Explorer:
    """Tensors come, some go, one more is asked for: where does it find room?

    A GPU of 64 MiB of its own; the simulated GPUs of the notebook are not touched.

    Taught in 04-count-memory.
    """
    return Explorer(
        allocator_picture,
        tensors=slider("tensors", 9, 1, 24),
        size=slider("MiB of each", 6, 1, 24),
        free=choice("then free", _FREE, "every second"),
        more=slider("MiB of one more", 12, 1, 48),
    )


def allocator_picture(tensors: int, size: int, free: str, more: int) -> draw.Picture:
    """The segments after the story, and how it ended."""
    memory, blocks = CachingAllocator(0, CARD), []
    ending = ""
    try:
        for _ in range(tensors):
            blocks.append(memory.malloc(size * MIB))
    except torch.OutOfMemoryError:
        ending = f"out of memory at tensor {len(blocks) + 1} of {tensors}"
    goes = {
        "none": [], "every second": blocks[1::2], "all": blocks,
        "first half": blocks[: len(blocks) // 2],
    }[free]  # fmt: skip
    for block in goes:
        memory.free(block)
    before = memory.reserved
    if not ending:
        try:
            memory.malloc(more * MIB)
            found = "in the cache" if memory.reserved == before else "in a new segment"
            ending = f"{more} MiB more: found {found}"
        except torch.OutOfMemoryError:
            free_in = (memory.reserved - memory.allocated) // MIB
            outside = (CARD - memory.reserved) // MIB
            piece = _largest_free(memory) // MIB
            ending = (
                f"{more} MiB more: out of memory. Free: {free_in} MiB in "
                f"segments, largest piece {piece}; {outside} outside"
            )
    whose = "64 MiB of memory (simulated)"
    picture = draw.segment_picture(memory.history.snapshot(), whose, "cuda:0")
    picture.title += f". {ending}"
    picture.height += 24
    picture.text(8, picture.height - 10, ending, 14, weight="bold")
    return picture


def _largest_free(memory: CachingAllocator) -> int:
    """Bytes of the largest free block in any segment."""
    blocks = [b for s in memory.history.snapshot() for b in s["blocks"]]
    return max((b["size"] for b in blocks if b["state"] == "inactive"), default=0)
