"""Blocks of GPU memory, and the pools in which the free ones wait.

Sizes and names are those of c10/cuda/CUDACachingAllocator.cpp.
"""

import itertools
from bisect import bisect_left, insort

from simgpu._compat import is_torch
from simgpu._device.statistics import Stats

ROUND = 512  # kMinBlockSize: blocks are multiples of this many bytes
SMALL_SIZE = 2**20  # kSmallSize: requests up to this go to the small pool
SMALL_SEGMENT = 2 * 2**20  # kSmallBuffer: a segment of the small pool
LARGE_SEGMENT = 20 * 2**20  # kLargeBuffer: for requests of less than ...
LARGE_REQUEST = 10 * 2**20  # kMinLargeAlloc; larger ones get a segment of their own
ROUND_SEGMENT = 2 * 2**20  # kRoundLarge: ... rounded to this
FIRST_HANDLE = 0x5000_0000_0000  # of streams
DEFAULT_POOL = (0, 0)  # the id of what is in no private pool
NO_FRAMES: list[dict] = []
NUMBERED = is_torch((2, 12))  # newer ones prefer the older segment, not the address
_numbers = itertools.count(1)  # of segments, in this process


def round_up(nbytes: int) -> int:
    """Bytes that a block for `nbytes` takes."""
    return max(-(-nbytes // ROUND), 1) * ROUND


def segment_size(size: int) -> int:
    """Bytes that the allocator asks CUDA for, to hold a block of `size`."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < LARGE_REQUEST:
        return LARGE_SEGMENT
    return -(-size // ROUND_SEGMENT) * ROUND_SEGMENT


def stream_handle(index: int, stream: int) -> int:
    """The handle by which CUDA would know a stream of a GPU; 0 for the default one."""
    return FIRST_HANDLE + (index << 16) + (stream << 4) if stream else 0


class Block:
    """A piece of a segment, in use or free. Neighbours in a segment are linked."""

    __slots__ = (
        "address", "size", "requested", "stream", "pool", "allocated", "prev", "next",
        "waiting", "stream_uses", "frames", "segment_frames", "writer", "before",
        "written_since", "segment", "mapped", "counter",
    )  # fmt: skip

    def __init__(
        self, address: int, size: int, stream: int, pool: "Pool", counter: int = 0
    ):
        self.address, self.size, self.stream, self.pool = address, size, stream, pool
        self.requested = 0
        self.allocated = False
        self.waiting = False  # for other streams, before it is free
        self.prev: Block | None = None
        self.next: Block | None = None
        self.segment = None  # that can grow, if it is of one (`expandable.py`), ...
        self.mapped = True  # ... where it may be addresses without memory
        # (GPU, stream) of other streams that use it, by `record_stream`
        self.stream_uses: set[tuple[int, int]] | None = None
        self.counter = counter  # which segment of this process it belongs to
        self.frames = self.segment_frames = NO_FRAMES
        # What the stream sanitizer keeps: the kernel that wrote the block last, ...
        self.writer = None
        self.before = None  # ... a copy of what it held before, where races are shown,
        self.written_since = None  # ... and which uninterrupted work has written it.

    @property
    def is_split(self) -> bool:
        """Whether it is only a part of its segment."""
        return self.prev is not None or self.next is not None

    @property
    def can_be(self) -> int:
        """Bytes that it would have with memory for the addresses behind it."""
        if self.next is None or self.next.mapped:
            return self.size
        return self.size + self.next.size


class Pool:
    """The small or the large blocks that are free, by stream.

    Args:
        small: whether they are the small ones.
        settings: of the allocator, `settings.py`.
        stats: where they count, if not for themselves.
        owner: the private pool that they belong to, if any (`private_pools.py`).
    """

    def __init__(self, small: bool, settings, stats: Stats | None = None, owner=None):
        self.small = small
        self.settings = settings
        self.stats = stats or Stats()
        self.owner = owner
        self.id: tuple[int, int] = DEFAULT_POOL if owner is None else owner.id
        # stream -> [(size, counter, address, block)], sorted: the first that fits is
        # the best; of two that are as large, the one in the older segment
        self.free: dict[int, list[tuple[int, int, int, Block]]] = {}
        # the same of those without memory: stream -> [(address, block)], sorted
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes in the blocks that are free."""
        return sum(entry[0] for blocks in self.free.values() for entry in blocks)

    def first_block(self, address: int, nbytes: int, stream: int) -> Block:
        """The one block of a new segment."""
        return Block(address, nbytes, stream, self, next(_numbers) if NUMBERED else 0)

    def segment_allocated(self, nbytes: int) -> None:
        """Count a new segment."""
        self.stats.segment_allocated(nbytes)
        if self.owner is not None:
            self.owner.count_reserved(self, nbytes)

    def segment_released(self, nbytes: int) -> None:
        """Count a segment that is given back."""
        self.stats.segment_released(nbytes)
        if self.owner is not None:
            self.owner.count_reserved(self, -nbytes)

    def insert(self, block: Block) -> None:
        blocks = self.free.setdefault(block.stream, [])
        insort(blocks, (block.size, block.counter, block.address, block))

    def remove(self, block: Block) -> None:
        blocks = self.free[block.stream]
        key = block.size, block.counter, block.address
        del blocks[bisect_left(blocks, key)]

    def insert_unmapped(self, block: Block) -> None:
        blocks = self.unmapped.setdefault(block.stream, [])
        insort(blocks, (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        blocks = self.unmapped[block.stream]
        del blocks[bisect_left(blocks, (block.address,))]

    def best_fit(self, size: int, stream: int) -> Block | None:
        """Take out the smallest free block of `stream` that holds `size` bytes."""
        blocks = self.free.get(stream)
        if not blocks:
            return None
        position = bisect_left(blocks, (size,))
        if position == len(blocks):
            return None
        if blocks[position][3].segment is not None:
            position = self._beside_expandable(blocks, position)
            if position == len(blocks):
                return None
        found = blocks[position][0]
        if found >= self.settings.max_split and not self.settings.may_use(size, found):
            return None
        return blocks.pop(position)[3]

    def _beside_expandable(self, blocks: list, position: int) -> int:
        """Which block to take where the best fit is in a segment that can grow.

        There, a block is as large as it can become; and where the program has turned
        such segments off, it may not be taken.
        """
        if not self.settings.expandable:
            while position < len(blocks) and blocks[position][3].segment is not None:
                position += 1
            return position
        best = blocks[position][3]
        for _, _, _, block in blocks[position + 1 :]:
            if best.segment is None or block.can_be >= best.can_be:
                break
            best, position = block, position + 1
        return position

    def take_whole_segments(self) -> list[Block]:
        """Take out the free blocks that are a segment each."""
        whole = []
        for stream, blocks in self.free.items():
            whole += [entry[3] for entry in blocks if not entry[3].is_split]
            self.free[stream] = [entry for entry in blocks if entry[3].is_split]
        return whole
