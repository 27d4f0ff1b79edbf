"""The model of PyTorch's caching allocator, alone: random programs, and each rule.

The rules and the names beside them are those of c10/cuda/CUDACachingAllocator.cpp and
c10/core/AllocatorConfig.h.
"""

import gc
import random
import re
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.simgpu import memory as model
from helpers.simgpu.cards import GIB, KIB, MIB
from helpers.simgpu.memory import Memory, NoTime, round_up, segment_size

OUT_OF_MEMORY = torch.OutOfMemoryError
KINDS = ("current", "peak", "allocated", "freed")


class FakeClock(NoTime):
    """A clock that the test sets; a stream's work is done at its `busy` time."""

    def __init__(self):
        super().__init__()
        self.host = 0.0
        self.busy: dict[int, float] = {}
        self.frees = 0
        self.when_freed = None  # called while the allocator gives a segment back

    def mark(self, index: int, stream: int) -> float:
        return self.busy.get(stream, 0.0)

    def reached(self, mark: float) -> bool:
        return mark <= self.host

    def device_free(self, index: int) -> None:
        self.frees += 1
        self.host = max([self.host, *self.busy.values()])
        if self.when_freed is not None:
            self.when_freed()


# -- what must hold at any moment ------------------------------------------------------


def walk(memory: Memory) -> list[list]:
    """The blocks of each segment, in order of address."""
    segments = []
    for address in sorted(memory.segments):
        blocks, block = [], memory.segments[address]
        while block is not None:
            blocks.append(block)
            block = block.next
        segments.append(blocks)
    return segments


def free_blocks(memory: Memory) -> list:
    """The blocks that may be handed out, whatever the pools say."""
    waiting = {id(block) for block, _ in memory._waiting}
    return [
        block
        for blocks in walk(memory)
        for block in blocks
        if not block.allocated and id(block) not in waiting
    ]


def check(memory: Memory, live: list) -> None:
    """Blocks, links, pools and every statistic agree with a walk over the segments."""
    stats = memory.stats()  # takes back what has died
    waiting = [block for block, _ in memory._waiting]
    free = free_blocks(memory)
    found, end = [], 0
    for blocks in walk(memory):
        first = blocks[0]
        assert first.prev is None and blocks[-1].next is None
        assert first.address >= end  # segments do not overlap
        size = memory.sizes[first.address]
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
    for block in live:
        spare = block.size - round_up(block.requested)
        assert 0 <= spare <= (0 if block.pool.small else model.SMALL_SIZE)

    pooled = []
    for pool in (memory.small, memory.large):
        for stream, entries in pool.free.items():
            assert entries == sorted(entries, key=lambda entry: entry[:2])
            for size, address, block in entries:
                assert (size, address) == (block.size, block.address)
                assert (block.stream, block.pool) == (stream, pool)
                pooled.append(block)
    assert {id(b) for b in pooled} == {id(b) for b in free} and len(pooled) == len(free)

    inactive = [block for block in free if block.is_split]
    expected = {
        "allocation": (len(live), live and sum(b.size for b in live)),
        "active": (len(live) + len(waiting), sum(b.size for b in live + waiting)),
        "inactive_split": (len(inactive), sum(b.size for b in inactive)),
        "segment": (len(memory.segments), sum(memory.sizes.values())),
    }
    for name, (count, nbytes) in expected.items():
        in_bytes = {"allocation": "allocated", "segment": "reserved"}.get(name, name)
        assert stats[name]["all"]["current"] == count
        assert stats[f"{in_bytes}_bytes"]["all"]["current"] == (nbytes or 0)
    asked = sum(block.requested for block in live + waiting)
    assert stats["requested_bytes"]["all"]["current"] == asked
    for name in model._STATS:
        both, small, large = (
            stats[name][kind] for kind in ("all", "small_pool", "large_pool")
        )
        for kind in ("current", "allocated", "freed"):
            assert both[kind] == small[kind] + large[kind], (name, kind)
        assert both["peak"] <= small["peak"] + large["peak"]
        assert both["peak"] >= max(small["peak"], large["peak"])
        for stat in (both, small, large):
            assert stat["peak"] >= stat["current"] >= 0
            assert stat["allocated"] - stat["freed"] == stat["current"]
    assert memory.limit >= memory.reserved >= memory.allocated
    assert memory.allocated == sum(block.size for block in live)


