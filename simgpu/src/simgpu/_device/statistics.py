"""The counters that `torch.cuda.memory_stats` reports.

Each statistic is kept for the small pool, for the large pool and for both together,
as in c10/cuda/CUDACachingAllocator.cpp.
"""

NAMES = (
    "allocation", "segment", "active", "inactive_split", "allocated_bytes",
    "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes",
)  # fmt: skip


class Stat:
    """One statistic: its current value, its peak, and the sums of what came and went.

    A decrease is subtracted from `current`; how much was freed follows from the rest.
    """

    __slots__ = ("current", "peak", "allocated", "start")

    def __init__(self):
        self.current = self.peak = self.allocated = 0
        self.start = 0  # `current` when the sums began

    def add(self, amount: int) -> None:
        self.allocated += amount
        self.current = current = self.current + amount
        if current > self.peak:
            self.peak = current

    @property
    def freed(self) -> int:
        return self.allocated - (self.current - self.start)

    def reset_sums(self) -> None:
        """Count what comes and goes from now on."""
        self.allocated, self.start = 0, self.current

    def reset_peak(self) -> None:
        """The peak is the current value again."""
        self.peak = self.current

    def as_dict(self) -> dict[str, int]:
        names = ("current", "peak", "allocated", "freed")
        return {name: getattr(self, name) for name in names}


def as_table(stats: dict[str, "Stats"]) -> dict[str, dict[str, dict[str, int]]]:
    """Statistic -> pool -> what `torch._C._cuda_memoryStats` says of it."""
    return {
        name: {pool: getattr(those, name).as_dict() for pool, those in stats.items()}
        for name in NAMES
    }


class Stats:
    """The statistics of one pool, or of both together."""

    __slots__ = NAMES

    def __init__(self):
        for name in NAMES:
            setattr(self, name, Stat())

    def each(self) -> list[Stat]:
        return [getattr(self, name) for name in NAMES]

    def block_allocated(self, size: int, requested: int) -> None:
        """A block of `size` bytes came into use for `requested` bytes."""
        # five times what `Stat.add` does, written out: every operation comes by here
        stat = self.allocation
        stat.allocated += 1
        stat.current = current = stat.current + 1
        if current > stat.peak:
            stat.peak = current
        stat = self.active
        stat.allocated += 1
        stat.current = current = stat.current + 1
        if current > stat.peak:
            stat.peak = current
        stat = self.allocated_bytes
        stat.allocated += size
        stat.current = current = stat.current + size
        if current > stat.peak:
            stat.peak = current
        stat = self.active_bytes
        stat.allocated += size
        stat.current = current = stat.current + size
        if current > stat.peak:
            stat.peak = current
        stat = self.requested_bytes
        stat.allocated += requested
        stat.current = current = stat.current + requested
        if current > stat.peak:
            stat.peak = current

    def block_released(self, size: int) -> None:
        """The program gave a block back; other streams may still be using it."""
        self.allocation.current -= 1
        self.allocated_bytes.current -= size

    def block_inactive(self, size: int, requested: int) -> None:
        """No stream uses a block any more."""
        self.active.current -= 1
        self.active_bytes.current -= size
        self.requested_bytes.current -= requested

    def inactive_changed(self, count: int, nbytes: int) -> None:
        """So many free blocks came into, or left, segments that are partly in use."""
        # as `Stat.add`, but what leaves is subtracted; often no block comes or goes
        if count:
            stat = self.inactive_split
            stat.current = current = stat.current + count
            if count > 0:
                stat.allocated += count
                if current > stat.peak:
                    stat.peak = current
        stat = self.inactive_split_bytes
        stat.current = current = stat.current + nbytes
        if nbytes > 0:
            stat.allocated += nbytes
            if current > stat.peak:
                stat.peak = current

    def segment_allocated(self, nbytes: int) -> None:
        self.segment.add(1)
        self.reserved_bytes.add(nbytes)

    def segment_released(self, nbytes: int) -> None:
        self.segment.current -= 1
        self.reserved_bytes.current -= nbytes
