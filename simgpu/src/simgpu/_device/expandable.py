"""Segments that grow: `expandable_segments:True` of PyTorch's allocator.

A segment is addresses for 1 1/8 of the card's memory, one for each stream and pool.
Memory is mapped under them in pages, where a request needs them: of 2 MiB in the small
pool, of 20 MiB in the large one. What has no memory is a block that is not mapped. An
emptied cache takes back the pages of free blocks, also between blocks in use. Such
segments count as reserved bytes, and neither as segments nor as inactive splits.

Models: where memory is mapped and unmapped, in which order, and what is counted and
recorded. Tensors in them are shared with other processes like any others. Leaves out:
the time of mapping, `expandable_segments_reserve`, the warnings on stderr where memory
cannot be mapped, and that Windows has no such segments.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch, Note [Expandable Segments] and
`find_expandable_block`, `map_block`, `try_allocate_expandable_block`, `unmap_block`.
"""

from simgpu._device.blocks import LARGE_SEGMENT, SMALL_SEGMENT, Block, Pool

FIRST_ADDRESS = 0x1000_0000_0000
ADDRESSES = 2**43  # bytes between the first addresses of two GPUs


class ExpandableSegment:
    """Addresses of one stream and pool.

    Args:
        address: the first one.
        page: bytes that are mapped at once.
        total: bytes of the card.
    """

    __slots__ = ("address", "page", "size")

    def __init__(self, address: int, page: int, total: int):
        self.address, self.page = address, page
        self.size = -(-(total + total // 8) // page) * page

    def page_from(self, address: int) -> int:
        """Where the first page begins at or after an address."""
        return self.address - (self.address - address) // self.page * self.page

    def page_before(self, address: int) -> int:
        """Where the last page ends at or before an address."""
        return self.address + (address - self.address) // self.page * self.page


class ExpandableSegments:
    """Those of one GPU, beside what its allocator has of the other kind."""

    def __init__(self, allocator):
        self.allocator = allocator
        self.segments: list[ExpandableSegment] = []  # in order of address

    def allocate(self, size: int, stream: int, pool: Pool) -> Block | None:
        """A free block of at least `size` bytes, in no pool; None if memory is short.

        What was mapped before memory ran out stays mapped, as free blocks.
        """
        block = self._find(size, stream, pool)
        if block is None or not (block.mapped or self._map(block, size)):
            return None
        while block.size < size:  # what follows is not mapped; they become one
            following, missing = block.next, size - block.size
            if not self._map(following, missing):
                return None
            block = following
        pool.remove(block)
        return block

    def unmap_free(self, pool: Pool) -> None:
        """Give back every page of a pool on which nothing lives."""
        if not self.segments:
            return
        free = [entry[3] for blocks in pool.free.values() for entry in blocks]
        for block in free:
            if block.segment is not None:
                self._unmap(block)

    def _find(self, size: int, stream: int, pool: Pool) -> Block | None:
        """The first block at which there are addresses for `size` bytes.

        It and what follows are free or not mapped, by turns.
        """
        for _, block in pool.unmapped.get(stream, ()):
            if _is_free(block.prev):
                block = block.prev
            following, nbytes = block, 0
            while nbytes < size and _is_free(following):
                nbytes += following.size
                following = following.next
            if nbytes >= size:
                return block
        memory = self.allocator
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        segment = ExpandableSegment(0, page, memory.total)
        if size > segment.size:
            return None
        place, segment.address = self._room_for(segment.size)
        self.segments.insert(place, segment)
        block = pool.first_block(segment.address, segment.size, stream)
        block.segment, block.mapped = segment, False
        memory.segments[segment.address] = block
        pool.insert_unmapped(block)
        return block

    def _room_for(self, nbytes: int) -> tuple[int, int]:
        """The lowest addresses that no segment has: which one it will be, and where."""
        address = FIRST_ADDRESS + self.allocator.index * ADDRESSES
        for place, segment in enumerate(self.segments):
            if segment.address - address >= nbytes:
                return place, address
            address = segment.address + segment.size
        return len(self.segments), address

    def _map(self, block: Block, wanted: int) -> bool:
        """Have memory for the first bytes of a block; whether there was enough."""
        memory, pool = self.allocator, block.pool
        end = block.segment.page_from(block.address + min(wanted, block.size))
        start, nbytes = block.address, end - block.address
        if not memory.share.take(nbytes):
            return False
        pool.remove_unmapped(block)
        if nbytes < block.size:
            pool.insert_unmapped(_cut_behind(block, nbytes))
        block.mapped = True
        self._merge_neighbours(block)
        pool.insert(block)
        for stats in (memory.both, pool.stats):
            stats.reserved_bytes.add(nbytes)
        if pool.owner is not None:
            pool.owner.count_reserved(pool, nbytes)
        memory.counts["num_device_alloc"] += 1
        history = memory.history
        if history.is_recording:
            frames = history.frames()
            history.note("segment_map", start, nbytes, block.stream, frames, pool.id)
            if block.prev is None and not block.segment_frames:
                block.segment_frames = frames
        return True

    def _unmap(self, block: Block) -> None:
        """Give the whole pages of a free block back."""
        memory, pool, segment = self.allocator, block.pool, block.segment
        start = segment.page_from(block.address)
        nbytes = segment.page_before(block.address + block.size) - start
        if nbytes <= 0:
            return
        memory.clock.wait_for_stream(memory.index, block.stream)
        pool.remove(block)
        if start > block.address:  # what is left in front stays free
            front, block = block, _cut_behind(block, start - block.address)
            block.segment_frames = front.segment_frames
            pool.insert(front)
        if nbytes < block.size:
            pool.insert(_cut_behind(block, nbytes))
        block.mapped = False
        self._merge_neighbours(block)
        if block.is_split:
            pool.insert_unmapped(block)
        else:
            self.segments.remove(segment)
            del memory.segments[segment.address]
        memory.share.give_back(nbytes)
        for stats in (memory.both, pool.stats):
            stats.reserved_bytes.current -= nbytes
        if pool.owner is not None:
            pool.owner.count_reserved(pool, -nbytes)
        memory.counts["num_device_free"] += 1
        if memory.history.is_recording:
            memory.history.note_given_back("segment_unmap", block, start, nbytes)

    def _merge_neighbours(self, block: Block) -> None:
        """A block takes in what is beside it and as free, or as unmapped, as it is."""
        pool = block.pool
        for other in (block.prev, block.next):
            if _is_free(other) and other.mapped == block.mapped:
                (pool.remove if block.mapped else pool.remove_unmapped)(other)
                self.allocator._merge(block, other)


def _is_free(block: Block | None) -> bool:
    return block is not None and not (block.allocated or block.waiting)


def _cut_behind(block: Block, size: int) -> Block:
    """Cut off what follows the first `size` bytes, as a block of the same kind."""
    place = block.address + size, block.size - size
    rest = Block(*place, block.stream, block.pool, block.counter)
    rest.segment, rest.mapped = block.segment, block.mapped
    rest.prev, rest.next = block, block.next
    if rest.next is not None:
        rest.next.prev = rest
    block.next, block.size = rest, size
    return rest
