"""What torch.cuda and its neighbours answer, as PyTorch's own tests ask for it."""

import ctypes
import importlib.util
import os
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.cuda import comm
from torch.overrides import TorchFunctionMode

import simgpu
from simgpu._device.cards import MIB

pytestmark = pytest.mark.simulated_gpus(4, memory="256MB")

MS = 1.41e6  # cycles of an A100 in a millisecond

# -- C++'s functions -------------------------------------------------------------------


def test_sleep_takes_cycles_of_the_cards_clock_and_holds_up_no_other_gpu():
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(1):
        start.record()
        torch.cuda._sleep(int(50 * MS))
        end.record()
        assert not torch.cuda.current_stream().query()  # the host has not waited
    assert torch.cuda.current_stream(0).query()
    end.synchronize()
    assert torch.cuda.current_stream(1).query()
    assert start.elapsed_time(end) == pytest.approx(50, rel=1e-3)


def test_cpp_knows_the_current_gpu_and_stream():
    side = torch.cuda.Stream(1)
    torch._C._cuda_setDevice(2)
    assert torch._C._cuda_getDevice() == 2 == torch.cuda.current_device()
    assert torch._C._cuda_exchangeDevice(1) == 2
    assert torch._C._cuda_getDeviceCount() == 4
    torch._C._cuda_setStream(
        stream_id=side.stream_id, device_index=1, device_type=side.device_type
    )
    assert torch.cuda.current_stream() == side
    assert torch._C._cuda_getCurrentRawStream(1) == side.cuda_stream
    assert torch._C._cuda_getCurrentStream(1) == (side.stream_id, 1, 1)
    assert torch._C._cuda_getDefaultStream(1) == (0, 1, 1)
    assert torch._C._cuda_getCurrentRawStream(0) == 0
    torch._C._cuda_synchronize()


def test_a_gpu_has_a_context_once_it_is_used():
    assert not any(map(torch._C._cuda_hasPrimaryContext, range(4)))
    x = torch.ones(1, device=1)
    str(x), x.cpu(), torch.ones(1).pin_memory()
    assert [*map(torch._C._cuda_hasPrimaryContext, range(3))] == [False, True, False]
    with pytest.raises(RuntimeError, match="valid device index"):
        torch._C._cuda_hasPrimaryContext(9)


def test_each_gpu_has_handles_of_its_own():
    ask = torch.cuda.current_blas_handle
    with torch.cuda.device(1):
        other = ask()
    assert ask() == ask() != other
    if hasattr(torch.cuda, "current_solver_handle"):  # not in 2.11
        assert ask() != torch.cuda.current_solver_handle()
    torch._C._cuda_clearCublasWorkspaces()


@pytest.mark.parametrize(
    "wait",
    [lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: x.nonzero(),
     lambda x: x[x > 0], lambda x: torch.ones(3).to(0)],
)  # fmt: skip
def test_waits_of_the_host_are_reported_when_asked_for(wait):
    x = torch.ones(3, device=0)
    torch.cuda.set_sync_debug_mode("error")
    assert torch.cuda.get_sync_debug_mode() == 2
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        wait(x)
    torch.cuda.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
        wait(x)
    torch.cuda.set_sync_debug_mode(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wait(x)


def test_work_without_waits_is_not_reported():
    x, pinned = torch.ones(3, device=0), torch.ones(3).pin_memory()
    torch.cuda.set_sync_debug_mode("error")
    (x + 1).to(1)
    pinned.to(0, non_blocking=True)
    with pytest.raises(RuntimeError, match="expected one of `default`, `warn`, `erro"):
        torch.cuda.set_sync_debug_mode("loud")


# -- CUDA's runtime --------------------------------------------------------------------


def test_memory_can_be_pinned_where_it_is():
    x = torch.ones(20)
    rt = torch.cuda.cudart()
    assert rt.cudaHostRegister(x.data_ptr(), 80, 0) == 0
    assert x.is_pinned() and x[3:].is_pinned() and not torch.ones(20).is_pinned()
    assert rt.cudaHostRegister(x.data_ptr(), 80, 0) != 0
    assert rt.cudaHostUnregister(x.data_ptr()) == 0 and not x.is_pinned()
    assert rt.cudaHostUnregister(x.data_ptr()) != 0


def test_errors_of_the_runtime_have_words():
    torch.cuda.check_error(0)
    with pytest.raises(torch.cuda.CudaError, match=r"out of memory \(2\)"):
        torch.cuda.check_error(2)
    assert torch.cuda.cudart().cudaMemGetInfo(1) == torch.cuda.mem_get_info(1)


def test_the_profiler_can_be_started_and_stopped():
    with torch.cuda.profiler.profile():
        torch.zeros(1, device=0)


def made_stream() -> int:
    """The handle of a stream that `cudaStreamCreate` has made on the current GPU."""
    handle = ctypes.c_uint64(0)
    assert torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle)) == 0
    return handle.value


