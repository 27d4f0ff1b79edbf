"""The model of PyTorch's caching allocator, alone: random programs, and each rule.

The rules and the names beside them are those of c10/cuda/CUDACachingAllocator.cpp and
c10/core/AllocatorConfig.h.
"""

import gc
import random
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from simgpu._device import blocks as model
from simgpu._device import statistics
from simgpu._device.allocator import CachingAllocator, NoTime
from simgpu._device.blocks import round_up, segment_size
from simgpu._device.cards import GIB, KIB, MIB
from support.limits import SHORT

OUT_OF_MEMORY = torch.OutOfMemoryError


class FakeClock(NoTime):
    """A clock that the test sets; a stream's work is done at its `busy` time."""

    def __init__(self):
        super().__init__()
        self.host = 0.0
        self.busy: dict[int, float] = {}
        self.when_freed = None  # called while the allocator gives a segment back

    def record(self, index: int, stream: int) -> float:
        return self.busy.get(stream, 0.0)

    def reached(self, position: float) -> bool:
        return position <= self.host

    def wait_for_device(self, index: int) -> None:
        self.host = max([self.host, *self.busy.values()])
        if self.when_freed is not None:
            self.when_freed()


# -- what must hold at any moment ------------------------------------------------------


def segments_of(memory: CachingAllocator) -> list[list]:
    """The blocks of each segment, in order of address."""
    segments = []
    for address in sorted(memory.segments):
        blocks, block = [], memory.segments[address]
        while block is not None:
            blocks.append(block)
            block = block.next
        segments.append(blocks)
    return segments


def free_blocks(memory: CachingAllocator) -> list:
    """The blocks that may be handed out, whatever the pools say."""
    waiting = {id(block) for block, _ in memory._waiting}
    blocks = sum(segments_of(memory), [])
    return [b for b in blocks if not b.allocated and id(b) not in waiting]


def check(memory: CachingAllocator, live: list) -> None:
    """Compare links, pools and every statistic with a walk over the segments."""
    stats = memory.stats()  # takes back what has died
    waiting = [block for block, _ in memory._waiting]
    free = free_blocks(memory)
    found, end = [], 0
    for blocks in segments_of(memory):
        first = blocks[0]
        assert first.prev is None and blocks[-1].next is None
        assert first.address >= end  # segments do not overlap
        size = memory.segment_sizes[first.address]
        end = first.address + size
        assert sum(block.size for block in blocks) == size
        for a, b in zip(blocks, blocks[1:], strict=False):
            assert b.prev is a and a.address + a.size == b.address
            assert not (a in free and b in free)  # they would have been merged
        for block in blocks:
            assert block.size > 0 and block.address % model.ROUND == 0
            assert block.pool is first.pool and block.stream == first.stream
        found += blocks
    assert {id(b) for b in live} == {id(b) for b in found if b.allocated}
    for block in live:  # what is left over has been split off
        spare = block.size - round_up(block.requested)
        assert 0 <= spare <= (0 if block.pool.small else model.SMALL_SIZE)

    pooled, private = [], memory.private.pools.values()
    parts = [part for pool in private for part in (pool.small, pool.large)]
    for pool in (memory.small, memory.large, *parts):
        for stream, entries in pool.free.items():
            assert entries == sorted(entries, key=lambda entry: entry[:3])
            for *key, block in entries:
                assert key == [block.size, block.counter, block.address]
                assert (block.stream, block.pool) == (stream, pool)
                pooled.append(block)
    assert {id(b) for b in pooled} == {id(b) for b in free} and len(pooled) == len(free)

    inactive = [block for block in free if block.is_split]
    for name, in_bytes, sizes in (
        ("allocation", "allocated", [b.size for b in live]),
        ("active", "active", [b.size for b in live + waiting]),
        ("inactive_split", "inactive_split", [b.size for b in inactive]),
        ("segment", "reserved", memory.segment_sizes.values()),
    ):
        assert stats[name]["all"]["current"] == len(sizes), name
        assert stats[f"{in_bytes}_bytes"]["all"]["current"] == sum(sizes), name
    asked = sum(block.requested for block in live + waiting)
    assert stats["requested_bytes"]["all"]["current"] == asked
    for name in statistics.NAMES:
        pools = [stats[name][pool] for pool in ("all", "small_pool", "large_pool")]
        both, small, large = pools
        for kind in ("current", "allocated", "freed"):
            assert both[kind] == small[kind] + large[kind], (name, kind)
        peaks = small["peak"], large["peak"]
        assert sum(peaks) >= both["peak"] >= max(peaks)
        for stat in pools:
            assert stat["peak"] >= stat["current"] >= 0
            assert stat["allocated"] - stat["freed"] == stat["current"]
    assert memory.allocated == sum(block.size for block in live)


