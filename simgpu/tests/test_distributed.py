"""Ranks with simulated GPUs: NCCL's rules, DDP, what spawned processes see."""

import math
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import simgpu
from simgpu._dispatch.placement import memory_of
from support import programs

SCRIPTS = Path(__file__).parent / "scripts"
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
SAID = "{} on simulated GPUs: no NCCL, one simulated time for all"


@pytest.fixture
def gpus():
    simgpu.start(2)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    simgpu.stop()


def join(backend: str, **options) -> None:
    """Make a process group of one rank, in this process."""
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, **options
    )


@pytest.fixture
def group(gpus):
    join("nccl")


# -- one rank, several GPUs ------------------------------------------------------------


class OnTwoGpus(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.devices = first, second
        self.one = nn.Linear(6, 500).to(first)
        self.two = nn.Linear(500, 700).to(second)
        self.three = nn.Linear(700, 3).to(first)

    def forward(self, x):
        first, second = self.devices
        x = torch.tanh(self.one(x.to(first)))
        return self.three(torch.tanh(self.two(x.to(second))).to(first))


def steps(model: nn.Module, batches: list[torch.Tensor]) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return model


def train_on_two_gpus_each(options: dict) -> list:
    """Two of four ranks have two GPUs each; how far they are from one process."""
    dist.init_process_group("nccl")
    rank, group = dist.get_rank(), dist.new_group([0, 1])
    if rank > 1:
        return []
    devices = [torch.device("cuda", 2 * rank + i) for i in range(2)]
    whole = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(rank)
    model = OnTwoGpus(*devices)
    ddp = DDP(model, process_group=group, **options)
    torch.manual_seed(0)
    alone = steps(OnTwoGpus("cpu", "cpu"), list(whole))
    steps(ddp, [batch[4 * rank : 4 * rank + 4] for batch in whole])
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    apart = max((its.cpu() - other).abs().max().item() for its, other in pairs)
    gradients = all(p.grad.device == p.device for p in model.parameters())
    events = simgpu.timeline().events
    *_, a, b, c = (e.device for e in events if e.name.startswith("all_reduce"))
    # what backward has first is sent first: on the second GPU, which has no first layer
    in_order = list(dict.fromkeys([a, b, c])) == [str(d) for d in reversed(devices)]
    return [apart < 1e-6, gradients, in_order]


@pytest.mark.parametrize("options", [
    {}, {"find_unused_parameters": True, "bucket_cap_mb": 1},
    {"gradient_as_bucket_view": True, "static_graph": True},
], ids=str)  # fmt: skip
def test_ddp_trains_a_module_on_two_gpus_of_a_rank(simulated_ranks, options):
    found = simulated_ranks(train_on_two_gpus_each, 4, options)
    assert found[:2] == [[True, True, True]] * 2


def take_turns() -> list:
    """One group on the second, the first and again the second GPU of each rank."""
    dist.init_process_group("nccl")
    rank, group = dist.get_rank(), dist.new_group([0, 1])
    if rank > 1:
        return []
    first, second = (torch.device("cuda", 2 * rank + i) for i in range(2))
    found, times = [], []
    for device in (second, first, second):
        given = torch.full((1000,), rank + 1.0, device=device)
        work = dist.all_reduce(given, group=group, async_op=True)
        work.wait()
        found.append((given.device == device, given.sum().item()))
        torch.cuda.synchronize(device)
        times.append(simgpu.timeline().events[-1].end)
    dist.barrier(group)
    if rank == 0:
        dist.send(torch.arange(3.0, device=second), 1)
        dist.send(torch.arange(3.0, device=first), 1)
    else:
        for device in (first, second):
            dist.recv(got := torch.empty(3, device=device), 0)
            found.append((got.device == device, got.tolist()))
    torch.cuda.synchronize(first)
    return [found, times]


def test_one_group_is_used_on_several_gpus_in_turn(simulated_ranks):
    (one, times), (other, same), *_ = simulated_ranks(take_turns, 4)
    assert one == [(True, 3000.0)] * 3
    assert other == one + [(True, [0.0, 1.0, 2.0])] * 2
    assert times == same == sorted(times)


# -- groups ----------------------------------------------------------------------------


def test_a_group_says_nccl(gpus):
    assert dist.is_nccl_available() and torch.cuda.nccl.version() > (2, 10)
    join("nccl", device_id=torch.device("cuda", 1))
    assert dist.get_backend() == "nccl"
    assert dist.get_backend(dist.new_group([0])) == "nccl"
    dist.barrier(device_ids=[1])
    dist.barrier()


def test_a_group_for_both_takes_both(gpus):
    join("cpu:gloo,cuda:nccl")
    for device in ("cpu", "cuda:1"):
        t = torch.ones(2, device=device)
        dist.all_reduce(t)
        assert t.device == torch.device(device)


def test_gloo_stays_gloo(gpus, capfd):
    join("gloo")
    assert dist.get_backend() == "gloo"
    dist.all_reduce(torch.ones(2))
    assert "simulated GPUs" not in capfd.readouterr().err


def test_options_are_those_of_nccl(gpus):
    with pytest.raises(AssertionError, match="of type ProcessGroupNCCL.Options"):
        join("nccl", pg_options=object())
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 4
    limit = timedelta(seconds=7)  # no limit: nobody waits
    join("nccl", pg_options=options, timeout=limit)
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    engine = "NCCL2" if TORCH >= (2, 15) else "NCCL"  # of "nccl"
    assert type(backend) is getattr(dist, f"ProcessGroup{engine}")
    assert backend.name() == engine.lower()
    assert backend.options.is_high_priority_stream
    assert backend.options.config.max_ctas == 4
    assert backend.options._timeout == limit
    assert dist.get_backend_config() == "cuda:nccl"
    assert dist.group.WORLD.name() == engine.lower()


def test_nccl_class_is_gone_after_the_simulator():
    def found() -> tuple:
        built = torch._C._distributed_c10d
        return dist.is_nccl_available(), getattr(built, "_hash_tensors", None)

    before = found()
    simgpu.start(1)
    assert found()[0] and found() != before
    simgpu.stop()
    assert found() == before


def test_a_mesh_of_gpus_and_sharded_parameters(group):
    mesh = dist.init_device_mesh("cuda", (1,))
    model = fully_shard(nn.Linear(2, 2).cuda(), mesh=mesh)
    assert model.weight.device == torch.device("cuda:0")
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[1, 1], [1, 1]]


