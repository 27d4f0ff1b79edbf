"""Bytes on simulated GPUs: counted, capped, and given back."""

import gc
import itertools
import re
import threading

import pytest
import torch
from torch import nn

from helpers import simgpu
from helpers.simgpu.cards import MIB


@pytest.fixture(autouse=True)
def gpus():
    simgpu.start(2, memory="64MB")
    yield
    simgpu.stop()


def live(device: int = 1) -> int:
    gc.collect()
    return torch.cuda.memory_allocated(device)


def test_blocks_are_multiples_of_512_bytes_and_shared_by_views():
    x = torch.zeros(100, device=1)
    views = [x[10:], x.view(10, 10).T, x.detach(), x.data, x.add_(1)]
    assert live() == 512 and live(0) == 0
    del x
    assert live() == 512  # a view keeps it
    views.clear()
    assert live() == 0 and torch.cuda.max_memory_allocated(1) == 512


def test_resizing_and_moving():
    x = torch.zeros(128, device=1)
    x.resize_(1024)
    assert live() == 4096
    x.untyped_storage().resize_(0)
    torch.zeros(1, device=1)
    y = x.new_ones(128).to(0)
    assert live(0) == 512
    del x, y
    assert live() == live(0) == 0


FULL = [
    lambda x: torch.zeros(32 * MIB, device=1),
    lambda x: x.repeat(4, 1),
    lambda x: torch.cat([x] * 4),
    lambda x: torch.zeros(12 * MIB).to(1) + x.view(-1)[0],
    lambda x: [x + i for i in range(5)],
    lambda x: torch.sort(x),
    lambda x: (x.requires_grad_() * 2).exp().sum().backward(),
]


@pytest.mark.parametrize("fill", FULL)
def test_a_full_gpu_raises_and_leaks_nothing(fill):
    x = torch.ones(1024, 6144, device=1)  # 24 of the 64 MiB
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fill(x)
    assert "CUDA out of memory. Tried to allocate" in str(caught.value)
    assert "GPU 1 has a total capacity of 64.00 MiB" in str(caught.value)
    del caught
    x.requires_grad_(False).grad = None
    assert live() == 24 * MIB
    x.mul_(2)  # and the GPU goes on
    del x
    assert live() == 0


def test_training_gives_everything_back():
    def step():
        layer = nn.Linear(64, 64).to(1)
        optimizer = torch.optim.Adam(layer.parameters())
        layer(torch.ones(8, 64, device=1)).relu().sum().backward()
        optimizer.step()
        assert live() >= 4 * 64 * 64 * 4  # weights, gradients, two moments

    step()
    assert live() == 0
    assert torch.cuda.max_memory_allocated(1) < MIB
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_allocated(1) == 0


def test_sparse_tensors_are_counted_by_their_parts():
    x = torch.eye(128, device=1).to_sparse()
    assert live() == 128 * 2 * 8 + 128 * 4
    del x
    assert live() == 0


