"""Private pools of memory: numbers of PyTorch's own tests, and of its source by hand.

`test_graph_memory_stats_and_use_result_after_destroy_graph` and `TestMemPool` of
test/test_cuda.py; c10/cuda/CUDACachingAllocator.cpp.
"""

import gc
import random
import threading

import pytest
import torch
from test_allocator import FakeClock, Run, check

import simgpu
from simgpu._compat import is_torch
from simgpu._device.allocator import CachingAllocator
from simgpu._device.cards import GIB, MIB
from simgpu._device.private_pools import new_pool_id
from simgpu._device.settings import Settings

OUT_OF_MEMORY = torch.OutOfMemoryError
NEWER = is_torch((2, 13))  # there a program's pool is no capture
GRAPH = (7, 0)


def of_stream(number: int):
    return lambda stream: stream == number


def card(clock=None, total: int = GIB, expandable: bool = False) -> CachingAllocator:
    settings = Settings()
    settings.expandable = expandable
    return CachingAllocator(0, total, clock, settings=settings)


# -- the numbers of a graph's pool -----------------------------------------------------

CASES = [  # bytes, segments, their bytes, and those left when the graph is deleted
    (512, 1, 2 * MIB, 2 * MIB, "small_pool"),
    (MIB, 2, 4 * MIB, 2 * MIB, "small_pool"),
    (MIB + 512, 1, 20 * MIB, 20 * MIB, "large_pool"),
    (10 * MIB - 512, 2, 40 * MIB, 20 * MIB, "large_pool"),
    (10 * MIB + 512, 3, 36 * MIB, 12 * MIB, "large_pool"),
]


def capture(memory: CachingAllocator, nbytes: int):
    """`b = a.clone()`, and five times `b = b.clone() + 1`, on stream 1."""
    memory.private.begin(GRAPH, of_stream(1))
    b = memory.malloc(nbytes, 1)
    for _ in range(5):
        cloned = memory.malloc(nbytes, 1)
        result = memory.malloc(nbytes, 1)
        memory.free(cloned)
        memory.free(b)
        b = result
    memory.private.end(GRAPH)
    return b


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("case", range(5))
def test_a_graphs_memory_stays_until_the_graph_is_deleted(case, expandable):
    nbytes, segments, reserved, left, pool = CASES[case]
    if expandable:  # pages of 20 MiB, of which a living block may keep two
        segments, reserved = 0, 40 * MIB if case > 2 else reserved
        left = {3: 40 * MIB, 4: 20 * MIB}.get(case, left)
    memory = card(expandable=expandable)
    a = memory.malloc(nbytes, 1)
    before = memory.stats()
    b = capture(memory, nbytes)

    def grown() -> list[int]:
        names, stats = (
            ("segment", "reserved_bytes", "active", "active_bytes"),
            memory.stats(),
        )
        return [stats[n][pool]["current"] - before[n][pool]["current"] for n in names]

    assert grown() == [segments, reserved, 1, nbytes]
    memory.empty_cache()
    assert grown() == [segments, reserved, 1, nbytes]
    memory.private.release(GRAPH)
    assert grown() == [segments, reserved, 1, nbytes]
    memory.empty_cache()
    assert grown() == [min(segments, 1), left, 1, nbytes]
    memory.free(b)  # it has outlived its pool
    memory.empty_cache()
    memory.free(a)
    memory.empty_cache()
    assert not memory.private.pools and not memory.segments
    if NEWER:
        assert memory.stats()["reserved_bytes_by_private_pools"][GRAPH][pool] == {
            "current": 0, "peak": reserved, "allocated": reserved, "freed": reserved
        }  # fmt: skip


# -- what belongs to a pool ------------------------------------------------------------


def test_a_freed_block_is_used_again_in_its_pool_alone():
    memory = card()
    own, inner = new_pool_id(True), new_pool_id(False)
    assert own[0] == inner[1] == 0 < min(own[1], inner[0])
    memory.private.begin(own, of_stream(0))
    address = memory.malloc(4096).address
    memory.private.begin(inner, of_stream(0))  # the last one has what it wants
    nested, beside = memory.malloc(4096), memory.malloc(4096, 1)
    assert (nested.pool.id, beside.pool.id) == (inner, (0, 0))
    memory.private.end(inner)
    assert memory.malloc(4096).address == address + 4096
    memory.private.end(own)
    assert memory.malloc(4096).pool.id == (0, 0)
    address = nested.address
    memory.free(nested)
    assert memory.malloc(4096).address != address
    memory.private.begin(inner, of_stream(0))
    assert memory.private.use_count(inner) == 2
    assert memory.malloc(4096).address == address


