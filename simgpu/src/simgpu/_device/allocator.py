"""A model of PyTorch's caching allocator for one simulated GPU.

Models: sizes rounded to 512 bytes, a small and a large pool for each stream, segments
of 2 MiB, 20 MiB or more, best fit, splitting and merging, blocks that wait for
another stream (`waiting.py`), the retry after freeing the cache, fractions, private
pools (`private_pools.py`), and PyTorch's statistics and out-of-memory message; segments
that grow are in `expandable.py`. Leaves out: freeing by age
(`garbage_collection_threshold`). What libraries take is asked for elsewhere:
`workspaces.py`, `overhead.py`, `_dispatch/working_memory.py`.

Source of the rules and names: c10/cuda/CUDACachingAllocator.cpp of PyTorch.
"""

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from simgpu._device.blocks import (
    DEFAULT_POOL,
    NO_FRAMES,
    ROUND,
    SMALL_SIZE,
    Block,
    Pool,
    segment_size,
)
from simgpu._device.card_share import CardShare
from simgpu._device.expandable import ExpandableSegments
from simgpu._device.history import History
from simgpu._device.no_time import NoTime
from simgpu._device.out_of_memory import refusal
from simgpu._device.private_pools import PrivatePools
from simgpu._device.settings import Settings, oversize_to_release
from simgpu._device.statistics import Stat, Stats, as_table
from simgpu._device.waiting import WaitingBlocks

FIRST_ADDRESS = 0x7F00_0000_0000
ADDRESSES = 2**38  # bytes between the first addresses of two GPUs
_EXABYTE = 2**60
_COUNTS = (
    "num_alloc_retries", "num_ooms", "num_oom_rejections", "num_sync_all_streams",
    "num_device_alloc", "num_device_free",
)  # fmt: skip