# -- collectives -----------------------------------------------------------------------


def test_each_collective_is_one_event_on_its_gpu_and_its_result_stays_there(group):
    torch.cuda.set_device(1)
    t, out = torch.arange(100.0, device="cuda"), torch.empty(100, device="cuda")
    simgpu.timeline().clear()
    dist.all_reduce(t)
    dist.reduce_scatter_tensor(out, t)
    dist.all_gather([out], t)
    dist.barrier()
    events = simgpu.timeline().events
    assert [(event.name, event.device, event.nbytes) for event in events] == [
        ("all_reduce", "cuda:1", 400), ("reduce_scatter", "cuda:1", 400),
        ("all_gather", "cuda:1", 400), ("barrier", "cuda:1", 0),
    ]  # fmt: skip
    assert simgpu.timeline().host == events[-1].end  # it waited
    assert out.device == t.device and torch.equal(out, t)
    things = [None]
    dist.all_gather_object(things, {"a": 1})
    assert things == [{"a": 1}]


# -- DDP -------------------------------------------------------------------------------


def test_what_a_collective_reads_is_kept_until_somebody_waits(group):
    given, out = torch.ones(1024, device="cuda"), torch.zeros(1024, device="cuda")
    before = torch.cuda.memory_allocated()
    work = dist.all_gather_into_tensor(out, given, async_op=True)
    del given
    torch.ones(1024, device="cuda")  # not in the memory that is being read
    assert torch.cuda.memory_allocated() == before
    work.wait()
    assert torch.cuda.memory_allocated() == before - 4096
    assert out.tolist() == [1.0] * 1024


def test_where_nobody_waits_it_is_kept_until_the_collective_has_ended(group):
    """Then the next one lets go of it, as NCCL's watchdog has asked it to."""
    given, out = torch.ones(1024, device="cuda"), torch.zeros(1024, device="cuda")
    before = torch.cuda.memory_allocated()
    dist.all_gather_into_tensor(out, given, async_op=True)
    del given
    for has_ended in (False, True):
        if has_ended:
            torch.cuda.synchronize()
        dist.all_reduce(out, async_op=True)  # which needs the values of the first
        assert torch.cuda.memory_allocated() == before - 4096 * has_ended