# -- random programs -------------------------------------------------------------------

EDGES = (1, 512, 513, MIB - 512, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB,
         10 * MIB + 1, 19 * MIB, 20 * MIB, 33 * MIB, 200 * MIB)  # fmt: skip
sizes = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, MIB),
    st.integers(MIB, 10 * MIB),
    st.integers(10 * MIB, 40 * MIB),
    st.sampled_from(EDGES),
)
streams = st.integers(0, 2)
which = st.integers(0, 99)
steps = st.one_of(
    st.tuples(st.just("allocate"), sizes, streams),
    st.tuples(st.just("allocate"), sizes, streams),
    st.tuples(st.just("free"), which),
    st.tuples(st.just("free"), which),
    st.tuples(st.just("record_stream"), which, streams),
    st.tuples(st.just("work"), streams, st.integers(1, 5)),
    st.tuples(st.just("wait"), st.integers(1, 5)),
    st.tuples(st.just("empty_cache")),
    st.tuples(st.just("reset_peaks")),
)
programs = st.lists(steps, min_size=15, max_size=80)
bounded = settings(derandomize=True, deadline=None, max_examples=250, database=None)


class Run:
    """A program on an allocator, step by step."""

    def __init__(self, total: int = 96 * MIB):
        self.clock = FakeClock()
        self.memory = Memory(0, total, self.clock)
        self.live: list = []
        self.log: list = []

    def step(self, name: str, *args) -> None:
        memory, clock = self.memory, self.clock
        if name == "allocate":
            self.allocate(*args)
        elif name == "free" and self.live:
            memory.free(self.live.pop(args[0] % len(self.live)))
        elif name == "record_stream" and self.live:
            memory.record_stream(self.live[args[0] % len(self.live)], args[1])
        elif name == "work":
            clock.busy[args[0]] = max(clock.host, clock.busy.get(args[0], 0)) + args[1]
        elif name == "wait":
            clock.host += args[0]
        elif name in ("empty_cache", "reset_peaks"):
            getattr(memory, name)()
        self.log.append((memory.allocated, memory.reserved, memory.counts.copy()))

    def allocate(self, nbytes: int, stream: int) -> None:
        """Allocate, and compare with the best fit that a walk finds."""
        memory, size = self.memory, round_up(nbytes)
        fits = [
            (block.size, block.address)
            for block in free_blocks(memory)
            if block.stream == stream
            and block.pool.small == (size <= MIB)
            and block.size >= size
        ]
        nobody_waits, reserved = not memory._waiting, memory.reserved
        try:
            block = memory.allocate(nbytes, stream)
        except OUT_OF_MEMORY:
            assert not fits
            self.log.append("out of memory")
            return
        if nobody_waits and fits:
            assert block.address == min(fits)[1] and memory.reserved == reserved
        elif nobody_waits:
            assert memory.sizes[block.address] == segment_size(size)
        self.live.append(block)
        self.log.append((block.address, block.size))

    def finish(self) -> None:
        """Free everything and give all segments back."""
        while self.live:
            self.memory.free(self.live.pop())
        self.memory.empty_cache()


@given(programs)
@bounded
def test_every_figure_agrees_with_the_blocks_after_every_step(program):
    run = Run()
    for step in program:
        run.step(*step)
        check(run.memory, run.live)
    run.finish()
    check(run.memory, [])
    assert not run.memory.segments and not run.memory.sizes
    for name in model._STATS:
        for pool in run.memory.stats()[name].values():
            assert pool["current"] == 0 and pool["allocated"] == pool["freed"]
    assert run.memory.counts["num_device_alloc"] == run.memory.all.segment.allocated
    assert run.memory.counts["num_device_free"] == run.memory.all.segment.freed


