"""Settings that change how an allocator finds room: `PYTORCH_ALLOC_CONF`.

Models `max_split_size_mb`, `max_non_split_rounding_mb`, `roundup_power2_divisions` and
whether new segments can grow (`expandable_segments`, in `expandable.py`).

Source of the rules: c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.cpp.
"""

import math
from bisect import bisect_left
from operator import itemgetter

from simgpu._device.blocks import ROUND, Block, Pool, round_up
from simgpu._device.cards import MIB

INTERVALS = 16  # of sizes: up to 2 MiB, up to 4 MiB, ..., from 32 GiB on
_ROUNDING = 20 * MIB


class Settings:
    """Those of all GPUs of a process."""

    def __init__(self):
        self.expandable = False  # whether segments can grow
        self.reset()

    def reset(self) -> None:
        """As they are where new settings do not name them; others stay as they are."""
        self.max_split = math.inf  # bytes; blocks as large as this are not split
        self.most_waste = _ROUNDING  # bytes by which such a block may be too large
        self.divisions = [0] * INTERVALS  # between two powers of two, by interval
        self.collect_from = 0.0  # the share of the limit from which on to free blocks
        self.text = ""  # as the program has written them
        self.round = round_up  # bytes that a block takes

    def as_dict(self) -> dict:
        """What a snapshot of the memory says of them."""
        return {
            "PYTORCH_CUDA_ALLOC_CONF": self.text,
            "max_split_size": -1 if self.max_split == math.inf else self.max_split,
            "garbage_collection_threshold": self.collect_from,
            "expandable_segments": self.expandable,
            "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False,
            "roundup_power2_divisions": {
                str(2**i): divisions for i, divisions in enumerate(self.divisions)
            }
            if any(self.divisions)
            else {},
        }

    def divide(self, divisions: list[int]) -> None:
        """Round sizes up to so many steps between two powers of two."""
        self.divisions = divisions
        self.round = self._round_to_division if any(divisions) else round_up

    def _round_to_division(self, nbytes: int) -> int:
        interval = nbytes.bit_length() - MIB.bit_length()
        divisions = self.divisions[min(max(interval, 0), INTERVALS - 1)]
        if divisions <= 1 or nbytes <= ROUND * divisions:
            return round_up(nbytes)
        step = (1 << nbytes.bit_length() - 1) // divisions
        return -(-nbytes // step) * step

    def may_use(self, size: int, block_size: int) -> bool:
        """Whether a free block of `block_size` bytes may serve a request of `size`."""
        if size < self.max_split:
            return block_size < self.max_split
        return block_size < size + self.most_waste


def oversize_to_release(
    settings: Settings, pool: Pool, size: int, stream: int
) -> list[Block]:
    """Free blocks that make room for `size` bytes, before all of them are given back.

    Where blocks have a largest size to be split, those above it are not reused for
    smaller requests, and so are the first to go.
    """
    wanted = max(size, settings.max_split)
    # those that are cut in pieces cannot be given back
    free = [
        (nbytes, block)
        for nbytes, _, _, block in pool.free.get(stream, ())
        if block.segment is not None or not block.is_split
    ]
    place = bisect_left(free, wanted, key=itemgetter(0))
    if place < len(free) and free[place][1].segment is None:
        return [free[place][1]]
    found, total = [], 0
    for nbytes, block in reversed(free[:place]):
        if total >= wanted or nbytes < settings.max_split:
            break
        if block.segment is None:
            found.append(block)
            total += nbytes
    return found if total >= wanted else []
