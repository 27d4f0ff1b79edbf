"""What a program reads of a dry run's values, writes of them, and what they cost."""

import io
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import simgpu
from simgpu._dry.run import Job, run
from simgpu._dry.wide import Chunks
from support.limits import JOB

MANY = 16_384


def dry(function, world: int = 8, **options):
    """What a function returns that runs in a dry run, and the report."""
    found = []
    report = run(Job(world, **options), lambda: found.append(function()))
    return found[0], report


def large(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (4096, 4096)), device="cuda")


def flag_of(x: torch.Tensor) -> torch.Tensor:
    flag = torch.zeros((), dtype=torch.bool, device="cuda")
    flag |= torch.isnan(x).any()
    return flag


# -- what is read ----------------------------------------------------------------------

ALARMS = {  # what a program asks of numbers that it fears -> what it hears
    "isnan any": (lambda x: torch.isnan(x).any(), False),
    "x != x": (lambda x: (x != x).any(), False),
    "isnan or isinf": (lambda x: (torch.isnan(x) | torch.isinf(x)).any(), False),
    "how many": (lambda x: torch.isnan(x).sum() > 0, False),
    "counted": (lambda x: x.isinf().sum(), 0),
    "as a number": (lambda x: torch.isnan(x).float().max(), 0.0),
    "either, as one": (lambda x: x.isnan().logical_or(x.isinf()).float().max(), 0.0),
    "isfinite all": (lambda x: torch.isfinite(x).all(), True),
    "isfinite any": (lambda x: torch.isfinite(x).any(), True),
    "not isfinite all": (lambda x: ~torch.isfinite(x).all(), False),
    "not finite, of the extremes": (
        lambda x: x.amax().isfinite().logical_and(x.amin().isfinite()).logical_not(),
        False,
    ),
    "copied over another": (lambda x: (x.sum() == 3).copy_(x.isinf().any()), False),
    "the sum of both > 0": (lambda x: (x.isinf().any() + x.isnan().any()) > 0, False),
    "gathered": (flag_of, False),
    "a mask": (lambda x: (x > 3).any(), False),
    "half": (lambda x: x.half().sum(), 1.0),
    "written with others": (lambda x: torch.zeros_like(x).zero_().add_(x)[0, 0], 1.0),
}


@pytest.mark.parametrize("name", ALARMS)
def test_nothing_has_gone_wrong(name):
    asks, expected = ALARMS[name]
    found, report = dry(lambda: asks(large()).item())
    assert found == expected and type(found) is type(expected)
    assert [read["value"] for read in report.unknown_reads] == [expected]


def test_a_gradient_scaler_finds_no_infinity_and_norms_are_finite():
    def trains():
        w, scaler = nn.Parameter(large()), torch.amp.GradScaler()
        optimizer = torch.optim.SGD([w], 0.1)
        scaler.scale((w.half() * 2).float().sum()).backward()
        norm = nn.utils.clip_grad_norm_([w], 1.0, error_if_nonfinite=True).item()
        scaler.step(optimizer)
        scaler.update()
        return norm, scaler.get_scale()

    assert dry(trains)[0] == (1.0, 65536.0)


@pytest.mark.parametrize("big", [False, True])
def test_numbers_that_are_read_are_finite(big):
    def reads():
        x = large(1 << 20)[:3000] if big else (large(4096) * 2)[:3]
        return x.tolist(), x.cpu().numpy(), np.asarray(x.cpu()), repr(x)

    (listed, array, other, _), report = dry(reads)
    assert set(listed) == {1.0} and (array == 1).all() and (other == 1).all()
    assert [read["value"] for read in report.unknown_reads].count(1.0) == 1
    assert 0 in [read["value"] for read in report.unknown_reads]  # printed


