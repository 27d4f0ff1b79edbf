"""Pinned memory of the host, counted as PyTorch's caching host allocator counts it.

Models: blocks rounded up to a power of two, which stay pinned when the program has let
go of them and are used again for the same size, once the copies are done that used
them. Leaves out: addresses (pinned memory lies wherever the host's own allocator puts
it), and the time in which a block that was pinned before need not be pinned again.

Source: ATen/core/CachingHostAllocator.h of PyTorch.
"""

import threading
from collections import deque

from simgpu._device.statistics import Stat

_NAMES = ("allocations", "allocated_bytes", "active_requests", "active_bytes")


def _power_of_two(nbytes: int) -> int:
    return 1 << max(nbytes - 1, 0).bit_length()


class PinnedBlock:
    """The mark of a storage in pinned memory: its block is cached with its end."""

    __slots__ = ("memory", "size", "streams", "address")

    def __init__(self, memory: "HostMemory", nbytes: int):
        self.memory = memory
        self.size = _power_of_two(nbytes) if nbytes else 0
        # (GPU, stream) of copies for which the host does not wait
        self.streams: set[tuple[int, int]] = set()
        self.address = 0  # of the storage, once such a copy has used it
        memory.take(self.size)

    def __del__(self):
        if self.address:
            self.memory.clock.sanitizer.host_copies.freed(self.address)
        if self.size:
            self.memory.freed.append((self.size, self.streams))


class HostMemory:
    """What is pinned.

    Args:
        clock: knows when a copy is done.
    """

    def __init__(self, clock):
        self.clock = clock
        self.lock = threading.RLock()
        self.cached: dict[int, int] = {}  # size -> how many blocks are free
        # (size, streams) of those that the program has let go of: at any moment
        self.freed: deque[tuple[int, set]] = deque()
        self.waiting: list[tuple[int, list]] = []  # (size, events it waits for)
        for name in _NAMES:
            setattr(self, name, Stat())

    def take(self, size: int) -> None:
        """A block comes into use: one that is cached, or a new one."""
        if not size:
            return
        with self.lock:
            self._take_back()
            if self.cached.get(size):
                self.cached[size] -= 1
            else:
                self.allocations.add(1)
                self.allocated_bytes.add(size)
            self.active_requests.add(1)
            self.active_bytes.add(size)

    def _take_back(self) -> None:
        """Blocks are free once their streams have done what they were given."""
        while self.freed:
            size, streams = self.freed.popleft()
            events = [self.clock.record(*stream) for stream in sorted(streams)]
            self.waiting.append((size, events))
        waiting, self.waiting = self.waiting, []
        for size, events in waiting:
            if all(map(self._is_over, events)):
                for event in events:
                    self.clock.forget(event)
                self.cached[size] = self.cached.get(size, 0) + 1
                self.active_requests.current -= 1
                self.active_bytes.current -= size
            else:
                self.waiting.append((size, events))

    def _is_over(self, event) -> bool:
        """Whether a copy is done; False if that depends on what other ranks post."""
        known = all(meeting.end is not None for meeting in event.after)
        return known and self.clock.reached(event)

    def empty_cache(self) -> None:
        """Unpin what is free."""
        with self.lock:
            self._take_back()
            for size, count in self.cached.items():
                self.allocations.current -= count
                self.allocated_bytes.current -= count * size
            self.cached.clear()

    def stats(self) -> dict:
        """What `torch._C._cuda_hostMemoryStats` returns; times are not known."""
        with self.lock:
            self._take_back()
            stats = {name: getattr(self, name).as_dict() for name in _NAMES}
        made, freed = self.allocations.allocated, self.allocations.freed
        for name, count in (("host_alloc_time", made), ("host_free_time", freed)):
            times = dict.fromkeys(("total", "max", "min", "avg"), 0)
            stats[name] = {**times, "count": count}
        return {**stats, "num_host_alloc": made, "num_host_free": freed}

    def reset_peaks(self) -> None:
        """Every peak is the current value again."""
        for name in _NAMES:
            getattr(self, name).reset_peak()

    def reset_sums(self) -> None:
        """Count what comes and goes from zero again."""
        for name in _NAMES:
            getattr(self, name).reset_sums()
