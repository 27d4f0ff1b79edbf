"""Bytes on simulated GPUs: counted, capped, and given back."""

import gc
import itertools
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import simgpu
from simgpu._device.cards import MIB

pytestmark = pytest.mark.simulated_gpus(2, memory="64MB")


def live(device: int = 1) -> int:
    """Bytes in use."""
    return torch.cuda.memory_allocated(device)


def test_blocks_are_multiples_of_512_bytes_and_shared_by_views():
    x = torch.zeros(100, device=1)
    views = [x[10:], x.view(10, 10).T, x.detach(), x.data, x.add_(1)]
    assert live() == 512 and live(0) == 0
    del x
    assert live() == 512  # a view keeps it
    views.clear()
    assert live() == 0 and torch.cuda.max_memory_allocated(1) == 512


def test_a_storage_that_is_resized_is_counted():
    x = torch.zeros(128, device=1)
    x.resize_(1024)
    assert live() == 4096
    for nbytes in (0, 4 * MIB):
        x.untyped_storage().resize_(nbytes)
        assert live() == nbytes
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


@pytest.mark.parametrize("drop", [nn.functional.dropout, nn.Dropout(), torch.dropout])
def test_dropout_is_one_kernel_that_keeps_a_mask_of_booleans(drop):
    x = torch.ones(512, 1024, device="cuda:1", requires_grad=True)
    before = live()
    arguments = (x, 0.5, True) if drop is torch.dropout else (x,)
    with simgpu.timeline().recording() as events:
        out = drop(*arguments)
    assert [event.name for event in events] == ["native_dropout"]
    assert live() - before == 5 * 512 * 1024  # 4 bytes of the result, 1 of the mask
    out.sum().backward()
    assert torch.equal(x.grad, out)
    assert 0.4 < (out > 0).float().mean().item() < 0.6


def step_of(layer) -> tuple[int, int]:
    """Bytes of a 1 MiB input that a layer keeps, and more at the peak of backward."""
    x = torch.ones(256, 1024, device="cuda", requires_grad=True)
    gradient = torch.ones_like(x)
    before = torch.cuda.memory_allocated()
    out = layer(x)
    kept = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    out.backward(gradient)
    return kept, torch.cuda.max_memory_allocated() - before - kept


@pytest.mark.parametrize(
    "layer", [F.gelu, F.silu, F.mish, F.logsigmoid, nn.ReLU(), nn.Softplus()]
)
def test_an_activation_is_one_kernel_forward_and_one_backward(layer):
    assert step_of(layer) == (MIB, MIB)