@pytest.mark.parametrize("seed", range(4))
def test_long_programs_agree_too(seed):
    chance = random.Random(seed)
    names = ["allocate", "allocate", "free", "record_stream", "work", "wait"] * 9
    names += ["empty_cache", "reset_peaks"]
    run = Run(total=chance.choice((64, 128, 1024)) * MIB)
    for _ in range(600):
        name, args = chance.choice(names), ()
        if name == "allocate":
            nbytes = chance.choice((4 * KIB, MIB, 10 * MIB, 40 * MIB))
            args = (chance.randint(1, nbytes), chance.randrange(3))
        elif name == "free":
            args = (chance.randrange(100),)
        elif name in ("record_stream", "work"):
            args = (chance.randrange(3), chance.randrange(3))
        elif name == "wait":
            args = (chance.randint(1, 5),)
        run.step(name, *args)
        check(run.memory, run.live)
    run.finish()
    check(run.memory, [])


@given(programs)
@settings(bounded, max_examples=80)
def test_a_program_run_again_gives_the_same_figures_and_addresses(program):
    logs = []
    for _ in range(2):
        run = Run()
        for step in program:
            run.step(*step)
        logs.append((run.log, run.memory.stats(), run.memory.snapshot()))
    assert logs[0] == logs[1]


@given(programs, st.floats(0.1, 1.0))
@settings(bounded, max_examples=80)
def test_no_program_takes_more_than_its_fraction(program, fraction):
    run = Run()
    run.memory.fraction = fraction
    for step in program:
        run.step(*step)
        assert run.memory.reserved <= int(96 * MIB * fraction)


@given(programs)
@settings(bounded, max_examples=80)
def test_the_history_of_a_program_adds_up(program):
    run = Run()
    run.memory.record_history(10**6, context=None)
    for step in program:
        run.step(*step)
    run.finish()
    sums = dict.fromkeys(
        ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
         "oom"), 0,
    )  # fmt: skip
    for event in run.memory.history:
        sums[event["action"]] += event["size"] if event["action"] != "oom" else 1
    stats = run.memory.stats()
    asked = stats["requested_bytes"]["all"]["allocated"]
    assert sums["alloc"] == sums["free_requested"] == sums["free_completed"] == asked
    reserved = stats["reserved_bytes"]["all"]["allocated"]
    assert sums["segment_alloc"] == sums["segment_free"] == reserved
    assert sums["oom"] == stats["num_ooms"]


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


