"""Segments that grow, `expandable_segments:True`: counted by hand from the source.

The rules are those of c10/cuda/CUDACachingAllocator.cpp: pages of 2 MiB for blocks up
to 1 MiB, of 20 MiB for larger ones, mapped where a request needs them.
"""

import random

import pytest
import torch

import simgpu
from simgpu._compat import is_torch
from simgpu._device.allocator import CachingAllocator
from simgpu._device.cards import GIB, MIB
from simgpu._device.settings import Settings

OUT_OF_MEMORY = torch.OutOfMemoryError


def card(mib: int, expandable: bool = True, **settings) -> CachingAllocator:
    of_program = Settings()
    of_program.expandable = expandable
    for name, value in settings.items():
        setattr(of_program, name, value)
    return CachingAllocator(0, mib * MIB, settings=of_program)


def take(memory: CachingAllocator, *sizes: float, stream: int = 0) -> list:
    return [memory.malloc(int(mib * MIB), stream) for mib in sizes]


def free(memory: CachingAllocator, *blocks) -> None:
    for block in blocks:
        memory.free(block)
    memory.stats()  # takes them back


def places(*blocks) -> list[float]:
    """Where blocks begin in their segment, in MiB."""
    return [(block.address - block.segment.address) / MIB for block in blocks]


def sizes(memory: CachingAllocator) -> tuple[float, float]:
    """MiB that are reserved and allocated."""
    return memory.reserved / MIB, memory.allocated / MIB


# -- where memory is mapped ------------------------------------------------------------


def test_small_blocks_grow_by_pages_of_two_mib():
    memory = card(200)
    a, b, c = take(memory, 1000 / MIB, 1, 1)
    # 1024 bytes and 1 MiB fill the first page but for 1 MiB - 1024: c needs another
    assert places(a, b, c) == [0, 1024 / MIB, 1 + 1024 / MIB]
    assert sizes(memory) == (4, 2 + 1024 / MIB)
    assert c.segment.size == 226 * MIB  # 1 1/8 of 200, to pages of 2


def test_large_blocks_grow_by_pages_of_twenty_mib():
    memory = card(200)
    a, b, c = take(memory, 3, 16, 3)
    assert places(a, b, c) == [0, 3, 19]  # c: 1 MiB was left, 20 more are mapped
    assert sizes(memory) == (40, 22) and a.segment.size == 240 * MIB
    (d,) = take(memory, 18)  # the rest of the second page, exactly
    assert places(d) == [22] and sizes(memory) == (40, 40)
    (e,) = take(memory, 41)
    assert places(e) == [40] and sizes(memory) == (100, 81)
    plain = card(200, expandable=False)
    take(plain, 3, 16, 3, 18, 41)
    assert plain.reserved == (20 + 20 + 18 + 42) * MIB


def test_what_is_left_of_512_bytes_is_cut_off():
    memory = card(200)
    a, b = take(memory, 20 - 512 / MIB, 1 + 512 / MIB)
    # without such segments, 512 bytes of a large block are not worth a block
    assert a.size == 20 * MIB - 512 and places(b) == [20 - 512 / MIB]
    assert card(200, expandable=False).malloc(20 * MIB - 512).size == 20 * MIB


def test_a_gap_is_used_again():
    memory = card(200)
    a, b, c = take(memory, 20, 20, 20)
    free(memory, b)
    d, e = take(memory, 10, 10)
    assert places(a, c, d, e) == [0, 40, 20, 30] and sizes(memory) == (60, 60)


def test_the_best_fit_counts_what_a_block_can_become():
    memory = card(400)
    a, b, c, d = take(memory, 30, 2, 40, 2)  # 74 of 80; 6 at the end
    free(memory, a, c)
    (e,) = take(memory, 5)
    # the 6 MiB at the end fit best, but can become all that is not mapped yet
    assert places(e) == [0] and sizes(memory) == (80, 9)
    free(memory, b, d)


def test_streams_have_segments_of_their_own():
    memory = card(200)
    a, b, c = (take(memory, 1, stream=stream)[0] for stream in (0, 1, 0))
    assert a.segment is c.segment and places(a, b, c) == [0, 0, 1]
    assert b.segment.address == a.segment.address + a.segment.size
    assert sizes(memory) == (4, 3)
    free(memory, a, c)
    take(memory, 1, stream=1)  # not there
    assert sizes(memory) == (4, 2)


# -- what is given back ----------------------------------------------------------------


def with_a_hole() -> tuple[CachingAllocator, list]:
    """15 MiB, a hole of 30 without its whole page, 10 MiB, and 5 behind."""
    memory = card(200)
    memory.history.record(100, None)
    a, b, c = take(memory, 15, 30, 10)
    assert sizes(memory) == (60, 55)
    free(memory, b)
    memory.empty_cache()
    return memory, [a, c]