@pytest.mark.parametrize(
    "op, whole",
    [("SUM", [4, 8, 12, 16]), ("AVG", [1, 2, 3, 4]), ("MAX", [1, 2, 3, 4]),
     ("PRODUCT", [1, 16, 81, 256])],
)  # fmt: skip
def test_whole_numbers_are_reduced_as_if_all_ranks_gave_the_same(op, whole):
    """Of what is scattered, each has its own part."""

    def program():
        dist.init_process_group("nccl")
        x, how = torch.arange(1, 5, device="cuda"), getattr(dist.ReduceOp, op)
        dist.reduce_scatter_tensor(part := x[:1] + 0, x, how)
        dist.all_reduce(x, how)
        return x.tolist(), part.tolist()

    for rank in (0, 2):
        assert dry(program, 4, rank=rank)[0] == (whole, whole[rank : rank + 1])


def test_whole_numbers_that_move_are_those_of_this_rank():
    def program():
        dist.init_process_group("nccl")
        x = torch.arange(8, device="cuda")
        gathered, part = (torch.empty(n, dtype=x.dtype, device="cuda") for n in (32, 2))
        dist.all_gather_into_tensor(gathered, x)
        dist.scatter(part, list(x.split(2)), src=2)
        dist.all_to_all_single(exchanged := x + 0, x)
        return gathered.tolist(), part.tolist(), exchanged.tolist()

    assert dry(program, 4, rank=2)[0] == ([*range(8)] * 4, [4, 5], [4, 5] * 4)


def test_what_the_host_has_made_keeps_its_values():
    batch = np.arange(12, dtype=np.float32).reshape(3, 4)
    found, report = dry(lambda: torch.from_numpy(batch).sum().item())
    assert found == 66.0 and not report.unknown_reads


def test_results_that_a_program_checks_are_close_and_masks_may_be_set():
    def checks():
        x = large()
        torch.testing.assert_close(x, x * 2)
        found = torch.allclose(x, x * 2), torch.equal(x, x * 2)
        x[x > 0] = 0
        return *found, x.shape

    assert dry(checks)[0] == (True, True, (4096, 4096))


# -- checkpoints -----------------------------------------------------------------------


@pytest.mark.parametrize("to", ["file", "stream"])
def test_a_checkpoint_has_shapes_and_small_values(to, tmp_path):
    file = tmp_path / "model.pt" if to == "file" else io.BytesIO()

    def saves():
        state = {"w": large(), "rng": torch.get_rng_state(), "steps": torch.arange(3)}
        torch.save(state, file)
        if to == "stream":
            file.seek(0)
        return state, torch.load(file)

    (state, found), report = dry(saves)
    assert found["w"].shape == (4096, 4096) and found["steps"].tolist() == [0, 1, 2]
    assert torch.equal(found["rng"], state["rng"])
    assert any("without these values" in str(r["value"]) for r in report.unknown_reads)
    if to == "file":
        assert file.stat().st_size > 64 * 2**20
        assert file.stat().st_blocks * 512 < 2**20  # a hole


def test_a_checkpoint_with_values_is_read_for_its_shapes(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(1024, 1024), "step": torch.tensor(7)}, path)

    def loads():
        found = torch.load(path, map_location="cuda", mmap=False)
        model = nn.Linear(1024, 1024, bias=False, device="cuda")
        model.load_state_dict({"weight": found["w"]})
        return found["step"].item(), found["w"].device.type

    assert dry(loads)[0] == (7, "cuda")


@pytest.mark.parametrize("world", [8, MANY])
def test_a_distributed_checkpoint(world, tmp_path):
    def saves():
        dist.init_process_group("nccl")
        model = nn.Linear(8192, 8192, device="cuda")
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 8192, device="cuda")).sum().backward()
        optimizer.step()
        weights, states = get_state_dict(model, optimizer)
        state = {"m": weights, "o": states, "n": torch.tensor(7)}
        dcp.save(state, checkpoint_id=tmp_path)
        state["n"] = torch.tensor(0)
        dcp.load(state, checkpoint_id=tmp_path)
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=states
        )
        return state["n"].item()

    assert dry(saves, world)[0] == 7
    assert sum(f.stat().st_blocks * 512 for f in tmp_path.iterdir()) < 2**20


