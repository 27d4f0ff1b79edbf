"""Starting and stopping simulated GPUs: what is refused, and that nothing is left."""

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch
from torch.overrides import TorchFunctionMode, _len_torch_function_stack
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack

import simgpu
from simgpu import _patches as patches
from simgpu import _runtime as runtime
from simgpu._device.visible import uuid_of
from support.limits import SHORT


@pytest.fixture(autouse=True)
def stopped():
    yield
    torch.set_default_device(None)
    simgpu.stop()


# -- what is replaced ------------------------------------------------------------------


def replaced() -> set[tuple]:
    """(module or class, attribute) of all that is replaced now."""
    return {(owner, name) for owner, name, _ in runtime.running.patches._undo}


def everything(owners: set) -> dict[tuple, object]:
    """Every attribute of modules and classes, replaced or not."""
    return {
        (owner, name): value for owner in owners for name, value in vars(owner).items()
    }


@pytest.fixture
def owners() -> set:
    simgpu.start(1)  # imports what it needs, and tells what it replaces
    found = {owner for owner, _ in replaced()}
    simgpu.stop()
    return found


def test_stop_restores_every_attribute(owners):
    before = everything(owners)
    simgpu.start(3)
    during = everything(owners)
    assert len(replaced()) > 100
    undo = [(id(owner), name) for owner, name, _ in runtime.running.patches._undo]
    assert len(undo) == len(set(undo)), "something is replaced twice"
    for key in replaced():
        assert during[key] is not before.get(key), key
    simgpu.stop()
    after = everything(owners)
    assert after.keys() == before.keys() != during.keys()
    assert [key for key in before if before[key] is not after[key]] == []


def test_what_stands_for_a_function_is_called_as_it_is():
    simgpu.start(1)
    pairs = [
        (vars(owner)[name], old)
        for owner, name, old in runtime.running.patches._undo
        if isinstance(owner, ModuleType) and callable(old)
    ]
    pairs = [(new, old) for new, old in pairs if not isinstance(new, type)]
    assert len(pairs) > 100
    for new, old in pairs:
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(new, name, None) == getattr(old, name, None), (new, old)