@pytest.mark.parametrize("views", [False, True])
def test_buckets_take_as_much_as_the_gradients_and_views_no_second_copy(group, views):
    model = nn.Linear(512, 512, bias=False).to("cuda:1")  # 1 MiB
    before = torch.cuda.memory_allocated("cuda:1")
    ddp = DDP(model, device_ids=[1], gradient_as_bucket_view=views)
    assert torch.cuda.memory_allocated("cuda:1") - before == 2**20
    ddp(torch.ones(4, 512)).sum().backward()  # DDP moves its input
    assert model.weight.grad.device == torch.device("cuda:1")
    ddp.zero_grad(set_to_none=False)
    torch._C._cuda_clearCublasWorkspaces()
    after = torch.cuda.memory_allocated("cuda:1")
    assert after == (2 if views else 3) * 2**20  # weights, buckets, gradients
    assert torch.cuda.memory_allocated("cuda:0") == 0


class Crossed(nn.Module):
    """Three layers, made in another order than that in which they compute."""

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(256, 128, bias=False)  # 128 KiB of gradients
        self.first = nn.Linear(64, 256, bias=False)  # 64 KiB
        self.third = nn.Linear(128, 512, bias=False)  # 256 KiB

    def forward(self, x):
        return self.third(self.second(self.first(x)))


def test_buckets_are_sent_and_numbered_as_their_gradients_become_ready(group):
    """In each pass anew, from the second on, which DDP orders by the first."""
    ddp = DDP(Crossed().cuda(), device_ids=[0], bucket_cap_mb=0.01)
    ready = [("third", 2**18), ("second", 2**17), ("first", 2**16)]
    weights = [(f"module.{name}.weight", nbytes) for name, nbytes in ready]
    assert {n: p.nbytes for n, p in ddp.named_parameters()} == dict(weights)
    for step in range(3):
        simgpu.timeline().clear()
        ddp(torch.ones(4, 64, device="cuda")).sum().backward()
        events = [e for e in simgpu.timeline().events if e.kind == "collective"]
        sent = [(e.name, e.nbytes) for e in events if e.name != "broadcast"]
        if step == 0:  # one bucket, since parameters of no order have all in one
            assert sent == [("all_reduce bucket 1", 7 * 2**16)]
            continue
        assert sent == [
            (f"all_reduce bucket {number}", nbytes)
            for number, (_, nbytes) in enumerate(ready, 1)
        ]
        starts = [e.start for e in events]
        assert starts == sorted(starts)


# -- processes -------------------------------------------------------------------------


def test_options_and_hooks_of_ddp_agree_with_one_model(tmp_path):
    done = programs.in_ranks(tmp_path, 2, SCRIPTS / "ddp_options.py")
    assert done.status == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    lines.remove("float16 hook: near")
    lines.remove("PowerSGD, ZeRO: loss falls")
    assert len(lines) == 6 and last == "no_sync: equal on cuda:0"
    assert all(line.endswith(": equal on cuda:0") for line in lines), lines
    assert done.stderr.count(SAID.format("2 ranks")) == 1


