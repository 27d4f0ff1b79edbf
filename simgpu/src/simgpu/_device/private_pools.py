"""Private pools of memory: those of CUDA graphs, and the program's own (`MemPool`).

While a thread or a capture allocates to a pool, blocks come from the segments of that
pool, and go back to it. Its segments stay until nobody needs it; then they go when the
cache is emptied, each when nothing in it lives. In the statistics they count as others
do; snapshots and the message for a full GPU tell them apart.

Models: what belongs to which pool, the counts of users, what a capture forbids, and
the bytes of each pool. Since PyTorch 2.13 it is the capture of a graph that forbids to
wait and to empty the cache; in older versions a program's pool does, too. Leaves out:
`use_on_oom`, `no_split`, allocators of one's own, and going back to a former state of a
pool, which `torch.compile` needs.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch, `beginAllocateToPool`,
`endAllocateToPool`, `releasePool`, `get_pool` and `release_cached_blocks`.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator

from simgpu._compat import is_torch
from simgpu._device.blocks import DEFAULT_POOL, Pool
from simgpu._device.statistics import Stat

PoolId = tuple[int, int]
CAPTURES_ALONE = is_torch((2, 13))  # forbid things, and not every pool in use
FREED_AT_THE_END = is_torch((2, 12))  # of a capture: what waits for streams in it
COUNTED = is_torch((2, 13))  # the bytes of each pool
_user_pools, _graph_pools = itertools.count(1), itertools.count(1)


def new_pool_id(user: bool) -> PoolId:
    """The id of a pool that a program asks for, or that a graph makes for itself."""
    return (0, next(_user_pools)) if user else (next(_graph_pools), 0)


class PrivatePool:
    """One pool of one GPU.

    Args:
        pool_id: how the program names it.
        allocator: of the GPU.
        reserved: what is counted of its segments: of all, of small and of large ones.

    Attributes:
        uses: how many graphs, pools of the program and threads need it.
    """

    __slots__ = ("id", "uses", "small", "large", "reserved")

    def __init__(self, pool_id: PoolId, allocator, reserved: dict[str, Stat]):
        self.id, self.reserved = pool_id, reserved
        self.uses = 1
        self.small, self.large = (
            Pool(pool.small, pool.settings, pool.stats, self)
            for pool in (allocator.small, allocator.large)
        )

    def count_reserved(self, pool: Pool, nbytes: int) -> None:
        """So many bytes of segments came, or went."""
        for name in ("all", "small_pool" if pool.small else "large_pool"):
            if nbytes > 0:
                self.reserved[name].add(nbytes)
            else:
                self.reserved[name].current += nbytes


class PrivatePools:
    """Those of one GPU.

    Attributes:
        pools: by their ids, also those that nobody needs but that still have memory.
        routes: what is allocated to which pool now: the pool, which streams, and
            whether it counts as a capture. The last one that wants a stream has it.
        capturing: how many of them forbid to record events and to empty the cache.
        dead: ids that Python's collector has found, with whether they hold a use.
    """

    def __init__(self, allocator):
        self.allocator = allocator
        self.pools: dict[PoolId, PrivatePool] = {}
        self.routes: list[tuple[PrivatePool, Callable[[int], bool], bool]] = []
        self.capturing = 0
        self.dead: deque[tuple[PoolId, bool]] = deque()
        self._reserved: dict[PoolId, dict[str, Stat]] = {}

    # -- who needs a pool --------------------------------------------------------------

    def create(self, pool_id: PoolId) -> PrivatePool:
        """Make a pool, or need one that there is.

        Raises:
            RuntimeError: if it was released and still has memory.
        """
        with self.allocator.clock.lock:
            pool = self.pools.get(pool_id)
            if pool is None:
                names = ("all", "small_pool", "large_pool")
                reserved = self._reserved.get(pool_id) or {n: Stat() for n in names}
                self._reserved[pool_id] = reserved
                pool = PrivatePool(pool_id, self.allocator, reserved)
                self.pools[pool_id] = pool
            elif pool.uses == 0:
                raise _broken("it->second->use_count > 0", pool_id, "take a new pool")
            else:
                pool.uses += 1
            return pool

    def use_count(self, pool_id: PoolId) -> int:
        """How many need it."""
        return self._find(pool_id).uses

    def release(self, pool_id: PoolId) -> None:
        """One needs it no more; when nobody does, its segments may go.

        Raises:
            RuntimeError: if nobody needed it.
        """
        with self.allocator.clock.lock:
            pool = self._find(pool_id)
            if pool.uses == 0:
                raise _broken("uc >= 0", pool_id, "release a pool once for each use")
            pool.uses -= 1

    def retire(self, pool_id: PoolId, held: bool = True) -> None:
        """An object of the program that stood for the pool has died.

        May be called at any moment, in any thread, like the allocator's `free`.

        Args:
            pool_id: of the pool.
            held: whether the object had a use of it on this GPU.
        """
        self.dead.append((pool_id, held))
        lock = self.allocator.clock.lock
        if not lock._is_owned():
            self.allocator._take_back_freed()

    def bury(self) -> None:
        """Release what has died, and empty it."""
        with self.allocator.clock.lock:
            while self.dead:
                pool_id, held = self.dead.popleft()
                if held:
                    self.release(pool_id)
                self.allocator._release_cached_blocks(pool_id)

    # -- what is allocated to it -------------------------------------------------------

    def begin(
        self, pool_id: PoolId, wanted: Callable[[int], bool], captures: bool = True
    ) -> None:
        """Allocate to a pool from now on, which is made if there is none.

        Args:
            pool_id: of the pool.
            wanted: whether an allocation for a stream, by its number, belongs there.
            captures: whether a graph is captured meanwhile.

        Raises:
            RuntimeError: if something allocates to it already.
        """
        with self.allocator.clock.lock:
            pool = self.create(pool_id)
            if any(route[0] is pool for route in self.routes):
                raise RuntimeError(
                    "beginAllocateToPool: already recording to mempool_id"
                )
            counts = captures or not CAPTURES_ALONE
            self.routes.append((pool, wanted, counts))
            self.capturing += counts

    def end(self, pool_id: PoolId) -> None:
        """Allocate to a pool no more.

        Raises:
            RuntimeError: if nothing does.
        """
        with self.allocator.clock.lock:
            for place, (pool, _, counts) in enumerate(self.routes):
                if pool.id == pool_id:
                    del self.routes[place]
                    self.capturing -= counts
                    if counts and FREED_AT_THE_END:
                        self.allocator.waiting.end_capture(pool)
                    return
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    def pool_for(self, pool: Pool, stream: int) -> Pool:
        """Where a block for a stream comes from that else comes from `pool`."""
        for private, wanted, _ in reversed(self.routes):
            if wanted(stream):
                return private.small if pool.small else private.large
        return pool

    # -- its memory --------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """Bytes in blocks of the pools that nothing uses."""
        return sum(p.small.free_bytes + p.large.free_bytes for p in self.pools.values())

    def release_unused(self, only: PoolId = DEFAULT_POOL) -> None:
        """Give back what nothing uses in the pools, or the one, that nobody needs."""
        for pool in list(self.pools.values()):
            if pool.uses or only not in (DEFAULT_POOL, pool.id):
                continue
            if only == pool.id and not self.capturing:
                self.allocator.waiting.wait(pool)
            self.allocator._release_free(pool.small)
            self.allocator._release_free(pool.large)
            if not pool.reserved["all"].current:
                del self.pools[pool.id]

    def stats(self) -> dict[str, dict]:
        """What the allocator's statistics have of the pools."""
        if not COUNTED:
            return {}
        pools = {
            pool_id: {name: stat.as_dict() for name, stat in reserved.items()}
            for pool_id, reserved in self._reserved.items()
            if reserved["all"].allocated or reserved["all"].peak
        }
        return {"reserved_bytes_by_private_pools": pools}

    def each_stat(self) -> Iterator[Stat]:
        for reserved in self._reserved.values():
            yield from reserved.values()

    def _find(self, pool_id: PoolId) -> PrivatePool:
        pool = self.pools.get(pool_id)
        if pool is None:
            raise _broken("it != graph_pools.end()", pool_id, "begin to allocate to it")
        return pool


def _broken(what: str, pool_id: PoolId, advice: str) -> RuntimeError:
    """PyTorch's words where its own code would go wrong, and what to do."""
    return RuntimeError(
        f'{what} INTERNAL ASSERT FAILED at "c10/cuda/CUDACachingAllocator.cpp", please '
        f"report a bug to PyTorch. Memory pool {pool_id}: {advice}."
    )