# -- random programs -------------------------------------------------------------------

EDGES = (1, 512, 513, MIB - 512, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB,
         10 * MIB + 1, 19 * MIB, 20 * MIB, 33 * MIB, 200 * MIB)  # fmt: skip
STEPS = ["allocate", "allocate", "free", "free", "record_stream", "work", "wait"] * 5
STEPS += ["empty_cache", "reset_peaks"]


class Run:
    """A random program on an allocator, step by step."""

    def __init__(self, seed: int):
        self.chance = random.Random(seed)
        self.clock = FakeClock()
        total = self.chance.choice((64, 96, 1024)) * MIB
        self.memory = CachingAllocator(0, total, self.clock)
        self.memory.fraction = self.chance.choice((None, None, 0.8, 0.35))
        self.most = int(total * (self.memory.fraction or 1))
        self.live: list = []
        self.log: list = []

    def step(self) -> None:
        memory, clock, chance = self.memory, self.clock, self.chance
        name, stream = chance.choice(STEPS), chance.randrange(3)
        if name == "allocate":
            most = chance.choice((4 * KIB, MIB, 10 * MIB, 40 * MIB))
            nbytes = chance.choice((chance.randint(1, most), chance.choice(EDGES)))
            self.allocate(nbytes, stream)
        elif name == "free" and self.live:
            memory.free(self.live.pop(chance.randrange(len(self.live))))
        elif name == "record_stream" and self.live:
            memory.record_stream(chance.choice(self.live), 0, stream)
        elif name == "work":
            begin = max(clock.host, clock.busy.get(stream, 0))
            clock.busy[stream] = begin + chance.randint(1, 5)
        elif name == "wait":
            clock.host += chance.randint(1, 5)
        elif name in ("empty_cache", "reset_peaks"):
            getattr(memory, name)()
        assert memory.allocated <= memory.reserved <= self.most
        self.log.append((memory.allocated, memory.reserved, memory.counts.copy()))

    def allocate(self, nbytes: int, stream: int) -> None:
        """Allocate, and compare with the best fit that a walk finds."""
        memory, size = self.memory, round_up(nbytes)
        pool = memory.small if size <= MIB else memory.large
        pool = memory.private.pool_for(pool, stream)
        fits = [
            (block.size, block.counter, block.address)
            for block in free_blocks(memory)
            if block.stream == stream and block.pool is pool and block.size >= size
        ]
        nobody_waits, reserved = not memory._waiting, memory.reserved
        try:
            block = memory.malloc(nbytes, stream)
        except OUT_OF_MEMORY:
            assert not fits
            self.log.append("out of memory")
            return
        if nobody_waits and fits:
            assert block.address == min(fits)[2] and memory.reserved == reserved
        elif nobody_waits:
            assert memory.segment_sizes[block.address] == segment_size(size)
        self.live.append(block)
        self.log.append((block.address, block.size))

    def finish(self) -> None:
        """Free everything and give all segments back."""
        while self.live:
            self.memory.free(self.live.pop())
        self.memory.empty_cache()
        check(self.memory, [])
        assert not self.memory.segments and not self.memory.segment_sizes


@pytest.mark.parametrize("seed", range(40))
def test_blocks_and_statistics_agree_after_every_step(seed):
    run, again = Run(seed), Run(seed)
    run.memory.history.record(10**6, context=None)
    for _ in range(200):
        run.step()
        check(run.memory, run.live)
        again.step()
    assert run.log == again.log  # also without a history
    run.finish()
    check_history(run.memory)