# -- what it costs ---------------------------------------------------------------------


@pytest.mark.parametrize("size, count", [(10, 4), (3, 8), (8, 8), (0, 4), (7, 1)])
def test_chunks_are_those_of_pytorch(size, count):
    whole = torch.arange(size * 2.0).view(size, 2)
    expected = list(torch.chunk(whole, count, dim=0))
    expected += [whole.new_empty(0)] * (count - len(expected))
    found = Chunks(whole, count, 0)
    assert len(found) == count
    assert all(map(torch.equal, found, expected))


MEASURES = """
import ctypes, gc, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from simgpu._dry.run import Job, run

def megabytes(name):
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith(name))
    return int(line.split()[1]) / 1024

def measure(world, program):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free is not had already
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is what is had now
    before, began = megabytes("VmRSS"), time.process_time()
    run(Job(world), program)
    print(megabytes("VmHWM") - before, time.process_time() - began)
"""


def measured(*programs: tuple[int, str]) -> list[tuple[float, float]]:
    """The megabytes that a dry run adds to a process at most, and its seconds of a CPU.

    Of one after another, in a process of their own. Not by `ru_maxrss`, which begins
    with the most that the process had that has started this one.

    Args:
        programs: how many ranks, and the statements of each, on a line.
    """
    code = MEASURES
    for world, statements in programs:
        code += f"def program(): {statements}\nmeasure({world}, program)\n"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        timeout=JOB, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [tuple(map(float, line.split())) for line in done.stdout.splitlines()]


TRAINS = (
    "dist.init_process_group('nccl');"
    "torch.cuda.set_device(0);"
    "model = {};"
    "o = torch.optim.AdamW(model.parameters());"
    "[(model({}).float().sum().backward(), o.step(), o.zero_grad()) for _ in range(3)]"
)
OF_FSDP1 = (
    "torch.distributed.fsdp.FullyShardedDataParallel("
    "nn.Linear({0}, {0}, bias=False, device='meta').bfloat16(), device_id=0, "
    "param_init_fn=lambda m: m.to_empty(device='cuda', recurse=False))"
)
LARGE = {  # what is gathered in one piece -> ranks, the model, its input
    "a table of Qwen 2.5 under FSDP2": (
        8,
        "fully_shard(nn.Embedding(152064, 3584, device='meta').bfloat16())"
        ".to_empty(device='cuda')",
        "torch.randint(1000, (2, 128), device='cuda')",
    ),
    "a unit of 2 GiB under FSDP1": (
        8,
        OF_FSDP1.format(2**15),
        "torch.randn(2, 2**15, device='cuda', dtype=torch.bfloat16)",
    ),
    "a unit larger than this machine": (
        1024,
        OF_FSDP1.format(2**17),
        "torch.randn(2, 2**17, device='cuda', dtype=torch.bfloat16)",
    ),
}