class PoolRun(Run):
    """A random program that also makes, uses and releases three pools."""

    def step(self) -> None:
        private, pool_id = (
            self.memory.private,
            (0, self.chance.randint(10**6, 10**6 + 2)),
        )
        pool = private.pools.get(pool_id)
        recording = any(route[0] is pool for route in private.routes)
        choice = self.chance.randrange(12)
        if choice == 0 and recording:
            private.end(pool_id)
        elif choice == 1 and not recording and (pool is None or pool.uses):
            wanted = of_stream(self.chance.randrange(3))
            private.begin(pool_id, wanted, self.chance.random() < 0.5)
        elif choice == 2 and pool is not None and pool.uses and not recording:
            private.release(pool_id)
        super().step()

    def finish(self) -> None:
        private = self.memory.private
        for pool, _, _ in list(private.routes):
            private.end(pool.id)
        for pool in private.pools.values():
            while pool.uses:
                private.release(pool.id)
        super().finish()
        assert not private.pools and not private.capturing


@pytest.mark.parametrize("seed", range(20))
def test_blocks_and_statistics_agree_with_pools_after_every_step(seed):
    run = PoolRun(random.Random(seed).randrange(10**9))
    for _ in range(250):
        run.step()
        check(run.memory, run.live)
    run.finish()


# -- while a graph is captured ---------------------------------------------------------


def test_a_capture_records_and_asks_no_events():
    clock = FakeClock()
    memory = card(clock)
    waits = memory.malloc(4096)
    memory.record_stream(waits, 0, 1)
    memory.free(waits)  # before the capture, for what stream 1 has been given
    memory.private.begin(GRAPH, of_stream(0))
    inside, outside = memory.malloc(4096), memory.malloc(4096, 1)
    memory.record_stream(inside, 0, 1)
    memory.record_stream(outside, 0, 0)
    memory.free(inside)
    memory.free(outside)
    memory.malloc(512)
    memory.empty_cache()  # as if it were not called
    assert waits.waiting and inside.waiting and outside.waiting
    assert memory.counts["num_sync_all_streams"] == 0
    memory.private.end(GRAPH)
    # streams that were named in the capture have had no work: nothing to wait for
    assert inside.waiting == (not is_torch((2, 12))) and waits.waiting
    clock.busy[1] = 1.0
    memory.malloc(512)
    assert not (waits.waiting or inside.waiting or outside.waiting)


@pytest.mark.parametrize("captures", [True, False])
def test_the_cache_is_not_emptied_for_a_capture(captures):
    memory = card(total=80 * MIB)
    memory.free(memory.malloc(60 * MIB))
    memory.private.begin(GRAPH, of_stream(0), captures)
    if captures or not NEWER:
        with pytest.raises(OUT_OF_MEMORY, match="Tried to allocate 60.00 MiB"):
            memory.malloc(60 * MIB)
        assert memory.counts["num_alloc_retries"] == 0
    else:
        assert memory.malloc(60 * MIB).pool.id == GRAPH
        assert memory.counts["num_alloc_retries"] == 1


def test_a_full_gpu_names_what_pools_keep():
    memory = card(total=64 * MIB)
    memory.private.begin(GRAPH, of_stream(0))
    kept = memory.malloc(9 * MIB)
    memory.free(memory.malloc(5 * MIB))
    memory.private.end(GRAPH)
    with pytest.raises(OUT_OF_MEMORY) as error:
        memory.malloc(50 * MIB)
    assert (
        "Of the allocated memory 20.00 MiB is allocated by PyTorch, with 11.00 MiB "
        "allocated in private pools (e.g., CUDA Graphs), and 0 bytes is reserved by "
        "PyTorch but unallocated." in str(error.value)
    )  # fmt: skip
    memory.free(kept)
    memory.private.release(GRAPH)
    memory.malloc(50 * MIB)  # now the pool makes room


def test_a_pool_that_dies_within_the_allocator_is_released_after():
    clock = FakeClock()
    memory = card(clock, 48 * MIB)
    pool_id = new_pool_id(True)
    memory.private.create(pool_id)
    memory.private.begin(pool_id, of_stream(0))
    memory.free(memory.malloc(4096))
    memory.private.end(pool_id)
    memory.private.release(pool_id)
    memory.free(memory.malloc(30 * MIB))
    clock.when_freed = lambda: memory.private.retire(pool_id)
    memory.malloc(40 * MIB)
    clock.when_freed = None
    assert memory.private.use_count(pool_id) == 1
    assert memory.reserved == 40 * MIB and not memory.private.pools


@pytest.mark.parametrize("call, words", [
    (lambda p: p.begin(GRAPH, of_stream(1)), "already recording to mempool_id"),
    (lambda p: p.end((0, 9)), "endAllocatePool: not currently recording to mempool_id"),
    (lambda p: p.release((0, 9)), "begin to allocate to it"),
    (lambda p: (p.release(GRAPH), p.release(GRAPH)), "a pool once for each use"),
    (lambda p: (p.release(GRAPH), p.create(GRAPH)), "take a new pool"),
])  # fmt: skip
def test_mistakes_have_pytorchs_words(call, words):
    memory = card()
    memory.private.begin(GRAPH, of_stream(0))
    memory.malloc(4096)
    with pytest.raises(RuntimeError, match=words):
        call(memory.private)


# -- the program's pools ---------------------------------------------------------------

on_gpus = pytest.mark.simulated_gpus(2, memory="200MB")
SEVEN = 7 * MIB // 4  # elements


