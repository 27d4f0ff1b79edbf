"""Memory of a simulated GPU: a model of PyTorch's caching allocator.

Models: sizes rounded to 512 bytes, a small and a large pool for each stream, segments
of 2 MiB, 20 MiB or more, best fit, splitting and coalescing, blocks that wait for
another stream (`record_stream`), the retry after freeing the cache, fractions, and
PyTorch's statistics, snapshots and out-of-memory message. Leaves out: expandable
segments, the private pools of CUDA graphs, settings of PYTORCH_CUDA_ALLOC_CONF, what an
operation takes and gives back while it runs, and what CUDA and its libraries take for
themselves (some hundred MiB for the context, 8 to 32 MiB for cuBLAS at first use).

Source of the rules and names: c10/cuda/CUDACachingAllocator.cpp of PyTorch.

Taught in 03-count-memory.
"""

import sys
import threading
from bisect import bisect_left, insort
from collections import deque
from pathlib import Path

import torch

from helpers.simgpu.cards import show_bytes

ROUND = 512  # kMinBlockSize: blocks are multiples of this many bytes
SMALL_SIZE = 2**20  # kSmallSize: requests up to this go to the small pool
SMALL_SEGMENT = 2 * 2**20  # kSmallBuffer: a segment of the small pool
LARGE_SEGMENT = 20 * 2**20  # kLargeBuffer: for requests of less than ...
LARGE_REQUEST = 10 * 2**20  # kMinLargeAlloc; larger ones get a segment of their own
ROUND_SEGMENT = 2 * 2**20  # kRoundLarge: ... rounded to this
ADDRESSES = 2**38  # bytes between the first addresses of two GPUs
FIRST_ADDRESS = 0x7F00_0000_0000
FIRST_HANDLE = 0x5000_0000_0000  # of streams
_FOLDER = (str(Path(__file__).parent),)
# files through which PyTorch hands a call to the simulator, and to no real GPU
_DISPATCHERS = tuple(
    str(Path(torch.__file__).parent / name) for name in ("_ops.py", "overrides.py")
)
CONTEXTS = (None, "state", "alloc", "all")
_STATS = (
    "allocation", "segment", "active", "inactive_split", "allocated_bytes",
    "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes",
)  # fmt: skip
_COUNTS = (
    "num_alloc_retries", "num_ooms", "num_oom_rejections", "num_sync_all_streams",
    "num_device_alloc", "num_device_free",
)  # fmt: skip
_DOCS = (
    "https://docs.pytorch.org/docs/stable/notes/cuda.html"
    "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
)


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