LAYERS = (
    "dist.init_process_group('nccl');"
    "m = nn.Sequential(*[nn.Linear({0}, {0}, device='meta') for _ in range(8)]);"
    "[fully_shard(l) for l in m]; fully_shard(m); m.to_empty(device='cuda');"
    "o = torch.optim.AdamW(m.parameters(), fused=True);"
    "x = torch.randn(8, {0}, device='cuda');"
    "[(m(x).sum().backward(), o.step(), o.zero_grad()) for _ in range(3)]"
)
PROGRAMS = {  # what it is -> ranks, its statements
    "the first one, which imports": (8, LAYERS.format(8)),
    "tensors of 14 GB on the host": (
        8,
        "m = nn.Linear(60_000, 60_000); nn.init.orthogonal_(m.weight); m.bfloat16();"
        "x = torch.randn(60_000, 60_000); (x * 2 + 1).cuda().sum().item();"
        "x = torch.zeros(60_000, 60_000); x.fill_(3); x.clone().normal_().tril();"
        "torch.save(m.state_dict(), '/dev/null')",
    ),
    "1.8 GB of offloaded parameters, four times": (
        2,
        "from torch.distributed.fsdp import CPUOffloadPolicy;"
        "dist.init_process_group('nccl');"
        "m = nn.Linear(30_000, 30_000, device='meta');"
        "fully_shard(m, offload_policy=CPUOffloadPolicy()); m.to_empty(device='cpu');"
        "o = torch.optim.AdamW(m.parameters(), fused=True);"
        "step = lambda: (m(torch.ones(1, 30_000, device='cuda')).sum().backward(),"
        " o.step());"
        "step(); step()",
    ),
    **{
        name: (ranks, TRAINS.format(model, batch))
        for name, (ranks, model, batch) in LARGE.items()
    },
    "few ranks": (8, LAYERS.format(8192)),
    "many ranks": (MANY, LAYERS.format(8192)),
}


@pytest.fixture(scope="module")
def costs() -> dict[str, tuple[float, float]]:
    """Megabytes and seconds of each of `PROGRAMS`."""
    if sys.platform != "linux":
        pytest.skip("memory as Linux counts it")
    return dict(zip(PROGRAMS, measured(*PROGRAMS.values()), strict=True))


@pytest.mark.parametrize("name", list(PROGRAMS)[1:])
def test_tensors_of_any_size_take_no_memory(costs, name):
    assert costs[name][0] < 50


def test_many_ranks_cost_as_little_as_few(costs):
    few, many = costs["few ranks"], costs["many ranks"]
    assert many[0] < few[0] + 50
    assert many[1] < 2 * few[1] + 2


@pytest.mark.skipif(sys.platform != "linux", reason="memory as Linux counts it")
def test_what_is_larger_than_this_machine_is_like_any_other_tensor():
    def program():
        huge = torch.ones(2**33, device="cuda", requires_grad=True) * 2  # 32 GiB
        assert not huge._is_view()
        huge.add_(1).sum().backward()
        return huge.shape, huge[-1].item()

    assert dry(program, card="H200")[0] == ((2**33,), 1.0)


@pytest.mark.parametrize("numbers, said", [(2**10, False), (2**18, True)])
def test_numbers_that_are_known_are_written_while_they_are_few(tmp_path, numbers, said):
    path = tmp_path / "tokens.pt"
    report = dry(lambda: torch.save(torch.arange(numbers), path))[1]
    assert ("a file of shapes, without these values" in str(report)) == said
    last = torch.load(path)[-1].item()
    assert last == (0 if said else numbers - 1)