def gradients_by_ways_of_2_15() -> dict[str, bool]:
    """Whether what 2.15 has added to DDP and FSDP2 gives the same gradients."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    torch.manual_seed(rank)
    x = torch.randn(4, 8, device="cuda")

    def model() -> nn.Module:
        torch.manual_seed(0)
        norm = nn.LayerNorm(16)
        return nn.Sequential(nn.Linear(8, 16), norm, nn.Linear(16, 4)).cuda()

    def gradients(model: nn.Module) -> torch.Tensor:
        found = [parameter.grad for parameter in model.parameters()]
        found = [g.full_tensor() if isinstance(g, DTensor) else g for g in found]
        return torch.cat([gradient.flatten() for gradient in found])

    def step(model: nn.Module) -> nn.Module:
        model(x).square().mean().backward()
        return model

    expected = gradients(step(DDP(model())))
    found = {}
    for option in ("lazy_bucket_allocation", "batched_grad_copy"):
        found[option] = step(DDP(model(), **{option: True}))
    by_hand = found["DDP finalized by hand"] = DDP(model())
    by_hand.require_manual_backward_finalization = True
    for _ in range(2):  # buckets are made anew for the second
        by_hand.zero_grad()
        step(by_hand).finalize_backward()
    by_hand = found["FSDP2 finalized by hand"] = fully_shard(model())
    by_hand.set_manual_backward_finalization(True)
    step(by_hand).finalize_backward(async_op=True).wait()
    kept = found["unsharded storage is kept"] = fully_shard(model())
    kept.set_keep_unsharded_storage(True)
    step(kept)
    return {n: torch.allclose(gradients(m), expected) for n, m in found.items()}


@pytest.mark.skipif(TORCH < (2, 15), reason="since torch 2.15")
def test_new_ways_of_2_15_give_the_gradients_of_the_old_ones(simulated_ranks):
    for found in simulated_ranks(gradients_by_ways_of_2_15, 2):
        assert len(found) == 5 and all(found.values()), found


def losses_in(done: programs.Done) -> list[float]:
    assert done.status == 0, done.stderr
    return [float(line.split()[-1]) for line in done.stdout.splitlines()]


def test_a_trainer_learns_the_same_in_one_process_and_in_ranks(tmp_path):
    """The second half, from a snapshot, in other processes than the first."""
    trainer = (SCRIPTS / "trainer.py", "--amp", "--epochs")
    whole = programs.simulated(tmp_path, "--gpus", 2, *trainer, 2)
    first = programs.in_ranks(tmp_path, 2, *trainer, 1, "--ddp")
    rest = programs.in_ranks(tmp_path, 2, *trainer, 2, "--ddp", "--resume")
    assert len(losses_in(whole)) == 2
    found = losses_in(first) + losses_in(rest)
    assert found == pytest.approx(losses_in(whole), abs=2e-3)  # float16, another order


SPAWNS = """
import atexit
import sys
import threading
import time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader


class Result:
    number = 7


def run(rank, folder, queue):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", f"file://{folder}/two", rank=rank, world_size=2)
    t = torch.ones(1, device="cuda")
    dist.all_reduce(t)
    if rank == 1:
        queue.put((Result(), t.item(), str(t.device)))
        raise ValueError("rank 1 has had enough")


def slow():
    time.sleep(1)
    print("the thread is done")


if __name__ == "__main__":
    folder = sys.argv[1]
    dist.init_process_group("nccl", f"file://{folder}/one", rank=0, world_size=1)
    atexit.register(print, "at exit")
    print(len(list(DataLoader(torch.ones(4), num_workers=1))), flush=True)
    queue = mp.get_context("spawn").SimpleQueue()
    try:
        mp.spawn(run, args=(folder, queue), nprocs=2)
    finally:
        result, total, device = queue.get()
        print(result.number, total, device, flush=True)
        threading.Thread(target=slow).start()
"""


@pytest.mark.slow
def test_spawned_ranks_objects_threads_and_exit_functions_are_as_in_python(tmp_path):
    """Also: a worker that was forked has no exit functions to run."""
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS, encoding="utf-8")
    command = ("--gpus", 2, script, tmp_path)
    done = programs.simulated(tmp_path, *command, new_python=True)
    printed = ["4", "7 2.0 cuda:1", "the thread is done", "at exit"]
    assert done.stdout.splitlines() == printed, done.stderr
    assert done.status == 1 and "ValueError: rank 1 has had enough" in done.stderr
    for ranks in ("1 rank", "2 ranks"):
        assert done.stderr.count(SAID.format(ranks)) == 1


JOBS = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2")
    os.environ.update(RANK=str(rank))
    torch.cuda.set_device(rank)
    for backend in ("nccl", "cpu:gloo,cuda:nccl", "gloo", None, "nccl"):
        dist.init_process_group(backend)
        t = torch.ones(1, device="cpu" if backend == "gloo" else "cuda")
        dist.all_reduce(t)
        if rank == 0:
            print(backend, t.item())
        dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = str(store.port)
    del store
    mp.spawn(run, args=(port,), nprocs=2)
"""


def test_ranks_may_meet_again_at_the_same_port(tmp_path):
    """Rank 0 keeps the store; nobody uses it after that rank has ended."""
    script = tmp_path / "jobs.py"
    script.write_text(JOBS, encoding="utf-8")
    done = programs.simulated(tmp_path, "--gpus", 2, script)
    backends = ["nccl", "cpu:gloo,cuda:nccl", "gloo", "None", "nccl"]
    assert done.stdout.splitlines() == [f"{name} 2.0" for name in backends], done.stderr
    assert done.stderr.splitlines() == [SAID.format("2 ranks")]


