"""What the `Work` of a collective says, its future, and the memory that it keeps."""

import datetime
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks
from torch.futures import collect_all, wait_all
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.distributed.fake_pg import FakeStore

import simgpu
from simgpu import NotSimulated, _frames
from support.limits import SHORT
from support.waiting import wait

MIB = 2**20
OLD_ENGINE = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15)
old_engine = pytest.mark.skipif(not OLD_ENGINE, reason="nccl is another engine")


def join(**options) -> int:
    """What every program begins with; returns the rank."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", **options)
    dist.all_reduce(torch.ones(1, device="cuda"))
    return dist.get_rank()


def mine() -> torch.Tensor:
    """1 on rank 0, 2 on rank 1."""
    return torch.full((2,), dist.get_rank() + 1.0, device="cuda")


def reduced():
    return dist.all_reduce(mine(), async_op=True).get_future()


# -- futures ---------------------------------------------------------------------------


def use_futures() -> dict:
    join()
    seen = []
    reduced().add_done_callback(lambda future: seen.append(future.value()[0] + 1))
    doubled = reduced().then(lambda future: future.value()[0] * 2)
    doubled.add_done_callback(lambda future: seen.append(future.value() + 1))
    gloo = dist.new_group(backend="gloo")
    on_host = dist.all_reduce(torch.ones(2), group=gloo, async_op=True).get_future()
    failed = reduced().then(lambda future: 1 / 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        failed.wait()
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        collect_all([reduced(), failed]).wait()
    torch.cuda.synchronize()
    found = {
        "callbacks": seen,
        "collected": [f.value()[0] for f in collect_all([reduced(), on_host]).wait()],
        "all": [wait_all([doubled])[0], wait_all([reduced()])[0][0]],
        "then": [collect_all([doubled]).then(lambda f: f.value()[0].value()).wait()],
    }
    return {name: [x.tolist() for x in values] for name, values in found.items()}


def test_callbacks_and_collected_futures_have_reduced_values(simulated_ranks):
    wanted = {
        "callbacks": [[4, 4], [7, 7]], "collected": [[3, 3], [2, 2]],
        "all": [[6, 6], [3, 3]], "then": [[6, 6]],
    }  # fmt: skip
    assert simulated_ranks(use_futures, 2) == [wanted] * 2


def train_with(*registered) -> torch.Tensor:
    rank = join()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).cuda()
    model = DDP(net, device_ids=[rank], bucket_cap_mb=0.005)
    for register in registered:
        register(model)
    for step in range(3):
        model.zero_grad()
        torch.manual_seed(10 * step + rank)
        model(torch.randn(8, 32).cuda()).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).cpu()


def fp16(model) -> None:
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def quantize(model) -> None:
    model.register_comm_hook(None, quantization_hooks.quantization_pertensor_hook)


@pytest.mark.parametrize(
    "hook, off", [(fp16, 1e-3), pytest.param(quantize, 3e-2, marks=old_engine)]
)
def test_hooks_of_ddp_race_with_nothing(simulated_ranks, hook, off):
    plain = simulated_ranks(train_with, 2)  # races raise
    hooked = simulated_ranks(train_with, 2, hook)
    assert torch.equal(hooked[0], hooked[1])
    assert 0 < (hooked[0] - plain[0]).abs().max() < off * plain[0].abs().max()


# -- what a `Work` says ----------------------------------------------------------------


def ask_work() -> list:
    join()
    work = dist.all_reduce(mine(), async_op=True)
    work.wait()
    with pytest.raises(RuntimeError, match="getDuration only works if timing was en"):
        work._get_duration()
    with pytest.raises(ValueError, match="TORCH_NCCL_ENABLE_TIMING"):
        dist.group.WORLD._register_on_completion_hook(print)
    dist.group.WORLD._enable_collectives_timing()
    with pytest.raises(NotSimulated, match="_register_on_completion_hook"):
        dist.group.WORLD._register_on_completion_hook(print)
    with pytest.raises(RuntimeError, match=r"sourceRank\(\) may only be called on wor"):
        work._source_rank()
    if dist.get_rank():
        simgpu.host_busy(0.01, "late")
    work = dist.all_reduce(x := mine(), async_op=True)
    work.block_current_stream()
    value = (x * 1).tolist()
    torch.cuda.synchronize()
    timed = work._get_duration()
    work = dist.all_gather([mine(), mine()], mine(), async_op=True)
    work.wait(datetime.timedelta(seconds=SHORT))  # so the host waits
    barrier = dist.barrier(async_op=True)
    kinds = [w._get_op_type() for w in (work, barrier)]
    return [value, timed, work.is_completed(), kinds, work.get_future_result().wait()]


def test_what_a_work_says(simulated_ranks):
    (early, *found), (late, *same) = (
        (timed, value, *rest) for value, timed, *rest in simulated_ranks(ask_work, 2)
    )
    kinds = [4, 1] if OLD_ENGINE else [100, 100]
    assert found == same == [[3, 3], True, kinds, 0]
    assert early == pytest.approx(late + 10, rel=0.1)  # ms: it waits for the other


# -- memory ----------------------------------------------------------------------------


def peaks() -> dict[str, float]:
    join()
    size = dist.get_world_size()
    x = torch.ones(MIB, device="cuda")  # 4 MiB

    def peak(function) -> float:
        torch.cuda.synchronize()
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return round((torch.cuda.max_memory_allocated() - before) / MIB)

    def parts() -> list:
        return [torch.ones_like(x) for _ in range(size)]

    def into() -> torch.Tensor:
        return torch.empty(size * MIB, device="cuda")

    functions = {
        "list": lambda: dist.all_gather(parts(), x),
        "list, then one": lambda: (dist.all_gather(o := parts(), x), torch.cat(o)),
        "into": lambda: dist.all_gather_into_tensor(into(), x),
        "scatter of a list": lambda: dist.reduce_scatter(torch.empty_like(x), parts()),
        "in turn": lambda: [dist.broadcast(torch.ones_like(x), 0) for _ in range(4)],
        "in turn, waited for": lambda: [
            dist.all_reduce(torch.ones_like(x), async_op=True).wait() for _ in range(4)
        ],
    }
    return {name: peak(function) for name, function in functions.items()}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_lists_are_flattened_and_what_nobody_reads_is_freed(simulated_ranks):
    flat = 8 if OLD_ENGINE else 0
    wanted = {
        "list": 8 + flat, "list, then one": 16, "into": 8,
        "scatter of a list": 12 + flat, "in turn": 4, "in turn, waited for": 4,
    }  # fmt: skip
    assert simulated_ranks(peaks, 2) == [wanted] * 2


@pytest.mark.simulated_gpus(1)
def test_what_another_backend_makes_is_on_the_gpu():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        x = torch.ones(4, 8, device="cuda")
        name = dist.group.WORLD.group_name
        ops = torch.ops._c10d_functional
        for made in (
            ops.all_reduce(x, "sum", name),
            ops.all_gather_into_tensor(x, 4, name),
            ops.reduce_scatter_tensor(x, "sum", 4, name),
            ops.all_reduce_coalesced([x], "sum", name)[0],
        ):
            assert ops.wait_tensor(made).device == (made + x[:1]).device == x.device
    finally:
        dist.destroy_process_group()


# -- interrupted waits, comparisons ----------------------------------------------------


def waits_for_others(thread: int) -> bool:
    """Whether a thread waits for the values of other ranks."""
    frame = sys._current_frames()[thread]
    while frame and not frame.f_code.co_filename.endswith("board.py"):
        frame = frame.f_back
    return frame is not None


def interrupt(how: str, has_come: Path) -> bool:
    """Rank 0 is interrupted while it waits, and rank 1 comes afterwards."""
    has_ended = threading.Event()
    rank = join()
    ends = {"destroy": dist.destroy_process_group,
            "abort": dist.distributed_c10d._abort_process_group}  # fmt: skip
    dist.all_reduce(x := mine())
    torch.cuda.synchronize()
    if rank == 0:
        me = threading.get_ident()

        def end(*_):
            has_come.touch()
            ends[how]()
            has_ended.set()

        def interrupt_me():
            wait(lambda: waits_for_others(me), "the wait of rank 0")
            signal.pthread_kill(me, signal.SIGUSR1)

        signal.signal(signal.SIGUSR1, end)
        threading.Thread(target=interrupt_me).start()
        dist.all_reduce(x)
        (x * 1).sum()  # waits for the other
        return has_ended.is_set()
    wait(has_come.exists, "the signal to rank 0")
    time.sleep(0.7)  # in which its group ends, or waits for what this rank gives
    if how == "destroy":
        dist.all_reduce(x)
        return x.tolist() == [6, 6]
    return True


@pytest.mark.parametrize("how", ["destroy", "abort"])
def test_a_signal_may_end_the_group_while_its_values_are_awaited(
    simulated_ranks, how, tmp_path
):
    found = simulated_ranks(interrupt, 2, how, tmp_path / "come", seconds=SHORT)
    assert found == [True, True]


def compare() -> tuple[str, str]:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    rank = join()
    with pytest.raises(RuntimeError) as shapes:
        dist.all_reduce(torch.ones(4 + rank, 2, device="cuda"))
    with pytest.raises(RuntimeError) as kinds:
        dist.barrier() if rank else dist.broadcast(mine(), 0)
    dist.all_gather([mine(), mine()], mine())
    return str(shapes.value), str(kinds.value)


def test_detail_compares_collectives_before_they_run(simulated_ranks):
    (shapes, kinds), _ = simulated_ranks(compare, 2)
    print_of = (
        "CollectiveFingerPrint(SequenceNumber=1, OpType={}, TensorShape=[{}], "
        "TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default), "
        "device=cuda, layout=Strided (default), requires_grad=false (default), "
        "pinned_memory=false (default), memory_format=(nullopt)))"
    )
    words = (
        "Detected mismatch between collectives on ranks. Rank 0 is running collective: "
        "{}, but Rank 1 is running collective: {}.Collectives differ in the following "
        "aspects: {}"
    )
    assert shapes == words.format(
        print_of.format("ALLREDUCE", "4, 2"), print_of.format("ALLREDUCE", "5, 2"),
        "  Tensor Tensor shapes: 4 2vs 5 2",
    )  # fmt: skip
    assert kinds.startswith(
        words.format(
            print_of.format("BROADCAST", "2"),
            "CollectiveFingerPrint(SequenceNumber=1OpType=BARRIER)",
            "  Op type: BROADCASTvs BARRIER",
        )
    )


def test_pytorch_is_no_code_of_the_program_wherever_it_lies(tmp_path, monkeypatch):
    """A build from source is outside site-packages."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    assert _frames._of_torch() == [f"{tmp_path / 'torch'}{os.sep}"]