def test_layer_norm_keeps_two_numbers_of_float32_for_each_row():
    norm = nn.LayerNorm(1024, device="cuda", dtype=torch.bfloat16)
    x = torch.ones(256, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    before = torch.cuda.memory_allocated()
    out = norm(x)
    assert torch.cuda.memory_allocated() - before == MIB // 2 + 2 * 256 * 4
    assert out.dtype is torch.bfloat16


@pytest.mark.parametrize("weight", [True, False])
def test_rms_norm_keeps_a_number_for_each_row(weight):
    norm = nn.RMSNorm(1024, elementwise_affine=weight, device="cuda")
    assert step_of(norm) == (MIB + 256 * 4, MIB + 4096 * weight)  # and its gradient
    simgpu.stop()
    assert "Fused" not in str(norm(torch.ones(1, 1024, requires_grad=True)).grad_fn)
    simgpu.start(1)


@pytest.mark.parametrize("fill", FULL)
def test_a_full_gpu_raises_and_leaks_nothing(fill):
    x = torch.ones(1024, 6144, device=1)  # 24 of the 64 MiB
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fill(x)
    assert "CUDA out of memory. Tried to allocate" in str(caught.value)
    assert "GPU 1 has a total capacity of 64.00 MiB" in str(caught.value)
    del caught
    gc.collect()  # the error was in a cycle with the frames it went through
    x.requires_grad_(False).grad = None
    assert live() == 24 * MIB
    x.mul_(2)  # and the GPU goes on
    del x
    assert live() == 0


def test_training_gives_everything_back():
    layer = nn.Linear(64, 64).to(1)
    optimizer = torch.optim.Adam(layer.parameters())
    for _ in range(3):
        layer(torch.ones(8, 64, device=1)).relu().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    # weights and two moments, of 64 x 64 and of 64 (in blocks of 512 bytes)
    assert live() == 3 * (64 * 64 * 4 + 512)
    del layer, optimizer
    gc.collect()  # an optimizer lies in a cycle
    assert live() == 0 and torch.cuda.max_memory_allocated(1) < MIB


def test_sparse_tensors_are_counted_by_their_parts():
    x = torch.eye(128, device=1).to_sparse()
    assert live() == 128 * 2 * 8 + 128 * 4
    del x
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


# -- what torch.cuda says of the allocator ---------------------------------------------


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


@pytest.mark.parametrize("module", [torch.cuda, torch.accelerator])
def test_statistics_count_what_came_and_went(module):
    x, y = torch.zeros(1000, device=1), torch.zeros(MIB, device=1)
    del y
    assert module.memory_allocated(1) == 4096
    assert module.max_memory_allocated(1) == 4096 + 4 * MIB
    assert module.memory_reserved(1) == module.max_memory_reserved(1) == 22 * MIB
    assert module.memory_reserved(0) == 0
    stats = module.memory_stats(1)
    for name, value in {
        "allocation.all.current": 1, "allocation.small_pool.allocated": 1,
        "allocation.large_pool.allocated": 1, "allocation.large_pool.freed": 1,
        "requested_bytes.all.current": 4000, "allocated_bytes.all.current": 4096,
        "allocated_bytes.all.allocated": 4096 + 4 * MIB,
        "reserved_bytes.large_pool.current": 20 * MIB,
        "inactive_split_bytes.all.current": 2 * MIB - 4096, "num_device_alloc": 2,
        "num_ooms": 0,
    }.items():  # fmt: skip
        assert stats[name] == value, name
    assert module.memory_stats(0)["allocation.all.allocated"] == 0
    module.empty_cache()
    assert module.memory_reserved(1) == 2 * MIB
    module.reset_peak_memory_stats(1)
    module.reset_accumulated_memory_stats(1)
    stats = module.memory_stats(1)
    assert stats["allocated_bytes.all.peak"] == 4096
    assert stats["reserved_bytes.all.peak"] == 2 * MIB
    assert stats["allocated_bytes.all.allocated"] == stats["num_device_alloc"] == 0
    del x
    module.empty_cache()
    assert module.memory_reserved(1) == 0


def test_pytorchs_other_functions_answer_too():
    x = torch.zeros(1000, device=1)
    torch.zeros(2000, device=1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(32 * MIB, device=1)
    text = torch.cuda.memory_summary(1)
    assert re.search(r"CUDA OOMs: 1 +\|\s+cudaMalloc retries: 1", text)
    assert re.search(r"\| Allocated memory +\| +4096 B +\| +12288 B", text)
    nested = torch.cuda.memory_stats_as_nested_dict(1)
    assert nested["allocated_bytes"]["all"]["current"] == 4096
    for reset in ("reset_max_memory_allocated", "reset_max_memory_cached"):
        with pytest.warns(FutureWarning):
            getattr(torch.cuda, reset)(1)
    assert torch.cuda.max_memory_allocated(1) == live() == 4096
    with pytest.warns(FutureWarning):
        assert torch.cuda.memory_cached(1) == torch.cuda.memory_reserved(1)
    del x


@pytest.mark.parametrize(
    "module, name",
    [(torch.cuda, "mem_get_info"), (torch.accelerator, "get_memory_info")],
)
def test_free_and_total_memory(module, name):
    ask = getattr(module, name)
    assert ask(1) == (64 * MIB, 64 * MIB)
    x = torch.zeros(1, device=1)
    assert ask(1) == (62 * MIB, 64 * MIB) and ask(0) == (64 * MIB, 64 * MIB)
    del x
    assert ask(1) == (62 * MIB, 64 * MIB)  # the cache still has it
    torch.cuda.empty_cache()
    assert ask(1) == (64 * MIB, 64 * MIB)


def test_a_process_may_limit_itself():
    fraction = torch.cuda.get_per_process_memory_fraction
    limit = torch.cuda.set_per_process_memory_fraction
    assert fraction(1) == 1.0
    limit(0.25, 1)
    assert fraction(1) == 0.25
    x = torch.zeros(3 * MIB, device=1)  # 12 of the 16 MiB
    with pytest.raises(torch.OutOfMemoryError, match="16.00 MiB allowed; Of the alloc"):
        torch.zeros(3 * MIB, device=1)
    torch.zeros(12 * MIB, device=0)  # the other GPU is not limited
    del x
    torch.zeros(4 * MIB, device=1)
    with pytest.raises(TypeError):
        limit(1, 1)
    for wrong in (-0.1, 1.1):
        with pytest.raises(ValueError, match="Allowed range: 0~1"):
            limit(wrong, 1)
    limit(1.0, 1)
    torch.zeros(10 * MIB, device=1)
    limit(0.1, 1)
    y = torch.zeros(7 * MIB, device=1)  # what is cached may be used still
    assert fraction(1) == pytest.approx(0.1, rel=0.01)
    del y


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


def take(settings: str) -> None:
    torch._C._accelerator_setAllocatorSettings(settings)


@pytest.mark.filterwarnings("ignore:torch.cuda._set_allocator_settings is deprecated")
@pytest.mark.parametrize(
    "settings",
    ["", "expandable_segments:False", "garbage_collection_threshold:0.8",
     "backend:native, pinned_num_register_threads:8",
     "release_lock_on_cudamalloc:True,pinned_use_background_threads:True"],
)  # fmt: skip
def test_settings_that_change_nothing_here_are_accepted(settings):
    torch.cuda.memory._set_allocator_settings(settings)


def test_settings_that_would_change_the_allocator_are_refused_by_name():
    for name, value in {"pinned_reserve_segment_size_mb": 64,
                        "backend": "cudaMallocAsync"}.items():  # fmt: skip
        words = value if name == "backend" else name
        with pytest.raises(simgpu.NotSimulated, match=words):
            take(f"{name}:{value}")
    by_age = "garbage_collection_threshold:0.8"
    take(by_age)  # which has no effect on a whole card
    with pytest.raises(simgpu.NotSimulated, match="garbage_collection_threshold"):
        torch.cuda.set_per_process_memory_fraction(0.5)
    take("")
    torch.cuda.set_per_process_memory_fraction(0.5)
    with pytest.raises(simgpu.NotSimulated, match="garbage_collection_threshold"):
        take(by_age)


@pytest.mark.parametrize(
    "settings, nbytes, block",
    [("4", 84 * MIB, 96 * MIB), ("4", 96 * MIB, 96 * MIB), ("4", 3000, 3072),
     ("4", 1000, 1024), ("[64:8,128:2,>:1]", 84 * MIB, 88 * MIB),
     ("[64:8,128:2,256:1,>:1]", 150 * MIB, 192 * MIB),
     ("[64:8,128:2,>:1]", 150 * MIB, 150 * MIB),  # ">" begins with the last one named
     ("[64:8,128:2,>:1]", 3 * MIB, 3 * MIB),
     ("[1:4,2:0]", 5 * MIB + 512, 5 * MIB + 512)],
)  # fmt: skip
def test_sizes_are_rounded_to_divisions_of_powers_of_two(settings, nbytes, block):
    simgpu.stop()
    simgpu.start(1, memory="1GB")
    take(f"roundup_power2_divisions:{settings}")
    x = torch.UntypedStorage(nbytes, device="cuda")
    assert torch.cuda.memory_allocated() == block
    stats = torch.cuda.memory_stats()
    assert stats["requested_bytes.all.current"] == x.nbytes()


def test_large_blocks_are_not_cut_where_the_program_says_so():
    simgpu.stop()
    simgpu.start(1, memory="256MB")
    take("max_split_size_mb:40")
    torch.UntypedStorage(100 * MIB, device="cuda")  # and gone: cached
    x = torch.UntypedStorage(30 * MIB, device="cuda")  # must not take its place
    assert torch.cuda.memory_reserved() == 130 * MIB
    y = torch.UntypedStorage(90 * MIB, device="cuda")  # may: 20 MiB at most are lost
    assert torch.cuda.memory_reserved() == 130 * MIB
    assert torch.cuda.memory_allocated() == 130 * MIB
    stats = torch.cuda.memory_stats()
    assert stats["oversize_allocations.current"] == stats["max_split_size"] // 40 // MIB
    del x, y


def test_large_blocks_go_first_where_room_is_needed():
    simgpu.stop()
    simgpu.start(1, memory="256MB")
    take("max_split_size_mb:40")
    sizes = [60, 50, 30, 30]
    for x in [torch.UntypedStorage(n * MIB, device="cuda") for n in sizes]:
        del x
    assert torch.cuda.memory_reserved() == sum(sizes) * MIB
    x = torch.UntypedStorage(140 * MIB, device="cuda")
    # 60 and 50 are not enough for 140, so that all is given back
    assert torch.cuda.memory_reserved() == 140 * MIB == x.nbytes()
    y = torch.UntypedStorage(100 * MIB, device="cuda")
    del y
    z = torch.UntypedStorage(35 * MIB, device="cuda")
    assert torch.cuda.memory_reserved() == (140 + 36) * MIB and z.nbytes()
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 1  # the first time only


@pytest.mark.parametrize(
    "settings",
    ["foo:1", "garbage_collection_threshold:1.2", "max_split_size_mb:2", "backend:x",
     "expandable_segments:maybe", "pinned_num_register_threads:none", "nonsense",
     "pinned_num_register_threads:1024", "per_process_memory_fraction:2"],
)  # fmt: skip
def test_settings_that_pytorch_does_not_take(settings):
    with pytest.raises(ValueError):
        take(settings)


def test_the_environment_sets_the_allocator(monkeypatch):
    simgpu.stop()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:0.5")
    simgpu.start(2, memory="64MB")
    assert torch.cuda.get_per_process_memory_fraction(1) == 0.5
    simgpu.stop()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")  # it counts
    with pytest.raises(simgpu.NotSimulated, match="cudaMallocAsync"):
        simgpu.start(2, memory="64MB")
    assert simgpu.count() == 0


def test_new_gpus_know_nothing_of_those_before():
    torch.cuda.set_per_process_memory_fraction(0.5, 1)
    torch.cuda.memory._record_memory_history()
    torch.zeros(1000, device=1)
    simgpu.stop()
    if torch.cuda.device_count() == 0:
        assert torch.cuda.memory_stats() == {} and torch.cuda.memory_allocated() == 0
    simgpu.start(2, memory="64MB")
    assert torch.cuda.get_per_process_memory_fraction(1) == 1.0
    assert live() == torch.cuda.max_memory_reserved(1) == 0
    assert torch.cuda.memory._snapshot()["device_traces"] == [[], []]


# -- streams ---------------------------------------------------------------------------


def test_a_side_stream_has_a_cache_of_its_own():
    side = torch.cuda.Stream(1)
    x = torch.zeros(1000, device=1)
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
    assert live() == 0


def test_without_record_stream_memory_is_used_again_at_once():
    x = torch.ones(4 * MIB, device=1)
    address = x.data_ptr()
    x.record_stream(torch.cuda.current_stream(1))  # its own: nothing to wait for
    del x
    assert torch.empty(4 * MIB, device=1).data_ptr() == address


@pytest.mark.parametrize(
    "stream",
    ["torch.cuda.default_stream(0)", "torch.cuda.Stream(0)", "torch.cuda.Stream(1)"],
)
def test_a_block_waits_for_every_stream_that_was_recorded(stream):
    """Also for those of a neighbour, which can read its memory."""
    x = torch.zeros(MIB, device=1)
    address = x.data_ptr()
    slow, quick = eval(stream, globals()), torch.cuda.Stream(1)
    with torch.cuda.stream(slow):
        large = torch.ones(8 * MIB, device=slow.device)  # it is busy for long
    x.record_stream(slow)
    x.record_stream(quick)
    del x
    quick.synchronize()
    stats = torch.cuda.memory_stats(1)
    waiting = stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]
    assert waiting == 4 * MIB and torch.empty(MIB, device=1).data_ptr() != address
    slow.synchronize()
    assert torch.empty(MIB, device=1).data_ptr() == address
    del large