def in_threads(work, count: int = 8) -> list:
    results: list = [None] * count

    def run(i):
        results[i] = work(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_threads_count_together():
    def work(i):
        for _ in range(50):
            x = torch.ones(1000, device=i % 2)
            x = (x * 2).sum()
        return x.item()

    assert in_threads(work) == [2000.0] * 8
    assert live() == live(0) == 0


def test_threads_do_not_disturb_each_others_random_numbers():
    torch.manual_seed(0)
    wanted = [torch.rand(200, 10, device=i).cpu() for i in range(2)]
    host = torch.rand(3)
    torch.manual_seed(0)
    found = in_threads(
        lambda i: torch.stack([torch.rand(10, device=i) for _ in range(200)]).cpu(), 2
    )
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(torch.rand(3), host)


# -- what the allocator says of itself -------------------------------------------------


def test_reserved_memory_comes_in_segments_and_stays_until_the_cache_is_emptied():
    small, large = torch.zeros(1, device=1), torch.zeros(3 * MIB, device=1)
    assert live() == 512 + 12 * MIB
    assert torch.cuda.memory_reserved(1) == 2 * MIB + 12 * MIB
    assert torch.cuda.memory_reserved(0) == 0
    del large
    assert torch.cuda.memory_reserved(1) == 14 * MIB and live() == 512
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(1) == 2 * MIB
    del small
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(1) == live() == 0
    assert torch.cuda.max_memory_reserved(1) == 14 * MIB
    assert torch.cuda.max_memory_allocated(1) == 512 + 12 * MIB


def documented(docstring: str) -> set[str]:
    """The keys that a docstring of PyTorch promises: {a,b} stands for either."""
    keys = set()
    for text in re.findall(r'``"([^"]+)"``:', docstring):
        parts = re.split(r"\{([^}]*)\}", text)
        choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
        keys |= {"".join(chosen) for chosen in itertools.product(*choices)}
    keys.discard("reserved_bytes_by_private_pools")  # no pools, no keys
    return {re.sub(r"^allocated\.", "allocation.", key) for key in keys}  # as it is


@pytest.mark.parametrize("module", [torch.cuda, torch.accelerator])
def test_every_documented_statistic_is_there(module):
    torch.zeros(1, device=1)
    stats = module.memory_stats(1)
    keys = documented(module.memory_stats.__doc__)
    assert len(keys) > 100 or module is torch.accelerator
    assert keys <= set(stats)
    assert all(isinstance(value, int) for value in stats.values())
    assert list(stats) == sorted(stats)


def test_statistics_count_what_came_and_went():
    x, y = torch.zeros(1000, device=1), torch.zeros(MIB, device=1)
    del y
    gc.collect()
    stats = torch.cuda.memory_stats(1)
    assert stats["allocation.all.current"] == 1
    assert stats["allocation.small_pool.allocated"] == 1
    assert stats["allocation.large_pool.allocated"] == 1
    assert stats["allocation.large_pool.freed"] == 1
    assert stats["requested_bytes.all.current"] == 4000
    assert stats["allocated_bytes.all.current"] == 4096
    assert stats["allocated_bytes.all.allocated"] == 4096 + 4 * MIB
    assert stats["reserved_bytes.large_pool.current"] == 20 * MIB
    assert stats["inactive_split_bytes.all.current"] == 2 * MIB - 4096
    assert stats["num_device_alloc"] == 2 and stats["num_ooms"] == 0
    nested = torch.cuda.memory_stats_as_nested_dict(1)
    assert nested["allocated_bytes"]["all"]["current"] == 4096
    del x
    assert torch.cuda.memory_stats(0)["allocation.all.allocated"] == 0


def test_a_summary_is_printed_by_pytorch_itself():
    x = torch.zeros(1000, device=1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(32 * MIB, device=1)
    text = torch.cuda.memory_summary(1)
    assert "PyTorch CUDA memory summary, device ID 1" in text
    assert re.search(r"CUDA OOMs: 1 +\|\s+cudaMalloc retries: 1", text)
    assert re.search(r"\| Allocated memory +\| +4096 B +\| +4096 B", text)
    assert re.search(r"\| GPU reserved memory +\| +2048 KiB", text)
    assert len(torch.cuda.memory_summary(1, abbreviated=True)) < len(text)
    del x


@pytest.mark.parametrize("ask", [torch.cuda.mem_get_info, None])
def test_free_and_total_memory(ask):
    ask = ask and torch.cuda.mem_get_info or torch.accelerator.get_memory_info
    assert ask(1) == (64 * MIB, 64 * MIB)
    x = torch.zeros(1, device=1)
    assert ask(1) == (62 * MIB, 64 * MIB) and ask(0) == (64 * MIB, 64 * MIB)
    del x
    gc.collect()
    assert ask(1) == (62 * MIB, 64 * MIB)  # the cache still has it
    torch.cuda.empty_cache()
    assert ask(1) == (64 * MIB, 64 * MIB)


def test_a_process_may_limit_itself():
    assert torch.cuda.get_per_process_memory_fraction(1) == 1.0
    torch.cuda.set_per_process_memory_fraction(0.25, 1)
    assert torch.cuda.get_per_process_memory_fraction(1) == 0.25
    x = torch.zeros(3 * MIB, device=1)  # 12 of the 16 MiB
    with pytest.raises(torch.OutOfMemoryError, match="16.00 MiB allowed; Of the alloc"):
        torch.zeros(3 * MIB, device=1)
    torch.zeros(12 * MIB, device=0)  # the other GPU is not limited
    del x
    torch.zeros(4 * MIB, device=1)
    with pytest.raises(TypeError):
        torch.cuda.set_per_process_memory_fraction(1, 1)
    for fraction in (-0.1, 1.1):
        with pytest.raises(ValueError, match="Allowed range: 0~1"):
            torch.cuda.set_per_process_memory_fraction(fraction, 1)
    torch.cuda.set_per_process_memory_fraction(1.0, 1)
    torch.zeros(12 * MIB, device=1)


def test_peaks_and_sums_start_again():
    x = torch.zeros(1000, device=1)
    torch.zeros(2000, device=1)
    assert torch.cuda.max_memory_allocated(1) == 4096 + 8192
    torch.cuda.reset_peak_memory_stats(1)
    torch.cuda.reset_accumulated_memory_stats(1)
    stats = torch.cuda.memory_stats(1)
    assert stats["allocated_bytes.all.peak"] == 4096
    assert stats["allocated_bytes.all.allocated"] == 0
    assert stats["num_device_alloc"] == 0
    torch.zeros(2000, device=1)
    for reset in ("reset_max_memory_allocated", "reset_max_memory_cached"):
        with pytest.warns(FutureWarning):
            getattr(torch.cuda, reset)(1)
    assert torch.cuda.max_memory_allocated(1) == live() == 4096
    with pytest.warns(FutureWarning):
        assert torch.cuda.memory_cached(1) == torch.cuda.memory_reserved(1)
    del x


def test_the_accelerator_says_the_same():
    x = torch.zeros(1000, device=1)
    torch.zeros(MIB, device=1)
    gc.collect()
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved",
                 "max_memory_reserved"):  # fmt: skip
        asked = getattr(torch.accelerator, name)(1)
        assert asked == getattr(torch.cuda, name)(1) > 0, name
    a, b = torch.accelerator.memory_stats(1), torch.cuda.memory_stats(1)
    assert a == {key: b[key] for key in a}
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved(1) == 2 * MIB
    torch.accelerator.reset_peak_memory_stats(1)
    assert torch.accelerator.max_memory_reserved(1) == 2 * MIB
    torch.accelerator.reset_accumulated_memory_stats(1)
    assert torch.accelerator.memory_stats(1)["segment.all.allocated"] == 0
    del x


def test_the_current_gpu_is_meant_where_none_is_named():
    x = torch.zeros(1000, device=1)
    assert torch.cuda.memory_allocated() == 0
    with torch.cuda.device(1):
        assert torch.cuda.memory_allocated() == 4096
        assert torch.accelerator.memory_allocated() == 4096
    assert torch.cuda.memory_allocated("cuda:1") == 4096
    assert torch.cuda.memory_allocated(x.device) == 4096
    with pytest.raises(RuntimeError, match="Invalid device argument"):
        torch.cuda.memory_allocated(2)


def test_a_side_stream_has_a_cache_of_its_own():
    side = torch.cuda.Stream(1)
    x = torch.zeros(1000, device=1)
    address = x.data_ptr()
    with torch.cuda.stream(side):
        y = torch.empty(1000, device=1)
        assert torch.cuda.memory_reserved(1) == 4 * MIB
    del x
    with torch.cuda.stream(side):
        z = torch.empty(500_000, device=1)  # 2 MiB: of the large pool
        w = torch.empty(1000, device=1)
    assert torch.cuda.memory_reserved(1) == 24 * MIB
    streams = {part["stream"] for part in torch.cuda.memory_snapshot()}
    assert streams == {0, side.cuda_stream}
    del y, z, w
    assert live() == 0 and address


def waiting_bytes() -> int:
    stats = torch.cuda.memory_stats(1)
    return stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]