@on_gpus
def test_a_pool_counts_its_users_and_shows_its_segments():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        made = [torch.empty(SEVEN, device=0)]
        assert pool.use_count() == 2
    assert pool.use_count() == 1 and pool.device == 0
    outside = torch.empty(SEVEN, device=0)
    with torch.cuda.use_mem_pool(pool):
        for segments in (1, 1, 2):  # three of 7 MiB do not fit into 20
            assert len(pool.snapshot()) == segments
            made.append(torch.empty(SEVEN, device=0))
    assert {s["segment_pool_id"] for s in pool.snapshot()} == {pool.id}
    segments = torch.cuda.memory_snapshot()
    assert sorted(s["segment_pool_id"] for s in segments) == [(0, 0), pool.id, pool.id]
    del made, outside
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 40 * MIB
    if NEWER:
        name = f"reserved_bytes_by_private_pools.0_{pool.id[1]}.all.current"
        assert torch.cuda.memory_stats()[name] == 40 * MIB
    del pool
    gc.collect()
    assert torch.cuda.memory_reserved() == 0


@on_gpus
@pytest.mark.parametrize("expandable", [False, True])
def test_a_tensor_may_outlive_its_pool(expandable):
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.arange(SEVEN, device=0)  # 14 MiB
        y = torch.ones(SEVEN, device=0)
    pool_id = pool.id
    del y, pool  # in this order: what dies later stays cached
    gc.collect()
    left = 20 if expandable else 14
    assert torch.cuda.memory_reserved() == left * MIB
    assert torch.cuda.memory_snapshot(pool_id)[0]["segment_pool_id"] == pool_id
    assert x[-1].item() == SEVEN - 1
    del x
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0 and not torch.cuda.memory_snapshot(pool_id)


@on_gpus
def test_pools_nest_and_each_gpu_has_its_part():
    pools = [torch.cuda.MemPool() for _ in range(3)]
    made = []
    with torch.cuda.use_mem_pool(pools[0]):
        made.append(torch.empty(5 * MIB, device=0))
        with torch.cuda.use_mem_pool(pools[1]):
            made.append(torch.empty(5 * MIB, device=0))
            with torch.cuda.use_mem_pool(pools[2], device=1):
                made.append(torch.empty(5 * MIB, device=0))
                made.append(torch.empty(5 * MIB, device=1))
            made.append(torch.empty(5 * MIB, device=1))
        made.append(torch.empty(5 * MIB, device=0))
    found = [[s["device"] for s in pool.snapshot()] for pool in pools]
    assert found == [[0, 0], [0, 0], [1]]
    torch._C._cuda_emptyCache(pools[2].id)
    assert torch.cuda.memory_reserved(1) == 40 * MIB  # a tensor lives there
    del made
    torch._C._cuda_emptyCache(pools[2].id)  # nobody needs it on this GPU
    assert torch.cuda.memory_reserved(1) == 20 * MIB
    del pools


@on_gpus
def test_other_threads_and_backward_passes_allocate_elsewhere():
    def elsewhere() -> None:
        made.append(torch.empty(SEVEN, device=0))

    def with_own_pool(pool) -> None:
        with torch.cuda.use_mem_pool(pool):
            torch.ones(4, device=0).neg()
            torch.cuda.empty_cache()

    made, pool = [], torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert pool.snapshot() == []
        weight = torch.ones(SEVEN, device=0, requires_grad=True)
        (weight * 2).sum().backward()  # its gradient is another thread's
    addresses = {block["address"] for s in pool.snapshot() for block in s["blocks"]}
    assert weight.data_ptr() in addresses
    assert weight.grad.data_ptr() not in addresses
    pools = [torch.cuda.MemPool() for _ in range(4)]
    threads = [threading.Thread(target=with_own_pool, args=(p,)) for p in pools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(p.snapshot()) for p in pools] == [1, 1, 1, 1]


@on_gpus
def test_events_name_the_pool():
    torch.cuda.memory._record_memory_history()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.ones(64, device=0)
    del x
    y = torch.ones(64, device=0)
    torch.cuda.memory_snapshot(pool.id)
    (events, _), names = torch.cuda.memory._snapshot()["device_traces"], pool.id
    torch.cuda.memory._record_memory_history(None)
    assert [(e["action"], e["pool_id"]) for e in events] == [
        ("segment_alloc", names), ("alloc", names),
        ("free_requested", names), ("free_completed", names),
        ("segment_alloc", (0, 0)), ("alloc", (0, 0)), ("snapshot", names),
    ]  # fmt: skip
    del y


@on_gpus
def test_handles_are_those_of_pools_that_programs_ask_for():
    first, second = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
    assert first[0] == second[0] == 0 and second[1] == first[1] + 1
    assert torch._C._MemPool(None, False).id[1] == 0


@on_gpus
@pytest.mark.parametrize("refused", [
    {"allocator": object()}, {"use_on_oom": True}, {"no_split": True},
])  # fmt: skip
def test_what_pools_do_not_have_is_refused(refused):
    (name,) = refused
    with pytest.raises(simgpu.NotSimulated, match=rf"MemPool\({name}=...\)"):
        torch.cuda.MemPool(**refused)
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        assert torch.ones(2, device=0).sum().item() == 2