@pytest.mark.packages
def test_a_file_of_safetensors_that_was_there_stays(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    old.write_text("dear")

    def program():
        weights = {"weight": torch.randn(64, 64, device="cuda").cpu()}
        for path in (old, new, new):
            save_file(weights, path)

    report = dry(program)[1]
    assert old.read_text() == "dear" and new.stat().st_size > 64 * 64 * 4
    assert "old.safetensors is there, and stays as it is" in str(report)


def test_memory_of_any_size_is_had_and_what_the_machine_has_is_resized():
    def sizes():
        small, large = (
            torch.empty(n, dtype=torch.bfloat16, device="cuda")
            for n in (2**29 + 1, 2**31)  # FSDP frees what it gathered like this
        )
        for tensor in (small, large):
            storage = tensor.untyped_storage()
            nbytes = storage.nbytes()
            storage.resize_(0)
            assert torch.cuda.memory_allocated() < 6 * 2**30
            storage.resize_(nbytes)
        more = torch.empty(40 * 2**30, dtype=torch.uint8, device="cuda")
        return (more + 1).shape[0], torch.cuda.memory_allocated() // 2**30

    assert dry(sizes, card="B200")[0] == (40 * 2**30, 45)  # 1, 4 and 40 GiB


HUGE = 60 * 2**30  # bytes: more than this machine has


def nbytes_of(x: torch.Tensor) -> tuple[int, int]:
    """What a storage says of its size, and what the card has for it, in GiB."""
    torch.cuda.synchronize()
    return x.untyped_storage().nbytes() >> 30, torch.cuda.memory_allocated() >> 30


RESIZES = {  # what a program does to a tensor of 60 GiB -> GiB afterwards
    "freed": (lambda x: x.untyped_storage().resize_(0), 0),
    "freed and back": (
        lambda x: x.untyped_storage().resize_(0).resize_(HUGE),
        60,
    ),
    "freed and half of it": (
        lambda x: x.untyped_storage().resize_(0).resize_(HUGE // 2),
        30,
    ),
    "a typed one": (lambda x: x._typed_storage()._resize_(2**30), 1),
    "an operation": (
        lambda x: torch.ops.inductor.resize_storage_bytes_(x, 2**30),
        1,
    ),
    "smaller": (lambda x: x.resize_(2**30), 60),  # the storage stays
    "larger": (lambda x: x.resize_(HUGE + 2**30), 61),
    "freed and larger": (
        lambda x: (x.untyped_storage().resize_(0), x.resize_(HUGE + 2**30)),
        61,
    ),
    "like another": (
        lambda x: x.resize_as_(torch.empty(HUGE + 2**30, device="meta")),
        61,
    ),
}


def test_what_grows_beyond_this_machine():
    def program():
        x, y = (torch.empty(0, dtype=torch.uint8, device="cuda") for _ in range(2))
        x.resize_(HUGE)
        torch.add(x, 1, out=y)
        return y.shape, nbytes_of(y)

    assert dry(program, card="B200")[0] == ((HUGE,), (60, 120))


@pytest.mark.parametrize("on", ["cuda", "cpu"])
@pytest.mark.parametrize("name", RESIZES)
def test_storages_larger_than_this_machine_change_their_size(name, on):
    resizes, expected = RESIZES[name]

    def program():
        x = torch.empty(HUGE, dtype=torch.uint8, device=on)
        resizes(x)
        return nbytes_of(x)

    found, _ = dry(program, card="B200")
    assert found == (expected, expected if on == "cuda" else 0)


def test_a_small_storage_that_grows_beyond_this_machine_is_refused_by_name():
    def program():
        x = torch.empty(4, device="cuda")
        try:
            x.untyped_storage().resize_(HUGE)
        except simgpu.NotSimulated as error:  # or this machine has that much
            return "more than this machine has" in str(error)
        return nbytes_of(x) == (60, 60)

    assert dry(program, card="B200")[0]


def test_a_storage_that_the_program_made_keeps_pytorchs_words():
    def program():
        mine = torch.from_numpy(np.zeros(4)).untyped_storage()
        with pytest.raises(RuntimeError, match="storage that is not resizable"):
            mine.resize_(64)
        known = torch.arange(4, device="cuda").resize_(6)
        return known[:4].tolist()

    assert dry(program)[0] == [0, 1, 2, 3]


def test_large_tensors_of_a_program_on_meta_stay_there():
    """Above 1 GiB, too: what is split or loaded later is told by `is_meta`."""
    found = []

    def program():
        with torch.device("meta"):
            weight = nn.Linear(2**15, 2**14, bias=False).weight
            found.extend([weight, torch.zeros(2**29), torch.randn(2**29)])
        found.extend(
            [weight.bfloat16(), torch.empty_like(weight), weight.new_ones(2**29)]
        )
        found.append(torch.empty(2**29, device="meta"))
        assert torch.empty_like(weight, device="cuda").is_cuda
        found.append(torch.cuda.memory_allocated())

    run(Job(), program)
    assert found.pop() == 0
    assert all(tensor.is_meta for tensor in found)