def meet_after_one_was_alone(folder: str, in_one: bool) -> list[float]:
    rank = int(os.environ["RANK"])
    within = dist.FileStore(f"{folder}/store", 2) if in_one else None
    torch.cuda.set_device(rank)
    jobs = [("alone", 1)] * (rank == 0) + [("both", 2), ("both again", 2)]
    found = []
    for name, size in jobs:
        if within is None:
            where = {"init_method": f"file://{folder}/{name}"}
        else:
            where = {"store": dist.PrefixStore(name, within)}
        dist.init_process_group("nccl", rank=rank, world_size=size, **where)
        x = torch.ones(1, device="cuda")
        dist.all_reduce(x)
        found.append(x.item())
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("in_one", [False, True])
def test_a_rank_may_have_had_a_job_by_itself(simulated_ranks, tmp_path, in_one):
    """Another number of jobs before was a hang without a name."""
    found = simulated_ranks(meet_after_one_was_alone, 2, str(tmp_path), in_one)
    assert found == [[1.0, 2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize(("end", "status", "shown"), [
    ("raise ValueError('enough')", 1, ["[rank0]: ValueError: enough"]),
    ("sys.exit(7)", 7, []),
    ("sys.exit('enough')", 1, ["enough"]),
])  # fmt: skip
def test_a_rank_ends_as_python_would_end_it(tmp_path, end, status, shown):
    (tmp_path / "ends.py").write_text(
        "import sys, torch.distributed as dist\n"
        f"where = 'file://{tmp_path}/store'\n"
        "dist.init_process_group('nccl', where, rank=0, world_size=1)\n"
        f"print('said')\n{end}\n"
    )
    done = programs.simulated(tmp_path, "--gpus", 2, "ends.py")
    said, *error = done.stderr.splitlines()
    assert (done.status, done.stdout) == (status, "said\n")
    assert said == SAID.format("1 rank") and error[-1:] == shown
    lines = [line for line in error if ", line " in line]
    assert all("ends.py" in line for line in lines), error  # the learner's own lines


# -- operations of C++ that call a group by themselves ---------------------------------

CUTS = [  # shape, from which dimension to which
    ((4, 8), 0, 1), ((8, 4), 1, 0), ((5, 7), 0, 1), ((3, 2), 1, 0),
    ((4, 3, 8), 0, 2), ((5, 6, 7), 2, 1), ((2, 1, 9), 1, 2),
]  # fmt: skip


def cut_along_another_dimension() -> list:
    """This rank's parts of DTensors, as lists."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    found = []
    for shape, old, new in CUTS:
        x = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
        cut = distribute_tensor(x.to("cuda"), mesh, [Shard(old)]).requires_grad_()
        part = cut.redistribute(mesh, [Shard(new)])
        (gradient,) = torch.autograd.grad((part * part).sum(), cut)
        assert torch.equal(gradient.full_tensor().cpu(), 2 * x)
        found.append(part.to_local().tolist())
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_dtensor_cut_along_another_dimension(simulated_ranks, ranks):
    found = simulated_ranks(cut_along_another_dimension, ranks)
    for rank, its in enumerate(found):
        for (shape, _, new), part in zip(CUTS, its, strict=True):
            x = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
            pieces = [*x.chunk(ranks, new), *[x.narrow(new, 0, 0)] * ranks]
            assert part == pieces[rank].tolist()


@pytest.mark.skipif(TORCH < (2, 13), reason="2.11 has no check_for_nan")
def test_a_nan_is_found_on_the_gpu(group):
    check = torch.ops.c10d.check_for_nan
    assert check(torch.ones(3, device="cuda")) is None
    with pytest.raises(RuntimeError, match="NaN found in input tensor"):
        check(torch.tensor([1, float("nan")], device="cuda"))


@pytest.mark.skipif(TORCH < (2, 15), reason="PyTorch waits for one at a time")
def test_several_tensors_are_waited_for_at_once(group):
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    x = torch.ones(1 << 24, device="cuda")
    torch.cuda.synchronize()
    outs = [ops.all_reduce(x, "sum", name) for _ in range(2)]
    waited = ops.wait_tensors(outs)
    assert all(one is other for one, other in zip(waited, outs, strict=True))
    assert [memory_of(out).awaited for out in outs] == [None, None]
    outs = [torch.ones(1), ops.all_reduce(x, "sum", name)]  # the first is the host's
    ops.wait_tensors(outs)
    assert memory_of(outs[1]).awaited is None
