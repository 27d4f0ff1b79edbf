"""Starting and stopping simulated GPUs: what is refused, and that nothing is left."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.overrides import TorchFunctionMode, _len_torch_function_stack
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack
from torch.utils.flop_counter import FlopCounterMode

from helpers import simgpu
from helpers.simgpu import cuda_api, placement


@pytest.fixture(autouse=True)
def stopped():
    yield
    torch.set_default_device(None)
    simgpu.stop()


def everything(owners) -> dict:
    """Every attribute of these modules and classes, replaced or not."""
    return {
        (owner, name): value for owner in owners for name, value in vars(owner).items()
    }


def test_stop_restores_every_attribute():
    simgpu.start(1)  # imports what it needs, and tells what it replaces
    owners = {owner for owner, _, _ in placement.running.undo}
    simgpu.stop()
    before = everything(owners)
    simgpu.start(3)
    replaced = {(owner, name) for owner, name, _ in placement.running.undo}
    during = everything(owners)
    assert len(replaced) > 100
    for owner, name in replaced:
        assert vars(owner)[name] is not before.get((owner, name)), name
    simgpu.stop()
    after = everything(owners)
    assert after.keys() == before.keys() != during.keys()
    assert [key for key in before if before[key] is not after[key]] == []


def test_modes_are_gone_even_below_others():
    functions, dispatch = _len_torch_function_stack(), _len_torch_dispatch_stack()

    class Above(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class AboveToo(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    simgpu.start(2)
    with Above(), AboveToo():
        simgpu.stop()
        assert torch.ones(2).add(1).tolist() == [2, 2]
    assert _len_torch_function_stack() == functions
    assert _len_torch_dispatch_stack() == dispatch


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


def test_starting_again_with_the_same_gpus_changes_nothing():
    simgpu.start(2, "T4")
    x = torch.ones(1, device="cuda:1")
    simgpu.start(2, "T4")
    assert x.device.index == 1 and torch.cuda.device_count() == 2


def test_starting_others_is_refused():
    simgpu.start(2)
    for other in ((3,), (2, "T4"), (2, "A100", "1GB")):
        with pytest.raises(RuntimeError, match=r"call simgpu.stop\(\) before"):
            simgpu.start(*other)
    assert torch.cuda.device_count() == 2


@pytest.mark.parametrize("number", [0, -1, 65, 10**9, 2.0, True, "4", None])
def test_absurd_numbers_are_refused(number):
    have = torch.cuda.device_count()
    with pytest.raises(ValueError):
        simgpu.start(number)
    assert simgpu.count() == 0 and torch.cuda.device_count() == have


@pytest.mark.parametrize(
    "card, memory, reason",
    [
        ("RTX", None, "choose one of T4, A100, H100, H200"),
        ("T4", "a lot", "512MB"),
        ("T4", "17GB", "does not have 17GB"),
        ("T4", 100, "too little memory"),
        ("T4", -1, "too little memory"),
    ],
)
def test_unknown_cards_and_memories_are_refused(card, memory, reason):
    with pytest.raises(ValueError, match=reason):
        simgpu.start(1, card, memory)
    assert simgpu.count() == 0


def test_only_the_main_thread_starts_and_stops():
    errors = []

    def attempt(action):
        try:
            action()
        except RuntimeError as error:
            errors.append(str(error))

    for action in (lambda: simgpu.start(2), simgpu.stop):
        thread = threading.Thread(target=attempt, args=(action,))
        thread.start()
        thread.join(10)
    assert len(errors) == 2 and all("main thread" in error for error in errors)


def test_threads_have_the_gpus_and_a_current_one_each():
    simgpu.start(4)
    torch.cuda.set_device(2)
    found = []

    def work():
        found.append(torch.cuda.current_device())
        torch.cuda.set_device(3)
        found.append((torch.ones(2, device="cuda") + 1).device.index)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert found == [0, 3] and torch.cuda.current_device() == 2


def test_threads_of_a_pool_follow_the_simulator():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result(10)  # its thread is there before the GPUs are
        for number in (3, 2):
            simgpu.start(number)
            a, b = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
            assert pool.submit(lambda a=a: a * 2).result(10).device.index == 0
            with pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
                pool.submit(lambda a=a, b=b: a + b).result(10)
            simgpu.stop()
        simgpu.start(3)
        with ThreadPoolExecutor(1) as younger:
            younger.submit(torch.ones, 1).result(10)
            simgpu.stop()
            assert younger.submit(torch.ones, 1).result(10).device.type == "cpu"
            simgpu.start(2)
            made = younger.submit(lambda: torch.ones(1, device="cuda:1")).result(10)
            assert made.device.index == 1
            with pytest.raises(torch.AcceleratorError):
                younger.submit(lambda: torch.ones(1, device="cuda:2")).result(10)


def test_stop_twice_and_asking_without_gpus():
    simgpu.stop()
    simgpu.stop()
    with pytest.raises(RuntimeError, match="simgpu.start"):
        simgpu.timeline()


def test_memory_returns_to_zero_and_is_capped():
    simgpu.start(2, "T4", "512MB")
    x = torch.ones(2**20, device="cuda:1")  # 4 MiB
    view = x[10:]
    del x
    assert torch.cuda.memory_allocated(1) == 4 * 2**20
    with pytest.raises(torch.OutOfMemoryError, match="total capacity of 512.00 MiB"):
        torch.empty(2**27 + 1, device="cuda:1")
    view.add_(1)
    assert torch.cuda.max_memory_allocated(1) == 4 * 2**20
    with pytest.raises(torch.OutOfMemoryError):
        torch.stack([view] * 200)
    assert torch.cuda.memory_allocated(1) == 4 * 2**20
    del view
    gc.collect()
    assert torch.cuda.memory_allocated(1) == 0 == torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_allocated(1) == 0


def test_memory_of_training_returns_to_zero():
    simgpu.start(2)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).to("cuda:1")
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.ones(8, 64, device="cuda:1")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    # weights and two moments, of 64 x 64 and of 64 (in blocks of 512 bytes)
    assert torch.cuda.memory_allocated(1) == 3 * (64 * 64 * 4 + 512)
    del model, optimizer
    gc.collect()
    assert torch.cuda.memory_allocated(1) == 0


def test_four_gpus_are_done_before_one():
    def seconds(devices):
        simgpu.timeline().clear()
        pieces = [torch.ones(512, 512, device=d) for d in devices]
        for piece in pieces:
            for _ in range(4):
                piece = piece @ piece
        return simgpu.timeline().seconds

    simgpu.start(4, "T4")
    one, four = seconds(["cuda:0"] * 4), seconds([f"cuda:{i}" for i in range(4)])
    assert 2.0 < one / four < 4.0


def test_flops_are_pytorchs_own():
    simgpu.start(1)
    a, b = torch.ones(4, 5, device="cuda"), torch.ones(5, 6, device="cuda")
    with FlopCounterMode(display=False) as counter:
        a @ b
    (event,) = [e for e in simgpu.timeline().events if e.name == "mm"]
    assert event.flops == counter.get_total_flops() == 2 * 4 * 5 * 6
    assert event.nbytes == 4 * (20 + 30 + 24)


def run(script: str, **environment) -> str:
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_cannot_use_the_gpus_but_the_cpu():
    script = """
        import os, torch
        from helpers import simgpu

        simgpu.start(2)
        x = torch.ones(2, device="cuda")
        if os.fork() == 0:
            print((torch.ones(2) + 1).tolist(), flush=True)
            try:
                torch.ones(2, device="cuda")
            except RuntimeError as error:
                print(error, flush=True)
            os._exit(0)
        os.wait()
        print((x + 1).device)
    """
    out = run(script)
    assert "[2.0, 2.0]" in out and "cuda:0" in out
    assert "Cannot re-initialize CUDA in forked subprocess" in out


def test_no_call_reaches_cuda_itself():
    """As on a CUDA build without a GPU, whose `torch._C._cuda_...` would fail.

    Not tested, for lack of such a build: that its real `torch.cuda.Stream` and
    `torch.cuda.Event` are replaced as the CPU build's stand-ins are.
    """
    script = """
        import torch

        def reached(*args, **kwargs):
            raise AssertionError("the simulator called CUDA")

        for name in ("_cuda_init", "_cuda_getDevice", "_cuda_setDevice",
                     "_cuda_getDeviceCount", "_cuda_synchronize",
                     "_cuda_getCurrentStream", "_cuda_isInBadFork",
                     "_cuda_getCurrentRawStream",
                     "_cuda_exchangeDevice", "_cuda_maybeExchangeDevice",
                     "_accelerator_getAccelerator", "_cuda_resetPeakMemoryStats"):
            setattr(torch._C, name, reached)
        from helpers import simgpu
        torch.cuda.is_initialized = lambda: False
        simgpu.start(2)
        model = torch.nn.Linear(4, 4).cuda(1)
        optimizer = torch.optim.AdamW(model.parameters())
        torch.manual_seed(0)
        with torch.cuda.device(1):
            model(torch.rand(2, 4, device="cuda")).sum().backward()
        optimizer.step()
        torch.cuda.synchronize()
        print(torch.cuda.device_count(), torch.accelerator.current_accelerator())
        print(torch.cuda.memory_allocated(1) > 0, model.weight.grad.device)
        simgpu.stop()
    """
    assert run(script).split() == ["2", "cuda", "True", "cuda:1"]


def test_every_public_call_is_answered_or_refused():
    simgpu.start(1)
    replaced = {(owner, name) for owner, name, _ in placement.running.undo}
    kept = {
        "CudaError", "DeferredCudaCallError", "check_error", "cudaStatus", "has_half",
        "has_magma", "is_tf32_supported", "ipc_collect", "device", "device_of",
        "stream", "StreamContext",
        *cuda_api._MEMORY_CALLS,  # PyTorch's own, over what `_C_MEMORY` answers
    }  # fmt: skip
    for module in (
        torch.cuda,
        torch.cuda.memory,
        torch.accelerator,
        torch.accelerator.memory,
    ):
        open_ends = {
            name
            for name in module.__all__
            if callable(getattr(module, name))
            and not name.endswith("Storage")
            and (module, name) not in replaced
        }
        # legacy tensor types of dtypes that CUDA has no such type for are PyTorch's own
        assert {n for n in open_ends if not n.endswith("Tensor")} <= kept, module
    for refused in (
        torch.cuda.CUDAGraph,
        torch.cuda.host_memory_stats,
        torch.cuda.memory.MemPool,
        *filter(None, [getattr(torch.accelerator, "empty_host_cache", None)]),
        lambda: torch.compile(lambda x: x),
        lambda: torch.cuda.nccl.reduce([torch.ones(1)]),
    ):
        with pytest.raises(simgpu.NotSimulated):
            refused()


def test_functions_that_others_keep_work_after_stop():
    simgpu.start(2)
    tensor, as_tensor, seed = torch.tensor, torch.as_tensor, torch.cuda.manual_seed
    assert tensor([1], device="cuda:1").is_cuda
    simgpu.stop()
    assert tensor([1]).tolist() == as_tensor([1]).tolist() == [1]
    seed(0)  # PyTorch's own: nothing happens where there is no GPU
