"""Events of a real caching allocator, performed again by the model of it.

A recording holds the segments and the blocks in use before its first event, and what
came then: `alloc_inference.json` and `alloc_training.json` in `recordings/` say how in
"what". Places and sizes are in units of 512 bytes, on one stream, with the allocator's
default settings; segments of before are listed from the oldest on. The model is told
where CUDA put a segment, never that it needs one.
"""

from simgpu._device.allocator import CachingAllocator
from simgpu._device.blocks import NUMBERED, Block

UNIT = 512  # bytes
FREE, SEGMENT, SEGMENT_FREE = -1, -2, -3  # what a row is; from 1 on an allocation
_LENGTHS = {FREE: 2, SEGMENT: 3, SEGMENT_FREE: 3}
_NO_LIMIT = 2**60  # bytes of the card: what does not fit was not recorded
_ELSEWHERE = 2**50  # where the model's own segments begin


def replay(recording: dict) -> tuple[int, int, int]:
    """Perform what was recorded.

    A block that needs a segment where the recording has none, or the reverse, or one of
    another size, is not at its place.

    Args:
        recording: as a file of this format holds it.

    Returns:
        How many blocks were put at the recorded place; how many there were; by how many
        bytes more than on the card (less: negative) are reserved at the end.

    Raises:
        ValueError: for a recording that is not of this format, or contradicts itself.
    """
    memory, live = _state_before(recording)
    at_place = blocks = 0
    for number, row in enumerate(recording["rows"]):
        _check(number, row)
        kind, place = row[0], row[1] * UNIT
        if kind == FREE:
            if place not in live:
                raise ValueError(f"row {number}: no block in use begins at {row[1]}")
            memory.free(live.pop(place))
        elif kind == SEGMENT:
            memory.given.append((place, row[2] * UNIT))
        elif kind == SEGMENT_FREE:
            memory.give_back(place, row[2] * UNIT)
        else:
            if place in live:
                raise ValueError(f"row {number}: a block in use begins at {row[1]}")
            live[place] = block = memory.malloc(kind)
            blocks += 1
            at_place += block.address == place and memory.asked_as_recorded()
    return at_place, blocks, memory.reserved - recording["reserved_after"]


class Recorded(CachingAllocator):
    """The model, on a card that gives the recorded segments."""

    def __init__(self):
        super().__init__(0, _NO_LIMIT)
        self.given: list[tuple[int, int]] = []  # (address, bytes), not yet asked for
        self._agrees = True

    def _room_for(self, nbytes: int) -> int:
        if self.given:
            address, size = self.given.pop(0)
            if size == nbytes and address not in self.segment_sizes:
                return address
        self._agrees = False
        return max([_ELSEWHERE, *(a + n for a, n in self.segment_sizes.items())])

    def asked_as_recorded(self) -> bool:
        """Whether, since the last call, each given segment was needed and no other."""
        agrees = self._agrees and not self.given
        self._agrees = True
        self.given.clear()
        return agrees

    def hold(
        self, address: int, nbytes: int, small: bool, age: int, used: list
    ) -> dict:
        """Have a segment in which some blocks are in use.

        Args:
            address: of the segment.
            nbytes: that it has.
            small: whether it is of the pool of small blocks.
            age: less than of younger ones; below 1, as it is older than the recording.
            used: (address, bytes, bytes requested) of its blocks in use, in order.

        Returns:
            The blocks in use, by address.
        """
        pool = self.small if small else self.large
        rest = Block(address, nbytes, 0, pool, age if NUMBERED else 0)
        self.segments[address], self.segment_sizes[address] = rest, nbytes
        for stats in (self.both, pool.stats):
            stats.segment_allocated(nbytes)
        found = {}
        for start, size, requested in used:
            if start > rest.address:
                gap = self._cut(rest, start - rest.address)
                pool.insert(gap)
            block = self._cut(rest, size) if size < rest.size else rest
            block.allocated, block.requested = True, requested
            for stats in (self.both, pool.stats):
                stats.block_allocated(size, requested)
            found[start] = block
            if block is rest:
                return found
        pool.insert(rest)
        return found

    def _cut(self, rest: Block, size: int) -> Block:
        """Cut a block off the front of `rest`, which is in no pool."""
        block = self._split(rest, size, False)
        rest.pool.remove(rest)
        return block

    def give_back(self, address: int, nbytes: int) -> None:
        """Free a segment, if it is one here and nothing in it is in use."""
        self._take_back_freed()
        block = self.segments.get(address)
        whole = block is not None and not block.is_split and block.size == nbytes
        if whole and not block.allocated:
            block.pool.remove(block)
            self._release_segment(block)


def _state_before(recording: dict) -> tuple[Recorded, dict[int, Block]]:
    """The model as the card was before the first event, and the blocks in use."""
    for key in ("segments", "blocks", "rows", "reserved_after"):
        if key not in recording:
            raise ValueError(f"the recording has no {key!r}")
    memory, live = Recorded(), {}
    used = sorted(
        (place * UNIT, size * UNIT, requested)
        for place, size, requested in recording["blocks"]
    )
    ages = {row[0]: -i for i, row in enumerate(reversed(recording["segments"]))}
    position = end = 0
    for place, size, small in sorted(recording["segments"]):
        if place * UNIT < end:
            raise ValueError(f"the segment at {place} begins inside another")
        start, end = place * UNIT, (place + size) * UNIT
        inside, last = [], start
        while position < len(used) and used[position][0] < end:
            address, nbytes, _ = used[position]
            if address < last or address + nbytes > end:
                raise ValueError(f"a block at {address // UNIT} is not in its segment")
            inside.append(used[position])
            position, last = position + 1, address + nbytes
        live |= memory.hold(start, end - start, bool(small), ages[place], inside)
    if position < len(used):
        raise ValueError(f"no segment holds the block at {used[position][0] // UNIT}")
    return memory, live


def _check(number: int, row: list) -> None:
    numbers = isinstance(row, list) and row and all(type(n) is int for n in row)
    if not numbers or not (row[0] > 0 or row[0] in _LENGTHS):
        raise ValueError(f"row {number} is no event: {row}")
    if len(row) != _LENGTHS.get(row[0], 2):
        raise ValueError(f"row {number} has {len(row)} numbers: {row}")