def test_a_stream_of_the_runtime_is_one_of_pytorchs():
    with torch.cuda.device(1):
        first, second = made_stream(), made_stream()
    assert first != second
    for make in (torch.cuda.ExternalStream, torch.cuda.get_stream_from_external):
        stream = make(first, torch.cuda.device(1))
        assert (stream.cuda_stream, stream.device.index) == (first, 1)
        assert stream.priority == 0
    with torch.cuda.stream(stream):
        x = torch.zeros(4, device=1) + 1
        torch.cuda._sleep(int(MS))
    assert not stream.query()
    torch.cuda.current_stream(1).wait_stream(stream)
    assert x.sum().item() == 4 and stream.query()
    assert torch.cuda.cudart().cudaStreamDestroy(first) == 0


def test_a_handle_finds_the_stream_that_gave_it():
    side = torch.cuda.Stream(2)
    found = torch.cuda.ExternalStream(side.cuda_stream, device=2)
    assert found == side and found.__cuda_stream__() == (0, side.cuda_stream)
    assert torch.cuda.ExternalStream(0) == torch.cuda.default_stream()


# -- memory ----------------------------------------------------------------------------


def test_memory_that_is_asked_for_by_hand_is_counted():
    address = torch.cuda.caching_allocator_alloc(1000, 1)
    assert torch.cuda.memory_allocated(1) == 1024 and address
    torch.cuda.caching_allocator_delete(address)
    assert torch.cuda.memory_allocated(1) == 0
    with pytest.raises(RuntimeError, match="invalid device pointer"):
        torch.cuda.caching_allocator_delete(address)


def test_the_fraction_that_was_set_is_the_one_that_is_told():
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    for fraction in (0.0, 0.3, 1.0):
        torch.cuda.set_per_process_memory_fraction(fraction)
        assert torch.cuda.get_per_process_memory_fraction() == fraction


def pinned(name: str) -> int:
    return torch.cuda.host_memory_stats()[name]


def test_pinned_memory_is_counted_in_powers_of_two():
    torch.zeros(1, device=0)
    x = torch.ones(10 * 1024, pin_memory=True)
    y = torch.ones(20 * 1024).pin_memory()
    assert pinned("allocated_bytes.current") == (64 + 128) * 1024
    assert pinned("active_requests.current") == 2 == pinned("num_host_alloc")
    del x
    assert pinned("active_requests.current") == 1 and pinned("num_host_alloc") == 2
    torch.ones(9 * 1024).pin_memory()  # fits into the first one's block
    assert pinned("num_host_alloc") == 2
    torch._C._host_emptyCache()
    assert pinned("allocated_bytes.current") == 128 * 1024 == pinned("active_bytes.curr"
                                                                     "ent")  # fmt: skip
    assert pinned("allocated_bytes.peak") == (64 + 128) * 1024 and y.is_pinned()
    torch.cuda.reset_peak_host_memory_stats()
    torch.cuda.reset_accumulated_host_memory_stats()
    assert pinned("allocated_bytes.peak") == 128 * 1024 and pinned("num_host_free") == 0


@pytest.mark.parametrize(
    "copy",
    [lambda p, x: x.copy_(p, non_blocking=True),
     lambda p, x: p.to(0, non_blocking=True),
     lambda p, x: p.copy_(x, non_blocking=True)],
)  # fmt: skip
def test_pinned_memory_is_not_used_again_before_its_copy_is_done(copy):
    x, host = torch.ones(1000, device=0), torch.ones(1000).pin_memory()
    torch.cuda._sleep(int(50 * MS))
    copy(host, x)
    del host
    assert pinned("active_requests.current") == 1
    torch.cuda.synchronize()
    assert pinned("active_requests.current") == 0