def test_a_start_that_fails_leaves_nothing_replaced(monkeypatch, owners):
    before, table = everything(owners), patches.table

    def broken(now):
        rows = table(now)
        return [*rows[: len(rows) // 2], patches.Patch(rows, "append", 1, "fails")]

    monkeypatch.setattr(patches, "table", broken)
    with pytest.raises(TypeError):
        simgpu.start(2)
    monkeypatch.undo()
    after = everything(owners)
    assert not simgpu.is_running() and after.keys() == before.keys()
    assert [key for key in before if before[key] is not after[key]] == []
    simgpu.start(2)
    assert torch.ones(1, device="cuda:1").device.index == 1


def test_modes_are_gone_even_below_others():
    functions, dispatch = _len_torch_function_stack(), _len_torch_dispatch_stack()
    seen = []

    class Above(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append("function")
            return func(*args, **(kwargs or {}))

    class AboveToo(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append("dispatch")
            return func(*args, **(kwargs or {}))

    simgpu.start(2)
    with Above(), AboveToo():
        simgpu.stop()
        assert torch.ones(2).add(1).tolist() == [2, 2]
        assert {"function", "dispatch"} <= set(seen)
    assert _len_torch_function_stack() == functions
    assert _len_torch_dispatch_stack() == dispatch


def test_functions_that_others_keep_work_after_stop():
    simgpu.start(2)
    tensor, as_tensor, seed = torch.tensor, torch.as_tensor, torch.cuda.manual_seed
    assert tensor([1], device="cuda:1").is_cuda
    simgpu.stop()
    assert tensor([1]).tolist() == as_tensor([1]).tolist() == [1]
    seed(0)  # PyTorch's own: nothing happens where there is no GPU


def test_no_call_reaches_cuda_itself(monkeypatch):
    """As on a CUDA build without a GPU, whose `torch._C._cuda_...` would fail.

    Not tested, for lack of such a build: that its real `torch.cuda.Stream` and
    `torch.cuda.Event` are replaced as the CPU build's stand-ins are.
    """

    def reached(*args, **kwargs):
        raise AssertionError("the simulator called CUDA")

    for name in (
        "_cuda_init", "_cuda_getDevice", "_cuda_setDevice", "_cuda_getDeviceCount",
        "_cuda_synchronize", "_cuda_getCurrentStream", "_cuda_isInBadFork",
        "_cuda_getCurrentRawStream", "_cuda_exchangeDevice",
        "_cuda_maybeExchangeDevice", "_accelerator_getAccelerator",
        "_cuda_resetPeakMemoryStats",
    ):  # fmt: skip
        monkeypatch.setattr(torch._C, name, reached, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    simgpu.start(2)
    model = torch.nn.Linear(4, 4).cuda(1)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(0)
    with torch.cuda.device(1):
        model(torch.rand(2, 4, device="cuda")).sum().backward()
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.cuda.device_count() == 2 and torch.cuda.memory_allocated(1) > 0
    assert model.weight.grad.device == torch.device("cuda:1")
    simgpu.stop()


# -- what outlives the GPUs ------------------------------------------------------------


def test_default_device_does_not_outlive_the_gpus():
    simgpu.start(2)
    torch.set_default_device("cuda:1")
    assert torch.ones(1).device.index == 1
    simgpu.stop()
    assert torch.ones(1).device.type == "cpu"


def test_tensors_outlive_the_gpus_as_cpu_tensors():
    simgpu.start(4)
    x = torch.arange(3.0, device="cuda:3", requires_grad=True)
    y = (x * 2).sum()
    simgpu.stop()
    assert x.device.type == "cpu" and repr(y.detach()) == "tensor(6.)"
    y.backward()
    assert x.grad.tolist() == [2, 2, 2]
    simgpu.start(2)
    assert x.device.type == "cpu" and (x + 1).device.type == "cpu"
    assert x.to("cuda:1").device.index == 1
    simgpu.stop()
    del x, y
    gc.collect()


def test_stop_twice_and_asking_without_gpus():
    simgpu.stop()
    simgpu.stop()
    with pytest.raises(RuntimeError, match="simgpu.start"):
        simgpu.timeline()


# -- what is asked for -----------------------------------------------------------------


def test_starting_again_with_the_same_gpus_changes_nothing_and_others_are_refused():
    simgpu.start(2, "T4")
    x = torch.ones(1, device="cuda:1")
    simgpu.start(2, "T4")
    for other in ((3, "T4"), (2,), (2, "T4", "1GB")):
        with pytest.raises(RuntimeError, match=r"call simgpu.stop\(\) before"):
            simgpu.start(*other)
    assert x.device.index == 1 and torch.cuda.device_count() == 2


@pytest.mark.parametrize(
    "request_, reason",
    [
        *(((number,), "choose 1 to 64") for number in (0, -1, 65, 10**9)),
        *(((number,), "a whole number") for number in (2.0, True, "4", None)),
        ((1, "RTX"), "choose one of T4, V100, A100, H100, H200, B200, L40S"),
        ((1, "T4", "a lot"), "512MB"),
        ((1, "T4", "17GB"), "does not have 17GB"),
        ((1, "T4", 100), "too little memory"),
        ((1, "T4", -1), "too little memory"),
    ],
)
def test_absurd_requests_are_refused(request_, reason):
    have = torch.cuda.device_count()
    with pytest.raises(ValueError, match=reason):
        simgpu.start(*request_)
    assert simgpu.count() == 0 and torch.cuda.device_count() == have


@pytest.mark.parametrize("visible, count", [("2,0", 2), ("", 0)])
def test_count_is_what_pytorch_says_and_installed_what_the_machine_has(
    monkeypatch, visible, count
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    simgpu.start(4, honour_visible=True)
    assert simgpu.count() == torch.cuda.device_count() == count
    assert simgpu.is_running() and simgpu.installed() == 4


UUIDS = [f"GPU-{uuid_of(n)}" for n in range(4)]


@pytest.mark.parametrize(
    "visible, ordinals",
    [
        (UUIDS[3], [3]), (f"{UUIDS[2]},{UUIDS[0][:12]}", [2, 0]), ("GPU-", []),
        (f"{UUIDS[1]},GPU-00000000,{UUIDS[0]}", [1]), (f"{UUIDS[1]},{UUIDS[1]}", []),
        (f"{UUIDS[1]},0", [1]), ("2,GPU-1", [2]), ("1gpu, 3", [1, 3]), ("1,1", []),
        ("0,9,1", [0]), ("-1,0", []),
    ],
)  # fmt: skip
def test_what_names_gpus_in_cuda_visible_devices(monkeypatch, visible, ordinals):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    simgpu.start(4, honour_visible=True)
    assert torch.cuda.device_count() == len(ordinals)
    found = [torch.cuda.get_device_properties(i) for i in range(len(ordinals))]
    assert [f"GPU-{p.uuid}" for p in found] == [UUIDS[n] for n in ordinals]


# Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"
@pytest.mark.parametrize(
    "card, threads, shared, optin",
    [("T4", 1024, 64, 64), ("A100", 2048, 164, 163), ("H100", 2048, 228, 227),
     ("B200", 2048, 228, 227), ("L40S", 1536, 100, 99)],
)  # fmt: skip
def test_properties_are_the_cards_and_none_is_missing(card, threads, shared, optin):
    simgpu.start(2, card)
    properties = torch.cuda.get_device_properties(1)
    assert properties.max_threads_per_multi_processor == threads
    assert properties.shared_memory_per_multiprocessor == shared * 1024
    assert properties.shared_memory_per_block_optin == optin * 1024
    assert properties.max_threads_per_block == 1024
    assert properties.regs_per_multiprocessor == 65536
    for name in (  # of `_CudaDeviceProperties` in torch 2.11 and 2.13
        "name", "major", "minor", "is_multi_gpu_board", "is_integrated",
        "multi_processor_count", "total_memory", "warp_size", "gcnArchName", "uuid",
        "pci_bus_id", "pci_device_id", "pci_domain_id", "L2_cache_size",
        "shared_memory_per_block", "clock_rate", "memory_clock_rate",
        "memory_bus_width",
    ):  # fmt: skip
        assert getattr(properties, name) is not None, name
    with pytest.raises(AttributeError):
        properties.no_such_property  # noqa: B018


# -- threads and forks -----------------------------------------------------------------


def in_threads(work, count: int = 1) -> list:
    """What `work()` returns in each of several threads, or raises there."""
    results, ready = [], threading.Barrier(count)

    def run():
        ready.wait(SHORT)
        try:
            results.append(work())
        except RuntimeError as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SHORT)
    return results


def test_only_the_main_thread_starts_and_stops():
    for action in (lambda: simgpu.start(2), simgpu.stop):
        (error,) = in_threads(action)
        assert "main thread" in str(error)


def test_threads_have_the_gpus_and_a_current_one_each():
    simgpu.start(4)
    torch.cuda.set_device(2)

    def work():
        before = torch.cuda.current_device()
        torch.cuda.set_device(3)
        return before, (torch.ones(2, device="cuda") + 1).device.index

    assert in_threads(work) == [(0, 3)] and torch.cuda.current_device() == 2


def test_threads_never_get_the_same_stream():
    simgpu.start(1)
    made = in_threads(lambda: [torch.cuda.Stream(0).stream_id for _ in range(4)], 8)
    assert sorted(sum(made, [])) == list(range(1, 33))


def test_threads_of_a_pool_follow_the_simulator():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result(SHORT)  # its thread is there before the GPUs are
        for number in (3, 2):
            simgpu.start(number)
            a, b = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
            assert pool.submit(lambda a=a: a * 2).result(SHORT).device.index == 0
            with pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
                pool.submit(lambda a=a, b=b: a + b).result(SHORT)
            simgpu.stop()
        simgpu.start(3)
        with ThreadPoolExecutor(1) as younger:
            younger.submit(torch.ones, 1).result(SHORT)
            simgpu.stop()
            assert younger.submit(torch.ones, 1).result(SHORT).device.type == "cpu"
            simgpu.start(2)
            made = younger.submit(lambda: torch.ones(1, device="cuda:1")).result(SHORT)
            assert made.device.index == 1
            assert [e.device for e in simgpu.timeline().events] == ["cuda:1"]
            with pytest.raises(torch.AcceleratorError):
                younger.submit(lambda: torch.ones(1, device="cuda:2")).result(SHORT)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_cannot_use_the_gpus_but_the_cpu():
    simgpu.start(2)
    x = torch.ones(2, device="cuda")
    said, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, f"{(torch.ones(2) + 1).tolist()} ".encode())
            torch.ones(2, device="cuda")
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(said, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    assert text.startswith("[2.0, 2.0] Cannot re-initialize CUDA in forked subprocess")
    assert (x + 1).device.index == 0