class Stat:
    """One statistic: now, at most, and the sums of what came and went.

    What goes is subtracted from `current`; how much went follows from the rest.
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

    def begin_sums(self) -> None:
        """Count what comes and goes from now on."""
        self.allocated, self.start = 0, self.current

    def as_dict(self) -> dict[str, int]:
        names = ("current", "peak", "allocated", "freed")
        return {name: getattr(self, name) for name in names}


class Stats:
    """The statistics of one pool, or of both together."""

    __slots__ = _STATS

    def __init__(self):
        for name in _STATS:
            setattr(self, name, Stat())


class Pool:
    """The small or the large blocks that are free, by stream."""

    def __init__(self, small: bool):
        self.small = small
        self.stats = Stats()
        # stream -> [(size, address, block)], sorted: the first that fits is the best
        self.free: dict[int, list[tuple[int, int, Block]]] = {}

    def insert(self, block: "Block") -> None:
        blocks = self.free.setdefault(block.stream, [])
        insort(blocks, (block.size, block.address, block))

    def remove(self, block: "Block") -> None:
        blocks = self.free[block.stream]
        del blocks[bisect_left(blocks, (block.size, block.address))]

    def best_fit(self, size: int, stream: int) -> "Block | None":
        """Take out the smallest free block of `stream` that holds `size` bytes."""
        blocks = self.free.get(stream)
        if not blocks:
            return None
        position = bisect_left(blocks, (size,))
        return blocks.pop(position)[2] if position < len(blocks) else None


_NO_FRAMES: list[dict] = []


class Block:
    """A piece of a segment, in use or free. Neighbours are linked."""

    __slots__ = (
        "address", "size", "requested", "stream", "pool", "allocated", "prev", "next",
        "waiting", "uses", "frames", "segment_frames", "writer", "before",
        "since",
    )  # fmt: skip

    def __init__(self, address: int, size: int, stream: int, pool: Pool):
        self.address, self.size, self.stream, self.pool = address, size, stream, pool
        self.requested = 0
        self.allocated = False
        self.waiting = False  # for another stream, before it is free
        self.prev: Block | None = None
        self.next: Block | None = None
        self.uses: set[int] | None = None  # other streams' numbers (`record_stream`)
        self.frames: list[dict] = _NO_FRAMES
        self.segment_frames: list[dict] = _NO_FRAMES
        self.writer = None  # what wrote it last (races.py)
        self.before = None  # what it held before that, while races are shown; ...
        self.since = None  # ... and which uninterrupted work has written it since

    @property
    def is_split(self) -> bool:
        """Whether it is only a part of its segment."""
        return self.prev is not None or self.next is not None


class NoTime:
    """Stands for the clock where time does not matter: all work is done at once."""

    host = 0.0

    def __init__(self):
        self.lock = threading.RLock()

    def mark(self, index: int, stream: int):
        """What `stream` has been given until now."""

    def reached(self, mark) -> bool:
        """Whether the work up to `mark` is done, as the host can see."""
        return True

    def forget(self, mark) -> None:
        """Nobody will ask for `mark` again."""

    def device_free(self, index: int) -> None:
        """A segment is given back to CUDA, which waits for the GPU."""


class Memory:
    """The caching allocator of one simulated GPU.

    Args:
        index: of the GPU, as it is named in messages.
        total: bytes of the card.
        clock: knows when a stream has done its work, and what a call of CUDA costs.
    """

    def __init__(self, index: int, total: int, clock=None):
        self.index = index
        self.total = total
        self.clock = clock or NoTime()
        self.fraction: float | None = None  # of the card that the process may take
        self.small, self.large = Pool(small=True), Pool(small=False)
        self.all = Stats()
        self.segments: dict[int, Block] = {}  # address -> first block
        self.sizes: dict[int, int] = {}  # address -> bytes of the segment
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.history: deque[dict] | None = None  # what happened, while it is recorded
        self.context: str | None = None  # whose frames are kept: one of CONTEXTS
        self._waiting: list[tuple[Block, list]] = []  # for other streams
        self._dying: deque[Block] = deque()

    # -- what PyTorch asks for ---------------------------------------------------------

    @property
    def allocated(self) -> int:
        """Bytes in blocks that are in use."""
        self._bury()
        return self.all.allocated_bytes.current

    @property
    def reserved(self) -> int:
        """Bytes in segments."""
        self._bury()
        return self.all.reserved_bytes.current

    @property
    def limit(self) -> int:
        """Bytes that this process may take of the card."""
        return int(self.total * (1.0 if self.fraction is None else self.fraction))

    def allocate(self, nbytes: int, stream: int = 0) -> Block | None:
        """A block for `nbytes`, used first on `stream`; None for no bytes at all.

        Raises:
            torch.OutOfMemoryError: if it does not fit, in PyTorch's words.
        """
        __tracebackhide__ = True
        if nbytes == 0:
            return None
        with self.clock.lock:
            self._bury()
            return self._allocate(nbytes, stream)

    def check_room(self, nbytes: int, stream: int = 0) -> None:
        """Refuse at once what cannot fit, even if all that is cached were freed.

        Raises:
            torch.OutOfMemoryError: as `allocate` would.
        """
        __tracebackhide__ = True
        size = round_up(nbytes)
        if size > max(self.limit, self.reserved) - self.allocated:
            with self.clock.lock:
                self._release()
                self.counts["num_alloc_retries"] += 1
                raise self._out_of_memory(size, segment_size(size), stream)

    def free(self, block: Block) -> None:
        """Give a block back; it may be used again at once on its own stream.

        May be called at any moment, in any thread, also by Python's collector while it
        runs within this very class: then the next call takes the block back.
        """
        self._dying.append(block)
        if not self.clock.lock._is_owned():
            self._bury()

    def record_stream(self, block: Block, stream: int) -> None:
        """Once freed, the block waits for what `stream` has been given until then."""
        if stream != block.stream:
            block.uses = {*(block.uses or ()), stream}

    def empty_cache(self) -> None:
        """Give the segments back to CUDA in which nothing lives."""
        with self.clock.lock:
            self._bury()
            self._release()

    def stats(self) -> dict:
        """What `torch._C._cuda_memoryStats` returns."""
        with self.clock.lock:
            self._bury()
            return self._stats()

    def _stats(self) -> dict:
        kinds = (("all", self.all), ("small_pool", self.small.stats),
                 ("large_pool", self.large.stats))  # fmt: skip
        nothing = Stat().as_dict()
        return {
            **self.counts,
            "max_split_size": -1,
            **{
                name: {kind: getattr(stats, name).as_dict() for kind, stats in kinds}
                for name in _STATS
            },
            "oversize_allocations": nothing,
            "oversize_segments": nothing,
        }

    def reset_peaks(self) -> None:
        """Every peak is the current value again."""
        with self.clock.lock:
            self._bury()
            for stat in self._every_stat():
                stat.peak = stat.current

    def reset_sums(self) -> None:
        """Count what comes, goes and fails from zero again."""
        with self.clock.lock:
            self._bury()
            for stat in self._every_stat():
                stat.begin_sums()
            self.counts.update(dict.fromkeys(_COUNTS, 0))

    def _every_stat(self):
        for stats in (self.all, self.small.stats, self.large.stats):
            for name in _STATS:
                yield getattr(stats, name)

    # -- how it finds room -------------------------------------------------------------

    def _allocate(self, nbytes: int, stream: int) -> Block:
        __tracebackhide__ = True
        if self._waiting:
            self._collect()
        size = round_up(nbytes)
        pool = self.small if size <= SMALL_SIZE else self.large
        block = pool.best_fit(size, stream)
        if block is None:
            block = self._new_segment(size, stream, pool)
        was_split = block.is_split
        rest = block.size - size
        if rest >= ROUND if pool.small else rest > SMALL_SIZE:
            block = self._split(block, size, was_split)
        elif was_split:
            self._count_inactive(pool, -1, -block.size)
        block.allocated = True
        block.requested = nbytes
        block.before = block.since = None
        for stats in (self.all, pool.stats):
            stats.allocation.add(1)
            stats.allocated_bytes.add(block.size)
            stats.active.add(1)
            stats.active_bytes.add(block.size)
            stats.requested_bytes.add(nbytes)
        if self.history is not None:
            block.frames = self._frames()
            self._note("alloc", block.address, nbytes, stream, block.frames)
        return block

    def _split(self, rest: Block, size: int, was_split: bool) -> Block:
        """Cut a block of `size` off the front of `rest`, which stays free."""
        block = Block(rest.address, size, rest.stream, rest.pool)
        block.segment_frames = rest.segment_frames
        block.prev, block.next = rest.prev, rest
        if block.prev is None:
            self.segments[block.address] = block
        else:
            block.prev.next = block
        rest.prev = block
        rest.address += size
        rest.size -= size
        rest.pool.insert(rest)
        if was_split:
            self._count_inactive(rest.pool, 0, -size)
        else:
            self._count_inactive(rest.pool, 1, rest.size)
        return block

    def _count_inactive(self, pool: Pool, count: int, nbytes: int) -> None:
        for stats in (self.all, pool.stats):
            if count > 0:
                stats.inactive_split.add(count)
            else:
                stats.inactive_split.current += count
            if nbytes > 0:
                stats.inactive_split_bytes.add(nbytes)
            else:
                stats.inactive_split_bytes.current += nbytes

    def _new_segment(self, size: int, stream: int, pool: Pool) -> Block:
        """Ask CUDA for a segment; if there is no room, free the cache and ask again."""
        __tracebackhide__ = True
        nbytes = segment_size(size)
        if self.all.reserved_bytes.current + nbytes > self.limit:
            self._release()
            self.counts["num_alloc_retries"] += 1
            if self.all.reserved_bytes.current + nbytes > self.limit:
                raise self._out_of_memory(size, nbytes, stream)
        address = self._room_for(nbytes)
        block = Block(address, nbytes, stream, pool)
        self.segments[address] = block
        self.sizes[address] = nbytes
        self.counts["num_device_alloc"] += 1
        for stats in (self.all, pool.stats):
            stats.segment.add(1)
            stats.reserved_bytes.add(nbytes)
        if self.history is not None:
            block.segment_frames = self._frames()
            self._note("segment_alloc", address, nbytes, stream, block.segment_frames)
        return block

    def _room_for(self, nbytes: int) -> int:
        """The lowest address with room for a segment."""
        address = FIRST_ADDRESS + self.index * ADDRESSES
        for start in sorted(self.sizes):
            if start - address >= nbytes:
                break
            address = start + self.sizes[start]
        return address

    # -- how it takes blocks back ------------------------------------------------------

    def _bury(self) -> None:
        """Take back what has died; a storage may die at any moment, in any thread."""
        if self._dying:
            with self.clock.lock:
                while self._dying:
                    self._take_back(self._dying.popleft())

    def _take_back(self, block: Block) -> None:
        block.allocated = False
        for stats in (self.all, block.pool.stats):
            stats.allocation.current -= 1
            stats.allocated_bytes.current -= block.size
        if self.history is not None:
            self._note_free("free_requested", block)
        if block.uses is not None:
            marks = [self.clock.mark(self.index, stream) for stream in block.uses]
            block.waiting = True
            self._waiting.append((block, marks))
        else:
            self._make_free(block)

    def _collect(self) -> None:
        """Blocks for which other streams have done their work become free."""
        waiting, self._waiting = self._waiting, []
        for block, marks in waiting:
            if all(map(self.clock.reached, marks)):
                self._end_waiting(block, marks)
            else:
                self._waiting.append((block, marks))

    def _end_waiting(self, block: Block, marks: list) -> None:
        for mark in marks:
            self.clock.forget(mark)
        block.waiting = False
        self._make_free(block)

    def _make_free(self, block: Block) -> None:
        """Merge the block with its free neighbours and put it into its pool."""
        pool, size = block.pool, block.size
        if self.history is not None:
            self._note_free("free_completed", block)
        block.uses = None
        requested, block.requested = block.requested, 0
        block.frames = _NO_FRAMES
        count, nbytes = 0, 0
        for other in (block.prev, block.next):
            if other is not None and not (other.allocated or other.waiting):
                pool.remove(other)
                count, nbytes = count - 1, nbytes - other.size
                self._merge(block, other)
        if block.is_split:
            count, nbytes = count + 1, nbytes + block.size
        pool.insert(block)
        if count or nbytes:
            self._count_inactive(pool, count, nbytes)
        for stats in (self.all, pool.stats):
            stats.active.current -= 1
            stats.active_bytes.current -= size
            stats.requested_bytes.current -= requested

    def _merge(self, block: Block, other: Block) -> None:
        """`block` takes in its free neighbour `other`."""
        if other is block.prev:
            block.address = other.address
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

    def _release(self) -> None:
        """Give every segment without a living block back to CUDA."""
        self.counts["num_sync_all_streams"] += 1
        if self._waiting:
            self.clock.device_free(self.index)  # waits for the GPU
            waiting, self._waiting = self._waiting, []
            for block, marks in waiting:
                self._end_waiting(block, marks)
        for pool in (self.large, self.small):
            for stream, blocks in list(pool.free.items()):
                whole = [entry[2] for entry in blocks if not entry[2].is_split]
                pool.free[stream] = [entry for entry in blocks if entry[2].is_split]
                for block in whole:
                    self._release_segment(block)

    def _release_segment(self, block: Block) -> None:
        self.clock.device_free(self.index)
        del self.segments[block.address], self.sizes[block.address]
        self.counts["num_device_free"] += 1
        for stats in (self.all, block.pool.stats):
            stats.segment.current -= 1
            stats.reserved_bytes.current -= block.size
        if self.history is not None:
            args = (block.address, block.size, block.stream, self._frames())
            self._note("segment_free", *args)

    def _out_of_memory(self, size: int, nbytes: int, stream: int) -> Exception:
        """The error, after `size` bytes in a segment of `nbytes` found no room."""
        self.counts["num_ooms"] += 1
        reserved = self.all.reserved_bytes.current
        allocated = self.all.allocated_bytes.current
        free = self.total - reserved
        if self.history is not None:
            self._note("oom", free, size, stream, self._frames())
        allowed = ""
        if self.fraction is not None:
            allowed = f"{show_bytes(self.limit)} allowed; "
        return torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {show_bytes(nbytes)}. GPU "
            f"{self.index} has a total capacity of {show_bytes(self.total)} of which "
            f"{show_bytes(free)} is free. Including non-PyTorch memory, this process "
            f"has {show_bytes(reserved)} memory in use. {allowed}Of the allocated "
            f"memory {show_bytes(allocated)} is allocated by PyTorch, and "
            f"{show_bytes(reserved - allocated)} is reserved by PyTorch but "
            "unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
            f"  See documentation for Memory Management  ({_DOCS})"
        )

    # -- history and snapshots ---------------------------------------------------------

    def record_history(self, most: int | None, context: str | None) -> None:
        """Remember what happens from now on, at most so many events (None: stop).

        Args:
            most: how many events.
            context: whose frames: "state" of living blocks; "alloc" also of each event,
                for a free those of its allocation; "all" also of each free; or None.
        """
        with self.clock.lock:
            self._bury()
            kept = self.history or ()
            self.history = None if most is None else deque(kept, maxlen=most)
            self.context = context

    def snapshot(self) -> list[dict]:
        """The segments and their blocks, as `torch.cuda.memory._snapshot` has them."""
        with self.clock.lock:
            self._bury()
            found = [self._segment(self.segments[a]) for a in sorted(self.segments)]
            if self.history is not None:
                self._note("snapshot", 0, self.all.active_bytes.current, 0, [])
            return found

    def _segment(self, first: Block) -> dict:
        blocks, block = [], first
        while block is not None:
            state = "active_allocated" if block.allocated else "inactive"
            if block.waiting:
                state = "active_pending_free"
            blocks.append(
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested,
                    "state": state,
                    "frames": block.frames,
                }
            )
            block = block.next
        used = [b for b in blocks if b["state"] != "inactive"]
        return {
            "device": self.index,
            "address": first.address,
            "total_size": self.sizes[first.address],
            "allocated_size": sum(
                b["size"] for b in used if b["state"] == "active_allocated"
            ),
            "active_size": sum(b["size"] for b in used),
            "requested_size": sum(b["requested_size"] for b in used),
            "stream": stream_handle(self.index, first.stream),
            "segment_type": "small" if first.pool.small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": first.segment_frames,
            "blocks": blocks,
        }

    def _note_free(self, action: str, block: Block) -> None:
        frames = self._frames() if self.context == "all" else block.frames
        self._note(action, block.address, block.requested, block.stream, frames)

    def _note(self, action, address, size, stream, frames) -> None:
        where = "device_free" if action == "oom" else "addr"
        self.history.append(
            {
                "action": action,
                where: address,
                "size": size,
                "stream": stream_handle(self.index, stream),
                "time_us": int(self.clock.host * 1e6),
                "pool_id": (0, 0),
                "compile_context": "N/A",
                "user_metadata": "",
                "frames": [] if self.context == "state" else frames,
            }
        )

    def _frames(self) -> list[dict]:
        """The Python stack, innermost first, without the simulator's own lines."""
        if self.context is None:
            return []
        frames, frame = [], sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith(_FOLDER + _DISPATCHERS):
                line = {"filename": code.co_filename, "line": frame.f_lineno}
                frames.append({**line, "name": code.co_name})
            frame = frame.f_back
        return frames