def test_a_program_hears_that_memory_is_refused():
    heard = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *what: heard.append(what))
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**40, device=1)
    ((gpu, asked, total, free),) = heard
    assert (gpu, asked, total) == (1, 2**42, 256 * MIB) and free <= total
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate more than 1EB"):
        torch.empty(2**60, dtype=torch.int8, device=0)


def test_a_snapshot_keeps_the_programs_words_and_leaves_out_what_it_is_told():
    torch.cuda.memory._set_memory_metadata("step 3")
    torch.cuda.memory._record_memory_history(skip_actions=["free_requested"])
    torch.zeros(4, device=0)
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    assert {event["user_metadata"] for event in events} == {"step 3"}
    actions = {event["action"] for event in events}
    assert "free_completed" in actions and "free_requested" not in actions


@pytest.mark.parametrize("context", ["alloc", "all"])
def test_a_segment_that_goes_shows_who_let_it_go_only_if_all_is_recorded(context):
    torch.cuda.memory._record_memory_history(context=context)
    torch.zeros(4, device=0)
    torch.cuda.empty_cache()
    freed = torch.cuda.memory._snapshot()["device_traces"][0][-1]
    assert freed["action"] == "segment_free"
    names = {frame["name"] for frame in freed["frames"]}
    assert names and ("empty_cache" in names) == (context == "all")


# -- NVML ------------------------------------------------------------------------------


@pytest.fixture
def nvml(tmp_path, monkeypatch):
    """The stand-in for a package that is installed."""
    simgpu.stop()
    (tmp_path / "pynvml.py").write_text("raise ImportError('no library')")
    monkeypatch.syspath_prepend(tmp_path)
    simgpu.start(4, memory="256MB")
    return importlib.import_module("pynvml")


def test_nvml_counts_the_memory_of_this_process(nvml):
    with pytest.raises(nvml.NVMLError_Uninitialized, match="Uninitialized"):
        nvml.nvmlDeviceGetCount()
    nvml.nvmlInit()
    assert nvml.nvmlDeviceGetCount() == 4
    handle = nvml.nvmlDeviceGetHandleByIndex(1)
    x = torch.zeros(30 * MIB, dtype=torch.uint8, device=1)
    info = nvml.nvmlDeviceGetMemoryInfo(handle)
    assert info.used == x.nbytes == info.total - info.free
    assert torch.cuda.device_memory_used(1) == info.used
    (process,) = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    assert (process.pid, process.usedGpuMemory) == (os.getpid(), x.nbytes)
    assert "30.000 MB" in torch.cuda.list_gpu_processes(1)
    assert nvml.nvmlDeviceGetName(handle) == torch.cuda.get_device_name(1)
    nvml.nvmlShutdown()


def test_nvml_sees_gpus_that_are_hidden(nvml, monkeypatch):
    simgpu.stop()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    simgpu.start(3, memory="64MB", honour_visible=True)
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    torch.zeros(MIB, device=0)
    assert torch.cuda.device_count() == 2 and nvml.nvmlDeviceGetCount() == 3
    handles = map(nvml.nvmlDeviceGetHandleByIndex, range(3))
    used = [nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles]
    assert used[:2] == [0, 0] and used[2] == torch.cuda.device_memory_used(0) > 0
    with pytest.raises(nvml.NVMLError, match="Invalid Argument"):
        nvml.nvmlDeviceGetHandleByIndex(3)


def test_utilization_is_the_share_of_time_in_which_kernels_ran(nvml):
    assert torch.cuda.utilization(1) == 0
    simgpu.host_busy(0.75)
    with torch.cuda.device(1):
        torch.cuda._sleep(int(250 * MS))
        torch.cuda.synchronize()
    assert torch.cuda.utilization(1) == 25 and torch.cuda.utilization(0) == 0
    assert torch.cuda.clock_rate(1) == 1410


def test_nvml_says_what_a_card_cannot_tell(nvml):
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    for name in ("PowerUsage", "TotalEnergyConsumption", "Temperature", "EccMode",
                 "FanSpeed"):  # fmt: skip
        with pytest.raises(nvml.NVMLError_NotSupported, match="^Not Supported$"):
            getattr(nvml, f"nvmlDeviceGet{name}")(handle)
    for ask in (torch.cuda.power_draw, torch.cuda.temperature):
        with pytest.raises(nvml.NVMLError, match="Not Supported"):
            ask()
    assert not hasattr(nvml, "NVML_NONSENSE")
    assert isinstance(nvml.NVMLError(2), nvml.NVMLError_InvalidArgument)