def check_history(memory: CachingAllocator) -> None:
    """Compare the events, after everything has been given back, with the statistics."""
    sums = Counter()
    for event in memory.history.events:
        sums[event["action"]] += 1 if event["action"] == "oom" else event["size"]
    stats = memory.stats()
    asked = stats["requested_bytes"]["all"]["allocated"]
    assert sums["alloc"] == sums["free_requested"] == sums["free_completed"] == asked
    reserved = stats["reserved_bytes"]["all"]["allocated"]
    assert sums["segment_alloc"] == sums["segment_free"] == reserved
    assert sums["oom"] == stats["num_ooms"]
    made = stats["num_device_alloc"], stats["num_device_free"]
    assert made == (memory.both.segment.allocated, memory.both.segment.freed)


# -- each rule -------------------------------------------------------------------------

CONSTANTS = {
    "kMinBlockSize": model.ROUND,
    "kSmallSize": model.SMALL_SIZE,
    "kSmallBuffer": model.SMALL_SEGMENT,
    "kMinLargeAlloc": model.LARGE_REQUEST,
    "kRoundLarge": model.ROUND_SEGMENT,
    "large_segment_size_": model.LARGE_SEGMENT,  # kLargeBuffer in earlier versions
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_those_of_the_installed_pytorch(name):
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    text = header.read_text() if header.exists() else ""
    match = re.search(rf"\b{name}(?: = |{{)(\d+)", text)
    if match is None:
        pytest.skip("this PyTorch keeps the constant elsewhere")
    assert int(match[1]) == CONSTANTS[name]


@pytest.mark.parametrize("nbytes, block, segment", [
    (1, 512, 2 * MIB), (512, 512, 2 * MIB), (513, 1024, 2 * MIB),
    (MIB - 511, MIB, 2 * MIB), (MIB, MIB, 2 * MIB), (MIB + 1, MIB + 512, 20 * MIB),
    (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
    (10 * MIB - 511, 10 * MIB, 10 * MIB),  # rounded before it is compared
    (10 * MIB, 10 * MIB, 10 * MIB), (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
    (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # more than 1 MiB left: split
    (11 * MIB, 12 * MIB, 12 * MIB),  # just 1 MiB left: not split
    (33 * MIB, 34 * MIB, 34 * MIB),
])  # fmt: skip
def test_sizes_of_blocks_and_segments(nbytes, block, segment):
    memory = CachingAllocator(0, GIB)
    assert memory.malloc(0) is None and memory.reserved == 0
    made = memory.malloc(nbytes)
    assert (made.size, made.requested, memory.reserved) == (block, nbytes, segment)
    assert made.pool is (memory.small if round_up(nbytes) <= MIB else memory.large)
    check(memory, [made])


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def memory(clock) -> CachingAllocator:
    return CachingAllocator(0, GIB, clock)


def free_recorded(memory: CachingAllocator, block, *streams: int) -> None:
    for stream in streams:
        memory.record_stream(block, 0, stream)
    memory.free(block)


def test_a_recorded_stream_delays_reuse_until_its_work_is_done(clock, memory):
    block = memory.malloc(4096)
    address = block.address
    clock.busy[1] = 3.0  # given before the block is freed: counts
    free_recorded(memory, block, 1)
    clock.busy[1] = 9.0  # given after: does not
    assert memory.allocated == 0 and memory.both.active_bytes.current == 4096
    (segment,) = memory.history.snapshot()
    assert (segment["allocated_size"], segment["active_size"]) == (0, 4096)
    clock.host = 2.9
    assert memory.malloc(4096).address != address
    clock.host = 3.0
    assert memory.malloc(4096).address == address
    assert memory.both.active_bytes.current == 2 * 4096


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_block_waits_for_all_its_streams_but_not_for_its_own(clock, memory, order):
    clock.busy = {0: 100.0, 1: 1.0, 2: 2.0}
    free_recorded(memory, memory.malloc(4096), *order)
    for now, waits in ((1.0, True), (2.0, False)):
        clock.host = now
        memory.free(memory.malloc(1))  # looks which blocks have become free
        assert (memory.both.active_bytes.current == 4096) == waits
    free_recorded(memory, memory.malloc(4096), 0)
    assert memory.both.active_bytes.current == 0


def test_emptying_the_cache_waits_for_other_streams_and_keeps_what_is_in_use(
    clock, memory
):
    clock.busy[1] = 5.0
    block, used = memory.malloc(4096), memory.malloc(4096)
    free_recorded(memory, block, 1)
    memory.empty_cache()
    assert clock.host == 5.0 and memory.reserved == 2 * MIB
    check(memory, [used])
    memory.free(used)
    memory.empty_cache()
    assert memory.reserved == 0 and memory.counts["num_sync_all_streams"] == 2
    check(memory, [])


def test_a_full_card_frees_the_cache_and_tries_again():
    memory = CachingAllocator(0, 48 * MIB)
    memory.free(memory.malloc(30 * MIB))
    block = memory.malloc(32 * MIB)  # does not fit beside what is cached
    assert memory.reserved == 32 * MIB
    counts = memory.counts
    assert (counts["num_alloc_retries"], counts["num_ooms"]) == (1, 0)
    assert (counts["num_device_alloc"], counts["num_device_free"]) == (2, 1)
    with pytest.raises(OUT_OF_MEMORY):
        memory.malloc(20 * MIB)
    assert (counts["num_alloc_retries"], counts["num_ooms"]) == (2, 1)
    check(memory, [block])
    assert memory.malloc(16 * MIB).size == 16 * MIB  # and it goes on


MESSAGE = (
    "CUDA out of memory. Tried to allocate {}. GPU 3 has a total capacity of 64.00 MiB "
    "of which 24.00 MiB is free. Including non-PyTorch memory, this process has 40.00 "
    "MiB memory in use. {}Of the allocated memory 18.00 MiB is allocated by PyTorch, "
    "and 22.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize("fraction, nbytes, tried, allowed", [
    (None, 30 * MIB - 7, "30.00 MiB", ""),
    (None, 9 * 2**30, "9.00 GiB", ""),
    (0.75, 12 * MIB, "12.00 MiB", "48.00 MiB allowed; "),  # 22 free, but in pieces
    (0.625, 100, "2.00 MiB", "40.00 MiB allowed; "),  # a segment
    (1.0, 26 * MIB, "26.00 MiB", "64.00 MiB allowed; "),
])  # fmt: skip
def test_the_message_has_the_exact_figures(fraction, nbytes, tried, allowed):
    memory = CachingAllocator(3, 64 * MIB)
    memory.fraction = fraction
    blocks = [memory.malloc(9 * MIB) for _ in range(4)]  # two segments of 20 MiB
    memory.free(blocks.pop(2))
    memory.free(blocks.pop(0))
    with pytest.raises(OUT_OF_MEMORY) as caught:
        memory.malloc(nbytes)
    assert str(caught.value).startswith(MESSAGE.format(tried, allowed))
    check(memory, blocks)


def test_observers_hear_of_the_segment_and_of_what_is_allowed():
    memory, heard = CachingAllocator(0, 100 * MIB), []
    memory.fraction = 0.1
    memory.observers.append(lambda *what: heard.append(what))
    with pytest.raises(OUT_OF_MEMORY):
        memory.malloc(5 * MIB)
    assert heard == [(0, 20 * MIB, 10 * MIB, 100 * MIB)]


def test_a_fraction_allows_what_fits_exactly():
    memory = CachingAllocator(0, 64 * MIB)
    memory.fraction = 0.5
    memory.malloc(32 * MIB)
    assert memory.counts["num_alloc_retries"] == 0
    with pytest.raises(OUT_OF_MEMORY):
        memory.malloc(1)
    assert memory.reserved == 32 * MIB == memory.limit


def test_room_is_checked_without_taking_it():
    memory = CachingAllocator(0, 64 * MIB)
    block = memory.malloc(40 * MIB)
    memory.check_room(24 * MIB)
    assert memory.allocated == memory.reserved == 40 * MIB
    with pytest.raises(OUT_OF_MEMORY, match="Tried to allocate 26.00 MiB"):
        memory.check_room(24 * MIB + 1)
    check(memory, [block])


def test_peaks_and_sums_are_reset(memory):
    stat = memory.both.allocated_bytes
    block = memory.malloc(4096)
    memory.free(memory.malloc(8192))
    assert stat.as_dict() == dict(current=4096, peak=12288, allocated=12288, freed=8192)
    memory.reset_peaks()
    memory.reset_sums()
    assert stat.as_dict() == dict(current=4096, peak=4096, allocated=0, freed=0)
    assert memory.counts["num_device_alloc"] == 0
    memory.free(block)
    memory.stats()
    assert stat.as_dict() == dict(current=0, peak=4096, allocated=0, freed=4096)


# -- within itself, and from several threads -------------------------------------------


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_block_freed_while_another_is_allocated_is_taken_back_after(clock, elsewhere):
    memory = CachingAllocator(0, 48 * MIB, clock)
    victim = memory.malloc(4096)
    memory.free(memory.malloc(30 * MIB))
    thread = threading.Thread(target=memory.free, args=(victim,))

    def free_meanwhile():
        clock.when_freed = None
        if elsewhere:
            thread.start()
            thread.join(0.2)  # the limit is what is tested
            assert thread.is_alive()  # it waits for us
        else:
            memory.free(victim)
        assert victim.allocated  # not now: the allocator is at work

    clock.when_freed = free_meanwhile
    block = memory.malloc(40 * MIB)
    assert clock.when_freed is None
    if elsewhere:
        thread.join(SHORT)
        assert not thread.is_alive()
    assert memory.allocated == 40 * MIB
    check(memory, [block])


class Owner:
    """What holds a block, as a storage does, and lies in a cycle."""

    def __init__(self, memory: CachingAllocator, nbytes: int, stream: int):
        self.me = self
        self.memory = memory
        self.block = memory.malloc(nbytes, stream)

    def __del__(self):
        self.memory.free(self.block)


@pytest.fixture
def eager_collector():
    """Python's collector runs at almost every new object."""
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(2, 1, 1)
    yield
    gc.set_threshold(*before)


SIZES = (100, 4096, MIB, 3 * MIB)


def test_the_collector_may_free_at_any_moment(memory, eager_collector):
    memory.history.record(1000, context="all")
    chance = random.Random(0)
    for _ in range(100):
        for _ in range(2):
            Owner(memory, chance.choice(SIZES), chance.randrange(2))
        if chance.random() < 0.1:
            memory.empty_cache()
        memory.stats()
    gc.collect()
    check(memory, [])


@pytest.mark.parametrize("later", range(1, 30, 2))
def test_a_snapshot_is_of_one_moment(eager_collector, later):
    memory = CachingAllocator(0, GIB)
    gc.disable()
    live = [memory.malloc(512)]
    for _ in range(6):
        Owner(memory, 4096, 0)
    gc.set_threshold(gc.get_count()[0] + later, 1, 1)
    gc.enable()  # the collector frees the six so many objects later
    for segment in memory.history.snapshot():
        blocks = segment["blocks"]
        assert sum(block["size"] for block in blocks) == segment["total_size"]
        ends = [block["address"] + block["size"] for block in blocks]
        assert [block["address"] for block in blocks[1:]] == ends[:-1]
        used = [b["size"] for b in blocks if b["state"] == "active_allocated"]
        assert segment["allocated_size"] == sum(used)
    gc.collect()
    check(memory, live)


def test_threads_share_one_allocator(memory):
    def work(seed):
        chance, live = random.Random(seed), []
        for _ in range(300):
            if live and chance.random() < 0.5:
                memory.free(live.pop(chance.randrange(len(live))))
            else:
                live.append(memory.malloc(chance.choice(SIZES), chance.randrange(3)))
                memory.record_stream(live[-1], 0, chance.randrange(3))
        for block in live:
            memory.free(block)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    memory.empty_cache()
    check(memory, [])
    assert memory.reserved == 0