def test_a_tensor_that_a_side_stream_uses_is_kept_until_that_is_done():
    side = torch.cuda.Stream(1)
    x = torch.ones(4 * MIB, device=1)
    side.wait_stream(torch.cuda.current_stream(1))
    with torch.cuda.stream(side):
        for _ in range(50):
            y = x * 2
    x.record_stream(side)
    del x
    assert live() == 16 * MIB and waiting_bytes() == 16 * MIB
    other = torch.empty(4 * MIB, device=1)  # side is at work: a new segment
    assert torch.cuda.memory_reserved(1) == 64 * MIB
    del other
    side.synchronize()
    a = torch.empty(4 * MIB, device=1)
    b = torch.empty(4 * MIB, device=1)
    assert torch.cuda.memory_reserved(1) == 64 * MIB and waiting_bytes() == 0
    del a, b, y
    assert live() == 0


def test_without_record_stream_memory_is_used_again_at_once():
    x = torch.ones(4 * MIB, device=1)
    reserved = torch.cuda.memory_reserved(1)
    x.record_stream(torch.cuda.current_stream(1))  # its own: nothing to wait for
    del x
    y = torch.empty(4 * MIB, device=1)
    assert torch.cuda.memory_reserved(1) == reserved and waiting_bytes() == 0
    del y