@pytest.mark.skipif(
    importlib.util.find_spec("pynvml") is not None, reason="the package is here"
)
def test_without_its_package_there_is_no_nvml():
    with pytest.raises(ModuleNotFoundError, match="pynvml"):
        importlib.import_module("pynvml")
    assert torch.cuda.utilization() == 0 and torch.cuda.clock_rate() > 0
    torch.zeros(1, device="cuda")
    assert f"{os.getpid()} uses" in torch.cuda.list_gpu_processes()
    assert "pynvml" not in sys.modules


def test_nvml_goes_with_the_gpus(nvml):
    assert importlib.util.find_spec("pynvml") is not None
    ours = sys.modules["pynvml"]
    simgpu.stop()
    assert sys.modules.get("pynvml") is not ours
    assert getattr(torch.cuda, "pynvml", None) is not ours


# -- flags -----------------------------------------------------------------------------


def test_cudnn_has_a_version_and_takes_what_it_would_take():
    cudnn = torch.backends.cudnn
    assert cudnn.version() >= 90000 and cudnn.is_available()
    assert cudnn.is_acceptable(torch.ones(1, device=0))
    assert not cudnn.is_acceptable(torch.ones(1))
    lstm = nn.LSTM(3, 4).cuda()
    lstm.flatten_parameters()
    assert lstm(torch.ones(5, 2, 3, device=0))[0].is_cuda
    with cudnn.flags(enabled=True, benchmark_limit=7):
        assert cudnn.benchmark_limit == 7
    assert cudnn.benchmark_limit == 10
    simgpu.stop()
    built = torch.backends.cuda.is_built()
    assert built or (cudnn.version() is None and not cudnn.is_available())


def test_the_library_for_matrix_products_can_be_chosen():
    choose, names = torch.backends.cuda.preferred_blas_library, torch._C._BlasBackend
    assert choose() == names.Cublas == choose("default")
    assert choose("cublaslt") == names.Cublaslt == choose()
    torch.backends.cuda.preferred_linalg_library("magma")
    with pytest.raises(RuntimeError, match="Unknown input value"):
        choose("unknown")


def test_each_gpu_has_a_cache_of_plans():
    cache = torch.backends.cuda.cufft_plan_cache
    cache[1].max_size = 10
    assert cache[1].max_size == 10 < cache.max_size and cache[1].size == 0
    cache.clear()
    with pytest.raises(RuntimeError, match="must be non-negative"):
        cache.max_size = -1


# -- old constructors and storages -----------------------------------------------------


def test_old_constructors_make_tensors_on_gpus():
    kind = torch.cuda.FloatTensor
    assert kind(2, 3).shape == (2, 3) and kind(2, 3).device.index == 0
    assert kind().numel() == 0 and kind(0, 0, 0).shape == (0, 0, 0)
    assert kind(torch.Size([2])).shape == (2,)
    assert not [e for e in simgpu.timeline().events if e.kind == "copy"]
    assert kind([1.0, 2.0]).tolist() == [1, 2]
    assert [e.target for e in simgpu.timeline().events if e.kind == "copy"]
    with torch.cuda.device(1):
        assert kind(1).get_device() == 1 == kind(1, device=None).get_device()
        assert kind([1.0], device=2).get_device() == 2
    assert torch.cuda.LongTensor([1]).dtype is torch.int64
    x = torch.ones(3, device=0)
    storage = x.untyped_storage()
    assert kind(x).data_ptr() == x.data_ptr() == kind(storage).data_ptr()
    with pytest.raises(TypeError, match=r"torch.cuda.FloatTensor \(got torch.FloatT"):
        kind(torch.ones(3))


def test_new_obeys_its_device():
    x = torch.ones(3, device=0)
    assert x.new([0, 1], device=1).get_device() == 1
    with torch.cuda.device(2):
        assert x.new([0, 1]).get_device() == 0 and x.new(2, 3).get_device() == 0
    assert torch.ones(1).new([1.0]).device.type == "cpu"