class CachingAllocator:
    """The memory of one GPU, handed out in blocks.

    Args:
        index: of the GPU, as messages name it.
        total: bytes of the card.
        clock: knows when a stream has done its work.
        settings: those of the process, if it has any.
    """

    def __init__(
        self, index: int, total: int, clock: Any = None,
        settings: Settings | None = None,
    ) -> None:  # fmt: skip
        self.index = index
        self.total = total
        self.clock = clock or NoTime()
        self.share = CardShare(total)  # what this process has of the card
        self.fraction: float | None = None  # of the card that the process may take
        self.settings = settings or Settings()
        self.small, self.large = (Pool(small, self.settings) for small in (True, False))
        self.oversize_allocations, self.oversize_segments = Stat(), Stat()
        self.both = Stats()
        self.segments: dict[int, Block] = {}  # address -> first block
        self.segment_sizes: dict[int, int] = {}  # address -> bytes; none that can grow
        self.expandable = ExpandableSegments(self)
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.history = History(self)
        self.before_new_segment = None  # called where no free block is large enough
        self.observers: list = []  # called before memory is refused
        self.private = PrivatePools(self)
        self._routes = self.private.routes  # the same list: every allocation looks
        self.waiting = WaitingBlocks(self)
        self._waiting = self.waiting.blocks  # likewise
        self._freed: deque[Block] = deque()  # by the program, not taken back yet

    # -- what PyTorch asks for ---------------------------------------------------------

    @property
    def allocated(self) -> int:
        """Bytes in blocks that are in use."""
        self._take_back_freed()
        return self.both.allocated_bytes.current

    @property
    def reserved(self) -> int:
        """Bytes in segments."""
        self._take_back_freed()
        return self.both.reserved_bytes.current

    @property
    def limit(self) -> int:
        """Bytes that PyTorch may take of the card."""
        return min(self.share.for_segments, self.allowed)

    @property
    def allowed(self) -> int:
        """Bytes that the program lets PyTorch take of the card."""
        return self.total if self.fraction is None else int(self.total * self.fraction)

    def malloc(self, nbytes: int, stream: int = 0) -> Block | None:
        """A block for `nbytes`, used first on `stream`; None for no bytes at all.

        Raises:
            torch.OutOfMemoryError: if it does not fit, in PyTorch's words.
        """
        __tracebackhide__ = True
        if nbytes == 0:
            return None
        with self.clock.lock:
            if self._freed:
                self._take_back_freed()
            return self._malloc(nbytes, stream)

    def check_room(self, nbytes: int, stream: int = 0) -> None:
        """Refuse at once what cannot fit; then the cache is freed, as `malloc` would.

        Raises:
            torch.OutOfMemoryError: as `malloc` would.
        """
        __tracebackhide__ = True
        size = self.settings.round(nbytes)
        if size >= _EXABYTE:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate more than 1EB memory."
            )
        cached = self.reserved - self.allocated
        if size <= cached:  # also above a fraction that came after its segments
            return
        self.share.open_context()
        if size > cached + self.limit - self.reserved:
            pool = self.small if size <= SMALL_SIZE else self.large
            pool = self.private.pool_for(pool, stream)
            with self.clock.lock:  # others may have made room meanwhile
                pool.insert(self._new_block(size, stream, pool))

    def free(self, block: Block) -> None:
        """Give a block back; it may be used again at once on its own stream.

        May be called at any moment, in any thread, also by Python's collector while it
        runs within this very class: then the next call takes the block back.
        """
        self._freed.append(block)
        lock = self.clock.lock
        if not lock._is_owned():
            with lock:
                while self._freed:
                    self._take_back(self._freed.popleft())

    def record_stream(self, block: Block, index: int, stream: int) -> None:
        """When it is freed, the block waits for all that a stream was given before.

        Args:
            block: of this GPU.
            index: of the stream's GPU, which may be another one.
            stream: its number there.
        """
        if (index, stream) != (self.index, block.stream):
            self.waiting.note_use(block, (index, stream))

    def empty_cache(self, only: tuple[int, int] = DEFAULT_POOL) -> None:
        """Give the segments back to CUDA in which nothing lives.

        Args:
            only: the private pool whose segments they are, if not all are to go.
        """
        with self.clock.lock:
            self._take_back_freed()
            self._release_cached_blocks(only)

    def stats(self) -> dict:
        """What `torch._C._cuda_memoryStats` returns."""
        with self.clock.lock:
            self._take_back_freed()
            return {
                **self.counts,
                "max_split_size": self.settings.as_dict()["max_split_size"],
                **as_table(self._stats_by_pool()),
                **self.private.stats(),
                "oversize_allocations": self.oversize_allocations.as_dict(),
                "oversize_segments": self.oversize_segments.as_dict(),
            }

    def reset_peaks(self) -> None:
        """Every peak is the current value again."""
        with self.clock.lock:
            self._take_back_freed()
            for stat in self._each_stat():
                stat.reset_peak()

    def reset_sums(self) -> None:
        """Count what comes, goes and fails from zero again."""
        with self.clock.lock:
            self._take_back_freed()
            for stat in self._each_stat():
                stat.reset_sums()
            self.counts.update(dict.fromkeys(_COUNTS, 0))

    def _stats_by_pool(self) -> dict[str, Stats]:
        small, large = self.small.stats, self.large.stats
        return {"all": self.both, "small_pool": small, "large_pool": large}

    def _each_stat(self) -> Iterator[Stat]:
        for stats in self._stats_by_pool().values():
            yield from stats.each()
        yield from self.private.each_stat()

    # -- how it finds room -------------------------------------------------------------

    def _malloc(self, nbytes: int, stream: int) -> Block:
        __tracebackhide__ = True
        if self._waiting:
            self.waiting.process()
        size = self.settings.round(nbytes)
        pool = self.small if size <= SMALL_SIZE else self.large
        if self._routes:
            pool = self.private.pool_for(pool, stream)
        block = pool.best_fit(size, stream)
        if block is None and self.before_new_segment is not None:
            self.before_new_segment()
            self._take_back_freed()
            block = pool.best_fit(size, stream)
        if block is None:
            block = self._new_block(size, stream, pool)
        was_split = block.prev is not None or block.next is not None
        rest = block.size - size
        settings = self.settings
        max_split, cut_small = settings.max_split, pool.small or settings.expandable
        if rest >= ROUND if cut_small else rest > SMALL_SIZE and size < max_split:
            block = self._split(block, size, was_split)
        elif was_split and block.segment is None:
            self._count_inactive(pool, -1, -block.size)
        block.allocated = True
        block.requested = nbytes
        block.before = block.written_since = None
        for stats in (self.both, pool.stats):
            stats.block_allocated(block.size, nbytes)
        if block.size >= max_split:
            self.oversize_allocations.add(1)
        if self.history.is_recording:
            self.history.note_allocated(block)
        return block

    def _split(self, rest: Block, size: int, was_split: bool) -> Block:
        """Cut a block of `size` off the front of `rest`, which stays free."""
        block = Block(rest.address, size, rest.stream, rest.pool, rest.counter)
        block.segment, block.segment_frames = rest.segment, rest.segment_frames
        block.prev, block.next = rest.prev, rest
        if block.prev is None:
            self.segments[block.address] = block
        else:
            block.prev.next = block
        rest.prev = block
        rest.address += size
        rest.size -= size
        rest.pool.insert(rest)
        if rest.segment is not None:
            return block
        if was_split:
            self._count_inactive(rest.pool, 0, -size)
        else:
            self._count_inactive(rest.pool, 1, rest.size)
        return block

    def _count_inactive(self, pool: Pool, count: int, nbytes: int) -> None:
        for stats in (self.both, pool.stats):
            stats.inactive_changed(count, nbytes)

    def _new_block(self, size: int, stream: int, pool: Pool) -> Block:
        """Ask CUDA for memory; if there is no room, free the cache and ask again."""
        __tracebackhide__ = True
        nbytes = segment_size(size)
        self.share.open_context()
        block = self._ask_for(size, nbytes, stream, pool)
        if block is None and self.settings.max_split < math.inf:
            for free in oversize_to_release(self.settings, pool, size, stream):
                pool.remove(free)
                self._release_segment(free)
            block = self._ask_for(size, nbytes, stream, pool)
        if block is None and not self.private.capturing:
            self._release_cached_blocks()
            self.counts["num_alloc_retries"] += 1
            block = self._ask_for(size, nbytes, stream, pool)
        if block is None:
            raise refusal(self, size, nbytes, stream, pool)
        return block

    def _ask_for(self, size: int, nbytes: int, stream: int, pool: Pool) -> Block | None:
        """A block in new memory, if there is room and the program allows it."""
        if self.fraction is not None and self.share.reserved + nbytes > self.allowed:
            return None  # though a segment that grows might need less
        if self.settings.expandable:
            return self.expandable.allocate(size, stream, pool)
        if not self.share.take(nbytes):
            return None
        address = self._room_for(nbytes)
        block = pool.first_block(address, nbytes, stream)
        self.segments[address] = block
        self.segment_sizes[address] = nbytes
        self.counts["num_device_alloc"] += 1
        self.both.segment_allocated(nbytes)
        pool.segment_allocated(nbytes)
        if nbytes >= self.settings.max_split:
            self.oversize_segments.add(1)
        if self.history.is_recording:
            self.history.note_segment(block)
        return block

    def _room_for(self, nbytes: int) -> int:
        """The lowest address with room for a segment."""
        address = FIRST_ADDRESS + self.index * ADDRESSES
        for start in sorted(self.segment_sizes):
            if start - address >= nbytes:
                break
            address = start + self.segment_sizes[start]
        return address

    # -- how it takes blocks back ------------------------------------------------------

    def _take_back_freed(self) -> None:
        """Take back what was freed; a storage may die at any moment, in any thread."""
        if self._freed:
            with self.clock.lock:
                while self._freed:
                    self._take_back(self._freed.popleft())
        if self.private.dead:
            self.private.bury()

    def _take_back(self, block: Block) -> None:
        block.allocated = False
        if block.size >= self.settings.max_split:
            self.oversize_allocations.current -= 1
        for stats in (self.both, block.pool.stats):
            stats.block_released(block.size)
        if self.history.is_recording:
            self.history.note_free("free_requested", block)
        if block.stream_uses is None:
            self._free_block(block)
        else:
            self.waiting.add(block)

    def _free_block(self, block: Block) -> None:
        """Merge the block with its free neighbours and put it into its pool."""
        pool, size, requested = block.pool, block.size, block.requested
        if self.history.is_recording:
            self.history.note_free("free_completed", block)
        block.stream_uses = None
        block.requested = 0
        block.frames = NO_FRAMES
        count, nbytes = 0, 0
        for other in (block.prev, block.next):
            if other is None or other.allocated or other.waiting:
                continue
            if other.mapped:
                pool.remove(other)
                count, nbytes = count - 1, nbytes - other.size
                self._merge(block, other)
        if block.segment is not None:
            count = nbytes = 0  # its pages can be given back: no inactive split
        elif block.prev is not None or block.next is not None:
            count, nbytes = count + 1, nbytes + block.size
        pool.insert(block)
        for stats in (self.both, pool.stats):
            if count or nbytes:
                stats.inactive_changed(count, nbytes)
            stats.block_inactive(size, requested)

    def _merge(self, block: Block, other: Block) -> None:
        """`block` takes in its free neighbour `other`."""
        if other is block.prev:
            block.address, block.segment_frames = other.address, other.segment_frames
            block.prev = other.prev
            if block.prev is None:
                self.segments[block.address] = block
            else:
                block.prev.next = block
        else:
            block.next = other.next
            if block.next is not None:
                block.next.prev = block
        block.size += other.size

    def _release_cached_blocks(self, only: tuple[int, int] = DEFAULT_POOL) -> None:
        """Give every segment, or page, without a living block back to CUDA.

        Those of private pools stay until nobody needs the pool; while a graph is
        captured, the others stay, too.
        """
        if only == DEFAULT_POOL and not self.private.capturing:
            self.waiting.wait()
            self._release_free(self.large)
            self._release_free(self.small)
        if self.private.pools:
            self.private.release_unused(only)

    def _release_free(self, pool: Pool) -> None:
        for block in pool.take_whole_segments():
            self._release_segment(block)
        self.expandable.unmap_free(pool)

    def _release_segment(self, block: Block) -> None:
        self.clock.wait_for_device(self.index)
        del self.segments[block.address], self.segment_sizes[block.address]
        self.counts["num_device_free"] += 1
        self.share.give_back(block.size)
        self.both.segment_released(block.size)
        block.pool.segment_released(block.size)
        if block.size >= self.settings.max_split:
            self.oversize_segments.current -= 1
        if self.history.is_recording:
            where = block.address, block.size
            self.history.note_given_back("segment_free", block, *where)