def test_an_emptied_cache_gives_back_whole_pages_between_blocks():
    memory, _ = with_a_hole()
    assert sizes(memory) == (40, 25)  # of 15 to 45, the page from 20 to 40
    assert memory.share.free == 160 * MIB
    assert memory.counts["num_device_alloc"] == 2
    assert memory.counts["num_device_free"] == 1
    (d,) = take(memory, 30)  # 5 and 5 are left, and 20 are mapped between them
    assert places(d) == [15] and sizes(memory) == (60, 55)


def test_a_hole_that_is_too_small_stays():
    memory, _ = with_a_hole()
    (d,) = take(memory, 31)
    # 5 behind the last block, and 26 more
    assert places(d) == [55] and sizes(memory) == (80, 56)


def test_nothing_is_left_of_a_segment_without_blocks():
    memory = card(200)
    free(memory, *take(memory, 3, 0.5))
    assert sizes(memory) == (22, 0)
    memory.empty_cache()
    assert sizes(memory) == (0, 0) and not memory.segments
    assert memory.expandable.segments == []


def test_snapshots_have_a_segment_for_each_piece_with_memory():
    memory, (a, c) = with_a_hole()
    base = a.segment.address
    first, second = memory.history.snapshot()
    for segment, place, used in ((first, 0, 15), (second, 40, 10)):
        assert segment["address"] == base + place * MIB
        assert segment["is_expandable"] and segment["total_size"] == 20 * MIB
        assert segment["allocated_size"] == segment["requested_size"] == used * MIB
    assert [(b["size"] // MIB, b["state"]) for b in second["blocks"]] == [
        (5, "inactive"), (10, "active_allocated"), (5, "inactive")
    ]  # fmt: skip
    assert second["blocks"][1]["address"] == c.address


def test_the_history_says_what_was_mapped():
    memory, (a, _) = with_a_hole()
    base = a.segment.address
    events = [
        (e["action"], (e["addr"] - base) // MIB, e["size"] // MIB)
        for e in memory.history.events
        if e["action"].startswith("segment")
    ]
    assert events == [
        ("segment_map", 0, 20), ("segment_map", 20, 40), ("segment_unmap", 20, 20)
    ]  # fmt: skip


def test_such_segments_are_no_segments_and_no_inactive_splits():
    memory, _ = with_a_hole()
    stats = memory.stats()
    for name in ("segment", "inactive_split", "inactive_split_bytes"):
        assert stats[name]["all"] == dict.fromkeys(
            ("current", "peak", "allocated", "freed"), 0
        )
    assert stats["reserved_bytes"]["large_pool"] == {
        "current": 40 * MIB, "peak": 60 * MIB, "allocated": 60 * MIB,
        "freed": 20 * MIB,
    }  # fmt: skip
    assert stats["active"]["all"]["current"] == 2


# -- what it is for --------------------------------------------------------------------


def test_what_plain_segments_cannot_serve_fits():
    """10 MiB keep a segment of 100 MiB; then 110 are asked for."""
    found = {}
    for expandable, mib in ((False, 200), (False, 300), (True, 200)):
        memory = card(mib, expandable)
        free(memory, *take(memory, 100))
        take(memory, 10)
        try:
            take(memory, 110)
        except OUT_OF_MEMORY:
            found[expandable, mib] = "no room"
        else:
            found[expandable, mib] = memory.reserved / MIB
    assert found == {(False, 200): "no room", (False, 300): 210, (True, 200): 120}


# https://github.com/pytorch/pytorch/pull/193400: a card of 16 GiB, cycle -> MiB
PUBLISHED = {0: (66, 220), 20: (106, 2980), 40: (146, 5760), 60: (186, 8520),
             80: (226, 11300), 100: (266, 14060)}  # fmt: skip


def test_blocks_that_may_not_be_cut_grow_as_on_a_real_card():
    memory = card(16 * 1024, max_split=128 * MIB)
    take(memory, 64)
    found = {}
    for cycle in range(101):
        a, b, _ = take(memory, 91, 45.5, 2)
        free(memory, a, b)
        if cycle in PUBLISHED:
            found[cycle] = memory.allocated / MIB, memory.reserved / MIB
    assert found == PUBLISHED


def test_a_fraction_is_of_what_is_mapped():
    memory = card(200)
    memory.fraction = 0.2
    take(memory, 15, 10)  # 40 of 40: a second page for 5 MiB
    assert sizes(memory) == (40, 25)
    with pytest.raises(OUT_OF_MEMORY, match="40.00 MiB allowed"):
        take(memory, 16)
    assert memory.counts["num_alloc_retries"] == 1


def test_a_full_card_empties_the_cache_of_other_streams():
    memory = card(100)
    (a,) = take(memory, 60, stream=1)
    free(memory, a)
    take(memory, 60)
    assert sizes(memory) == (60, 60) and memory.counts["num_alloc_retries"] == 1


def test_what_was_mapped_before_memory_ran_out_stays():
    memory, _ = with_a_hole()
    with pytest.raises(OUT_OF_MEMORY):
        memory.check_room(190 * MIB)
    assert sizes(memory) == (40, 25)


# -- words -----------------------------------------------------------------------------

ADVICE = (
    " If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
)


@pytest.mark.parametrize("size, tried", [(0.5, 2), (5, 20), (41, 42)])
def test_no_room_is_told_in_the_words_of_the_version(size, tried):
    memory = card(40)
    take(memory, 39)
    with pytest.raises(OUT_OF_MEMORY) as raised:
        take(memory, size)
    text = str(raised.value)
    assert f"Tried to allocate {tried}.00 MiB. GPU 0 has a total capacity" in text
    assert "1024.00 KiB is reserved by PyTorch but unallocated." in text
    assert (ADVICE in text) == (not is_torch((2, 14)))
    assert text.count("(VSZ)") == is_torch((2, 15))


# -- in the middle of a program --------------------------------------------------------


@pytest.fixture
def gpu():
    simgpu.start(1, memory="1GB")
    yield
    simgpu.stop()


def settings(text: str) -> None:
    torch._C._accelerator_setAllocatorSettings(text)


def tensor(mib: float) -> torch.UntypedStorage:
    return torch.UntypedStorage(int(mib * MIB), device="cuda")


def test_they_are_turned_on_and_off_in_mid_program(gpu):
    reserved = torch.cuda.memory_reserved
    settings("expandable_segments:True")
    a = tensor(3)
    assert reserved() == 20 * MIB
    settings("max_split_size_mb:100")  # which does not name them
    assert torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    settings("expandable_segments:False")
    b = tensor(3)  # not in the rest of that page
    assert reserved() == 40 * MIB
    assert torch.cuda.memory_stats()["segment.all.current"] == 1
    settings("expandable_segments:True")
    c = tensor(3)  # what cannot grow comes first
    assert c.data_ptr() == b.data_ptr() + 3 * MIB and reserved() == 40 * MIB
    d = tensor(17)
    assert d.data_ptr() == a.data_ptr() + 3 * MIB
    del a, b, c, d
    torch.cuda.empty_cache()
    assert reserved() == 0


def test_the_environment_turns_them_on(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    simgpu.start(2, memory="1GB")
    try:
        x = torch.zeros(MIB, device="cuda:1")
        assert torch.cuda.memory_reserved(1) == 20 * MIB
        (segment,) = torch.cuda.memory_snapshot()
        assert segment["is_expandable"] and segment["address"] == x.data_ptr()
        assert "GPU reserved segments" in torch.cuda.memory_summary(1)
    finally:
        simgpu.stop()


# -- random programs -------------------------------------------------------------------


def check(memory: CachingAllocator, live: list) -> None:
    """Compare links, pools and statistics with a walk over the segments."""
    stats, mapped, found = memory.stats(), 0, []
    pooled = {
        entry[-1]
        for pool in (memory.small, memory.large)
        for kind in (pool.free, pool.unmapped)
        for entries in kind.values()
        for entry in entries
    }
    for address, block in memory.segments.items():
        end = address
        while block is not None:
            assert block.address == end and block.size > 0
            end += block.size
            if block.mapped:
                mapped += block.size
                assert block.allocated != (block in pooled)
            else:
                assert block in pooled and not block.allocated
                assert (block.address - address) % block.segment.page == 0
            if block.next is not None:
                assert block.next.prev is block
                both = not (block.allocated or block.next.allocated)
                assert not (both and block.mapped == block.next.mapped)
            found += [block] if block.allocated else []
            last, block = block, block.next
        if last.segment is not None:
            assert end == address + last.segment.size and not last.mapped
    assert set(found) == set(live)
    assert stats["reserved_bytes"]["all"]["current"] == mapped == memory.share.reserved
    assert memory.allocated == sum(block.size for block in live)


def test_a_request_needs_no_more_room_than_its_segment_grows_by():
    """As PyTorch's binary: 22 MiB of 64 are mapped, and 60 take 40 more."""
    memory = card(64)
    memory.settings.expandable = True
    _, large = memory.malloc(4096), memory.malloc(3 * MIB)
    memory.free(large)
    memory.malloc(60 * MIB)
    assert memory.reserved == 62 * MIB and memory.counts["num_alloc_retries"] == 0


@pytest.mark.parametrize("seed", range(8))
def test_blocks_and_statistics_agree_after_every_step(seed):
    chance = random.Random(seed)
    memory, live = card(chance.choice((64, 200, 1024))), []
    memory.fraction = chance.choice((None, 0.7))
    for _ in range(150):
        what = chance.choice(["take"] * 5 + ["free"] * 4 + ["empty", "switch"])
        if what == "take":
            most = chance.choice((4096, MIB, 10 * MIB, 60 * MIB))
            try:
                block = memory.malloc(chance.randint(1, most), chance.randrange(2))
            except OUT_OF_MEMORY:
                continue
            assert memory.settings.expandable or block.segment is None
            live.append(block)
        elif what == "free" and live:
            memory.free(live.pop(chance.randrange(len(live))))
        elif what == "empty":
            memory.empty_cache()
        elif chance.random() < 0.3:
            memory.settings.expandable = not memory.settings.expandable
        check(memory, live)
    free(memory, *live)
    memory.empty_cache()
    assert memory.reserved == 0 and memory.history.snapshot() == []
    assert memory.share.free == memory.total <= GIB