def test_slices_of_a_storage_stay_on_the_gpu_and_share_its_block():
    x = torch.arange(16.0, device="cuda:1")
    storage, allocated = x.untyped_storage(), torch.cuda.memory_allocated(1)
    part = storage[8:24]
    assert part.device == torch.device("cuda", 1) and part.is_cuda and part.is_shared()
    assert (part.nbytes(), part.data_ptr() - storage.data_ptr()) == (16, 8)
    assert part[4:].data_ptr() - storage.data_ptr() == 12
    view = torch.empty(0, device="cuda:1").set_(part)
    view.fill_(7)
    assert x.tolist()[:7] == [0, 1, 7, 7, 7, 7, 6]
    assert view.data_ptr() - x.data_ptr() == 8
    assert torch.cuda.memory_allocated(1) == allocated
    assert [s.device.type for s in (part.clone(), part.cpu(), part.new())] == [
        "cuda", "cpu", "cuda"]  # fmt: skip
    with pytest.raises(RuntimeError, match="storage that is not resizable"):
        part.resize_(64)
    part.copy_(torch.ones(4).untyped_storage())
    assert x.tolist()[2:6] == [1, 1, 1, 1] and list(part[:4]) == [0, 0, 128, 63]
    del x, view, storage
    assert torch.cuda.memory_allocated(1) == allocated  # the slice keeps the whole
    del part
    assert torch.cuda.memory_allocated(1) == allocated - 512


@pytest.mark.parametrize(("own", "other"), [("cpu", "cuda:1"), ("cuda:0", "cpu"),
                                            ("cuda:0", "cuda:1")])  # fmt: skip
def test_a_tensor_takes_no_storage_of_another_device(own, other):
    source = torch.ones(2, device=other)
    for given in (source, source.untyped_storage(), source.storage()):
        with pytest.raises(RuntimeError, match=f'on device "{own}" .* "{other}"'):
            torch.empty(0, device=own).set_(given)
    assert torch.empty(0, device=other).set_(source.untyped_storage()).sum() == 2


def test_storages_are_made_on_gpus():
    storage = torch.UntypedStorage(600, device="cuda:1")
    assert storage.device == torch.device("cuda", 1) and storage.nbytes() == 600
    assert torch.cuda.memory_allocated(1) == 1024
    typed = torch.TypedStorage(4, dtype=torch.float64, device="cuda")
    assert typed.is_cuda and isinstance(typed, torch.cuda.DoubleStorage)
    assert isinstance(torch.cuda.IntStorage(10).fill_(3), torch.cuda.IntStorage)
    assert torch.UntypedStorage(4).device.type == "cpu"
    simgpu.stop()
    assert torch.UntypedStorage([1, 2]).tolist() == [1, 2]


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, torch.asarray])
def test_a_default_device_moves_what_is_copied(make):
    x = torch.ones(2)
    with torch.device("cuda:1"):
        assert make(x).device.index == 1
        assert getattr(torch, make.__name__)(x).device.index == 1
        assert make(x, device="cpu").device.type == "cpu"
        assert x.new_tensor(x).device.type == "cpu"
    assert make(x).device.type == "cpu"


# -- sparse tensors --------------------------------------------------------------------