@pytest.mark.parametrize(
    "nbytes, block, segment",
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB - 511, MIB, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),  # rounded before it is compared
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # more than 1 MiB left: split
        (11 * MIB, 12 * MIB, 12 * MIB),  # just 1 MiB left: not split
        (33 * MIB, 34 * MIB, 34 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(nbytes, block, segment):
    memory = Memory(0, GIB)
    made = memory.allocate(nbytes)
    assert (made.size, made.requested, memory.reserved) == (block, nbytes, segment)
    assert made.pool is (memory.small if round_up(nbytes) <= MIB else memory.large)
    check(memory, [made])


def test_no_bytes_take_no_block():
    memory = Memory(0, MIB)
    before = memory.stats()
    assert memory.allocate(0) is None and memory.stats() == before


def test_small_blocks_share_a_segment_until_it_is_full():
    memory = Memory(0, GIB)
    blocks = [memory.allocate(MIB // 2) for _ in range(4)]
    assert memory.reserved == 2 * MIB and len(memory.segments) == 1
    blocks.append(memory.allocate(1))
    assert memory.reserved == 4 * MIB and len(memory.segments) == 2
    check(memory, blocks)


def test_small_blocks_are_split_if_512_bytes_are_left():
    memory = Memory(0, GIB)
    hole, wall = memory.allocate(2048), memory.allocate(512)
    memory.free(hole)
    block = memory.allocate(2048 - 512)
    assert block.size == 1536 and block.next.size == 512 and not block.next.allocated
    memory.free(block)
    block = memory.allocate(2048 - 511)
    assert block.size == 2048 and block.next is wall


@pytest.mark.parametrize("left, split", [(MIB, False), (MIB + 512, True)])
def test_large_blocks_are_split_if_more_than_1_mib_is_left(left, split):
    memory = Memory(0, GIB)
    memory.free(memory.allocate(30 * MIB))
    block = memory.allocate(30 * MIB - left)
    assert memory.reserved == 30 * MIB and block.is_split == split
    assert block.size == (30 * MIB - left if split else 30 * MIB)
    assert memory.all.inactive_split_bytes.current == (left if split else 0)


def test_a_small_request_never_takes_a_large_block():
    memory = Memory(0, GIB)
    memory.free(memory.allocate(30 * MIB))
    memory.allocate(MIB)
    assert memory.reserved == 32 * MIB
    memory.allocate(MIB + 1)  # but a request of the large pool does
    assert memory.reserved == 32 * MIB


def test_best_fit_takes_the_smallest_block_and_then_the_lowest():
    memory = Memory(0, GIB)
    blocks = [memory.allocate(n * KIB) for n in (8, 1, 4, 1, 4, 1, 16, 1)]
    holes = [blocks[i] for i in (0, 2, 4, 6)]
    addresses = [block.address for block in holes]
    for hole in reversed(holes):
        memory.free(hole)
    assert memory.allocate(3 * KIB).address == addresses[1]
    assert memory.allocate(4 * KIB).address == addresses[2]
    assert memory.allocate(4 * KIB).address == addresses[0]
    assert memory.allocate(12 * KIB).address == addresses[3]


def test_freed_neighbours_become_one_block_again():
    memory = Memory(0, GIB)
    a, b, c, d = blocks = [memory.allocate(4096) for _ in range(4)]
    start = a.address
    for block, inactive in ((a, 2), (c, 3), (b, 2)):
        memory.free(block)
        assert memory.all.inactive_split.current == inactive
    check(memory, [d])
    assert memory.allocate(3 * 4096).address == start
    memory.free(d)
    assert len(blocks) == 4 and memory.all.inactive_split.current == 1


def test_streams_do_not_share_what_is_cached():
    memory = Memory(0, GIB)
    memory.free(memory.allocate(4096, stream=0))
    other = memory.allocate(4096, stream=1)
    assert memory.reserved == 4 * MIB and other.stream == 1
    memory.free(other)
    assert memory.allocate(4096, stream=1) is not None and memory.reserved == 4 * MIB
    memory.allocate(4096, stream=0)
    assert memory.reserved == 4 * MIB


def test_a_recorded_stream_delays_reuse_until_its_work_is_done():
    clock = FakeClock()
    memory = Memory(0, GIB, clock)
    block = memory.allocate(4096)
    address = block.address
    memory.record_stream(block, 1)
    clock.busy[1] = 3.0  # given before the block is freed: counts
    memory.free(block)
    clock.busy[1] = 9.0  # given after: does not
    assert memory.allocated == 0 and memory.all.active_bytes.current == 4096
    assert memory.snapshot()[0]["allocated_size"] == 0
    assert memory.snapshot()[0]["active_size"] == 4096
    clock.host = 2.9
    assert memory.allocate(4096).address != address
    clock.host = 3.0
    assert memory.allocate(4096).address == address
    assert memory.all.active_bytes.current == 2 * 4096


def test_a_block_waits_for_all_its_streams_but_not_for_its_own():
    clock = FakeClock()
    memory = Memory(0, GIB, clock)
    clock.busy = {0: 100.0, 1: 1.0, 2: 2.0}
    block = memory.allocate(4096)
    for stream in (0, 1, 2):
        memory.record_stream(block, stream)
    memory.free(block)
    for now, waits in ((1.0, True), (2.0, False)):
        clock.host = now
        memory.free(memory.allocate(1))  # looks which blocks have become free
        assert (memory.all.active_bytes.current == 4096) == waits
    block = memory.allocate(4096)
    memory.record_stream(block, 0)
    memory.free(block)
    assert memory.all.active_bytes.current == 0


def test_emptying_the_cache_waits_for_other_streams():
    clock = FakeClock()
    memory = Memory(0, GIB, clock)
    clock.busy[1] = 5.0
    block = memory.allocate(4096)
    memory.record_stream(block, 1)
    memory.free(block)
    memory.empty_cache()
    assert clock.host == 5.0 and memory.reserved == 0
    assert memory.counts["num_sync_all_streams"] == 1
    check(memory, [])


def test_a_segment_in_use_is_kept_when_the_cache_is_emptied():
    memory = Memory(0, GIB)
    a, b = memory.allocate(4096), memory.allocate(4096)
    large = memory.allocate(30 * MIB)
    memory.free(a)
    memory.free(large)
    memory.empty_cache()
    assert memory.reserved == 2 * MIB and memory.counts["num_device_free"] == 1
    check(memory, [b])


def test_a_full_card_frees_the_cache_and_tries_again():
    memory = Memory(0, 48 * MIB)
    memory.free(memory.allocate(30 * MIB))
    block = memory.allocate(32 * MIB)  # does not fit beside what is cached
    assert memory.reserved == 32 * MIB
    counts = memory.counts
    assert (counts["num_alloc_retries"], counts["num_ooms"]) == (1, 0)
    assert (counts["num_device_alloc"], counts["num_device_free"]) == (2, 1)
    with pytest.raises(OUT_OF_MEMORY):
        memory.allocate(20 * MIB)
    counts = memory.counts
    assert (counts["num_alloc_retries"], counts["num_ooms"]) == (2, 1)
    check(memory, [block])
    assert memory.allocate(16 * MIB).size == 16 * MIB  # and it goes on


def test_what_cannot_be_released_is_in_the_way():
    memory = Memory(0, 40 * MIB)
    blocks = [memory.allocate(9 * MIB) for _ in range(4)]  # two segments of 20 MiB
    memory.free(blocks[0])
    memory.free(blocks[2])
    with pytest.raises(OUT_OF_MEMORY) as caught:
        memory.allocate(11 * MIB)  # 22 MiB are free, but in pieces
    assert "22.00 MiB is reserved by PyTorch but unallocated" in str(caught.value)
    check(memory, [blocks[1], blocks[3]])


MESSAGE = (
    "CUDA out of memory. Tried to allocate {tried}. GPU 3 has a total capacity of "
    "64.00 MiB of which {free} is free. Including non-PyTorch memory, this process has "
    "{used} memory in use. {allowed}Of the allocated memory {allocated} is allocated "
    "by PyTorch, and {cached} is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    "fraction, nbytes, figures",
    [
        (None, 50 * MIB - 7, ("50.00 MiB", "42.00 MiB", "22.00 MiB", "")),
        (None, 9 * 2**30, ("9.00 GiB", "42.00 MiB", "22.00 MiB", "")),
        (0.5, 12 * MIB, ("12.00 MiB", "42.00 MiB", "22.00 MiB", "32.00 MiB allowed; ")),
        (1.0, 50 * MIB, ("50.00 MiB", "42.00 MiB", "22.00 MiB", "64.00 MiB allowed; ")),
    ],
)
def test_the_message_has_the_exact_figures(fraction, nbytes, figures):
    memory = Memory(3, 64 * MIB)
    memory.fraction = fraction
    blocks = [memory.allocate(4000), memory.allocate(9 * MIB)]
    with pytest.raises(OUT_OF_MEMORY) as caught:
        memory.allocate(nbytes)
    tried, free, used, allowed = figures
    allocated, cached = "9.00 MiB", "13.00 MiB"
    wanted = MESSAGE.format(**locals())
    assert str(caught.value).startswith(wanted)
    check(memory, blocks)


def test_a_small_request_that_does_not_fit_names_its_segment():
    memory = Memory(0, 3 * MIB)
    blocks = [memory.allocate(MIB), memory.allocate(MIB)]
    with pytest.raises(OUT_OF_MEMORY, match="Tried to allocate 2.00 MiB"):
        memory.allocate(100)
    check(memory, blocks)


def test_a_fraction_allows_what_fits_exactly():
    memory = Memory(0, 64 * MIB)
    memory.fraction = 0.5
    memory.allocate(32 * MIB)
    assert memory.counts["num_alloc_retries"] == 0
    with pytest.raises(OUT_OF_MEMORY):
        memory.allocate(1)
    assert memory.reserved == 32 * MIB == memory.limit


def test_room_is_checked_without_taking_it():
    memory = Memory(0, 64 * MIB)
    block = memory.allocate(40 * MIB)
    memory.check_room(24 * MIB)
    assert memory.allocated == memory.reserved == 40 * MIB
    with pytest.raises(OUT_OF_MEMORY, match="Tried to allocate 26.00 MiB"):
        memory.check_room(24 * MIB + 1)
    check(memory, [block])


def test_peaks_and_sums_are_reset():
    memory = Memory(0, GIB)
    block = memory.allocate(4096)
    memory.free(memory.allocate(8192))
    assert memory.all.allocated_bytes.peak == 12288
    memory.reset_peaks()
    memory.reset_sums()
    assert memory.all.allocated_bytes.as_dict() == {
        "current": 4096, "peak": 4096, "allocated": 0, "freed": 0,
    }  # fmt: skip
    assert memory.counts["num_device_alloc"] == 0
    memory.free(block)
    assert memory.all.allocated_bytes.as_dict() == {
        "current": 0, "peak": 4096, "allocated": 0, "freed": 4096,
    }  # fmt: skip


# -- within itself, and from several threads -------------------------------------------


def test_a_block_freed_while_another_is_allocated_is_taken_back_after():
    clock = FakeClock()
    memory = Memory(0, 48 * MIB, clock)
    victim = memory.allocate(4096)
    memory.free(memory.allocate(30 * MIB))

    def free_within():
        clock.when_freed = None
        memory.free(victim)
        assert victim.allocated  # not now: the allocator is at work

    clock.when_freed = free_within
    block = memory.allocate(40 * MIB)
    assert clock.when_freed is None
    assert memory.allocated == 40 * MIB
    check(memory, [block])


def test_a_block_freed_by_another_thread_meanwhile_is_taken_back_after():
    clock = FakeClock()
    memory = Memory(0, 48 * MIB, clock)
    victim = memory.allocate(4096)
    memory.free(memory.allocate(30 * MIB))
    thread = threading.Thread(target=memory.free, args=(victim,))

    def free_elsewhere():
        clock.when_freed = None
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() and victim.allocated  # it waits for us

    clock.when_freed = free_elsewhere
    block = memory.allocate(40 * MIB)
    thread.join(10)
    assert not thread.is_alive()
    check(memory, [block])


class Owner:
    """What holds a block, as a storage does, and lies in a cycle."""

    def __init__(self, memory: Memory, nbytes: int, stream: int):
        self.me = self
        self.memory = memory
        self.block = memory.allocate(nbytes, stream)

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


def test_the_collector_may_free_at_any_moment(eager_collector):
    memory = Memory(0, GIB)
    memory.record_history(1000, context="all")
    chance = random.Random(0)
    for _ in range(100):
        Owner(memory, chance.choice((100, 4096, MIB, 3 * MIB)), chance.randrange(2))
        Owner(memory, chance.choice((100, 4096, MIB, 3 * MIB)), chance.randrange(2))
        if chance.random() < 0.1:
            memory.empty_cache()
        memory.stats()
    gc.collect()
    check(memory, [])
    assert memory.allocated == 0


@pytest.mark.parametrize("later", range(1, 30, 2))
def test_a_snapshot_is_of_one_moment(eager_collector, later):
    memory = Memory(0, GIB)
    gc.disable()
    live = [memory.allocate(512)]
    for _ in range(6):
        Owner(memory, 4096, 0)
    gc.set_threshold(gc.get_count()[0] + later, 1, 1)
    gc.enable()  # the collector frees the six so many objects later
    for segment in memory.snapshot():
        blocks = segment["blocks"]
        assert sum(block["size"] for block in blocks) == segment["total_size"]
        ends = [block["address"] + block["size"] for block in blocks]
        assert [block["address"] for block in blocks[1:]] == ends[:-1]
        used = [b["size"] for b in blocks if b["state"] == "active_allocated"]
        assert segment["allocated_size"] == sum(used)
    gc.collect()
    check(memory, live)


def test_threads_share_one_allocator():
    memory = Memory(0, GIB)
    errors = []

    def work(seed):
        chance, live = random.Random(seed), []
        try:
            for _ in range(300):
                if live and chance.random() < 0.5:
                    memory.free(live.pop(chance.randrange(len(live))))
                else:
                    size = chance.choice((100, 4096, MIB, 3 * MIB))
                    live.append(memory.allocate(size, chance.randrange(3)))
                    memory.record_stream(live[-1], chance.randrange(3))
            for block in live:
                memory.free(block)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors and not any(thread.is_alive() for thread in threads)
    memory.empty_cache()
    check(memory, [])
    assert memory.reserved == 0