def test_all_is_as_before_after_the_simulator_stops():
    simgpu.stop()
    modules = (torch.cuda, torch.cuda.memory, torch.accelerator,
               torch.accelerator.memory, torch._C)  # fmt: skip

    def entries():
        return [
            (module, name, value)
            for module in modules
            for name, value in vars(module).items()
            if "mem" in name.lower() or "cache" in name.lower() or "_accel" in name
        ]

    before, record_stream = entries(), torch.Tensor.record_stream
    simgpu.start(2, memory="64MB")
    torch.cuda.set_per_process_memory_fraction(0.5, 1)
    torch.zeros(1000, device=1)
    assert torch.Tensor.record_stream is not record_stream
    simgpu.stop()
    after = entries()
    assert [e[:2] for e in after] == [e[:2] for e in before]
    assert all(a[2] is b[2] for a, b in zip(before, after, strict=True))
    assert torch.Tensor.record_stream is record_stream
    if torch.cuda.device_count() == 0:
        assert torch.cuda.memory_stats() == {} and torch.cuda.memory_allocated() == 0
    simgpu.start(2, memory="64MB")
    assert torch.cuda.get_per_process_memory_fraction(1) == 1.0
    assert live() == torch.cuda.max_memory_reserved(1) == 0


# -- what a reader of the code found ---------------------------------------------------


def test_a_lower_limit_leaves_what_is_cached():
    x = torch.empty(40 * MIB, dtype=torch.uint8, device=1)
    del x
    torch.cuda.set_per_process_memory_fraction(0.1, 1)
    y = torch.empty(30 * MIB, dtype=torch.uint8, device=1)
    assert torch.cuda.get_per_process_memory_fraction(1) == pytest.approx(0.1, rel=0.01)
    del y
    assert live() == 0


FITS = [
    lambda: torch.empty_strided((10**6, 10**6), (0, 0), device=1),
    lambda: torch.full((30 * MIB,), True, device=1),
    lambda: torch.zeros(10**5, 10**5, layout=torch.sparse_coo, device=1),
]


@pytest.mark.parametrize("make", FITS)
def test_large_shapes_that_need_little_memory_fit(make):
    make()
    assert live() == 0


def test_a_storage_that_is_resized_is_counted():
    x = torch.ones(MIB, device=1)
    x.untyped_storage().resize_(0)
    assert live() == 0
    x.untyped_storage().resize_(4 * MIB)
    assert live() == 4 * MIB
    del x
    assert live() == 0


def test_settings_of_the_allocator_are_refused():
    with pytest.raises(simgpu.NotSimulated, match="allocator's settings"):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    with pytest.raises(simgpu.NotSimulated, match="_set_memory_metadata"):
        torch.cuda.memory._set_memory_metadata("x")