EYE = torch.eye(4)
LAYOUTS = {
    "sparse": EYE.to_sparse, "sparse_csr": EYE.to_sparse_csr,
    "sparse_csc": EYE.to_sparse_csc, "sparse_bsr": lambda: EYE.to_sparse_bsr((2, 2)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_tensors_move(layout):
    host = LAYOUTS[layout]()
    x = host.cuda(1)
    assert x.device == torch.device("cuda", 1) and x.to("cuda:2").get_device() == 2
    if layout == "sparse":  # PyTorch has no such names for the others
        assert x.type() == "torch.cuda.sparse.FloatTensor"
        assert host.type() == "torch.sparse.FloatTensor"
        copy, *_ = [e for e in simgpu.timeline().events if e.kind == "copy"]
        assert copy.nbytes == 4 * (2 * 8 + 4)  # with its indices
    assert x.cpu().device.type == "cpu" and torch.equal(x.cpu().to_dense(), EYE)
    assert host.to(0, torch.float64).dtype is torch.float64
    assert not host.is_pinned() and not x.is_pinned()
    assert torch.cuda.memory_allocated(1) >= 2 * 512  # indices and values


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_lists_with_sparse_tensors_keep_their_order():
    tensors = [torch.eye(2, device=0).to_sparse(), torch.ones(3, device=0),
               torch.eye(3, device=0).to_sparse(), torch.ones(2, device=0)]  # fmt: skip
    first, second = comm.broadcast_coalesced(tensors, [0, 1])
    assert all(a is b for a, b in zip(first, tensors, strict=True))
    assert [t.shape for t in second] == [t.shape for t in tensors]
    assert {t.get_device() for t in second} == {1} and second[2].is_sparse
    added = comm.reduce_add_coalesced([first, second])
    for total, part in zip(added, tensors, strict=True):
        total, part = (t.to_dense() if t.is_sparse else t for t in (total, part))
        assert torch.equal(total, part * 2)


# -- operations that only CUDA has -----------------------------------------------------


@pytest.mark.parametrize("half", [False, True])
def test_cudnns_convolutions_are_convolutions(half):
    x, weight = torch.randn(1, 2, 5, 5, device=0), torch.randn(3, 2, 3, 3, device=0)
    with torch.autocast("cuda", enabled=half):
        y = torch.cudnn_convolution(
            x, weight, (1, 1), (2, 2), (1, 1), 1, False, True, True
        )
        back = torch.cudnn_convolution_transpose(
            y, weight, (1, 1), (0, 0), (2, 2), (1, 1), 1, False, True, True
        )
    assert y.dtype is back.dtype is (torch.float16 if half else torch.float32)
    expected = nn.functional.conv2d(x, weight, padding=1, stride=2)
    torch.testing.assert_close(y.float(), expected, atol=0.05, rtol=0.05)
    assert back.shape == x.shape


def test_statistics_of_ranks_with_as_many_rows_are_joined():
    x = torch.randn(6, 3, device=0)
    stats = [torch.batch_norm_stats(part, 1e-5) for part in x.chunk(2)]
    means, invstds = (torch.stack(both) for both in zip(*stats, strict=True))
    got = torch.batch_norm_gather_stats(x, means, invstds, None, None, 0.1, 1e-5, 3)
    for value, expected in zip(got, torch.batch_norm_stats(x, 1e-5), strict=True):
        torch.testing.assert_close(value, expected)


def test_what_only_cuda_has_is_refused_by_name():
    x = torch.ones(2, 2, device=0)
    with pytest.raises(simgpu.NotSimulated, match="aten::_fused_dropout"):
        torch._fused_dropout(x, 0.5)


# -- the rest --------------------------------------------------------------------------


def test_generators_can_share_a_position():
    one = torch.Generator(device="cuda").manual_seed(0)
    shared, other = one.graphsafe_get_state(), one.clone_state()
    drawn = [torch.rand(5, device=0, generator=one) for _ in range(2)]
    assert shared.get_offset() == one.get_offset() > 0 == other.get_offset()
    one.graphsafe_set_state(other)
    assert torch.equal(torch.rand(5, device=0, generator=one), drawn[0])
    assert shared.get_offset() == 2 * other.get_offset()
    with pytest.raises(RuntimeError, match="multiple of 4"):
        one.set_offset(3)


def test_properties_of_one_gpu_are_equal():
    of = torch.cuda.get_device_properties
    assert of(0) == of() == of(None) and of(0) != of(1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_batch_of_gradients_goes_through_scatter_and_gather(device):
    x = torch.ones(4, 3, device=device, requires_grad=True)
    parts = nn.parallel.scatter(x, (0, 1))
    out = nn.parallel.gather([part * 2 for part in parts], 0)
    rows = torch.eye(12, device=0).view(12, 4, 3)
    (batch,) = torch.autograd.grad(out, x, rows, is_grads_batched=True)
    assert batch.device == x.device and torch.equal(batch.cpu(), 2 * rows.cpu())


def test_modes_of_the_simulator_are_not_counted_as_the_programs():
    """PyTorch's TestCase takes off what a test has left on the stack."""
    length, pop = torch._C._len_torch_function_stack, torch._C._pop_torch_function_stack
    assert length() == 0
    left = TorchFunctionMode()
    left.__enter__()
    assert length() == 1 and pop() is left and length() == 0
    with pytest.raises(RuntimeError, match="empty mode stack"):
        pop()
    assert torch.zeros(1).to(1).get_device() == 1  # the simulator's is still there
