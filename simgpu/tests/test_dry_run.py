"""A dry run of functions, in this process: what a program is told, what is reported."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import simgpu
from recorded.models import Bottleneck
from simgpu import _runtime as state
from simgpu._compat import is_torch
from simgpu._device import overhead
from simgpu._device.cards import find_card
from simgpu._dry import command, kinds, words
from simgpu._dry.run import Job, run
from simgpu._messages import Messages
from support.limits import MOMENT


def steps(model, make_batch, given=None, count: int = 3) -> None:
    optimizer = torch.optim.SGD(given or model.parameters(), 0.1)
    for _ in range(count):
        model(make_batch()).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# -- what a program is told ------------------------------------------------------------


def test_an_overflow_flag_stays_down_through_steps_and_ranks():
    heard = []

    def program():
        dist.init_process_group("nccl")
        flag = torch.tensor([False], device="cuda")
        for _ in range(3):
            x = torch.randn(1024, 1024, device="cuda")
            flag.logical_or_((x @ x).isinf().any())
            told = flag.clone().to(torch.uint8)
            flag.zero_()
            dist.all_reduce(told, op=dist.ReduceOp.MAX)
            heard.append(told[0].item())

    run(Job(16), program)
    assert heard == [0, 0, 0]


# -- beside a run with values ----------------------------------------------------------


class Excitation(nn.Module):
    """As in MobileNet: each channel times a number."""

    def __init__(self, channels: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 8, 1), nn.SiLU(),
            nn.Conv2d(8, channels, 1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x):
        return x * self.layers(x)


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.MaxPool2d(3, 2, 1), Bottleneck(16, 4, 1), Bottleneck(16, 8, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def mobilenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish(),
        nn.Conv2d(16, 16, 3, 1, 1, groups=16, bias=False), nn.BatchNorm2d(16),
        nn.ReLU6(), Excitation(16), nn.Conv2d(16, 24, 1, bias=False),
        nn.BatchNorm2d(24), nn.Conv2d(24, 48, 5, 2, 2, groups=24), nn.Dropout(0.1),
        nn.AvgPool2d(2),
    )  # fmt: skip


def unet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(),
        nn.Conv2d(16, 32, 3, 2, 1), nn.ConvTranspose2d(32, 16, 2, 2, groups=2),
        nn.Upsample(scale_factor=2), nn.Conv2d(16, 8, 3, dilation=2),
        nn.LayerNorm(60), nn.InstanceNorm2d(8), nn.PixelShuffle(2),
    )  # fmt: skip


def film() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2),
        nn.Conv3d(8, 8, (1, 3, 3), groups=8), nn.ConvTranspose3d(8, 4, 2, 2),
    )  # fmt: skip


def sound() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 16, 5, 2), nn.BatchNorm1d(16), nn.GELU(),
        nn.Conv1d(16, 16, 3, groups=16), nn.ConvTranspose1d(16, 4, 4, 2),
    )  # fmt: skip


NETS = {  # a model -> a dimension of its input after channels, and their number
    resnet: (32, 2), mobilenet: (32, 2), unet: (32, 2), film: (8, 3), sound: (512, 1),
}  # fmt: skip


def costs(make, last: bool, more: str) -> dict:
    """What two steps of training take, on the GPUs of this process."""
    model, (size, dims) = make().cuda(), NETS[make]
    x = torch.randn(4, 3, *[size] * dims, device="cuda")
    if last:
        order = {2: torch.channels_last, 3: torch.channels_last_3d}[dims]
        model, x = model.to(memory_format=order), x.to(memory_format=order)
    if more == "frozen":  # statistics and the first layer stay what they are
        model.eval()
        model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    strides = []
    for layer in model:
        layer.register_forward_hook(lambda *its: strides.append(its[2].stride()))
    for _ in range(2):
        with torch.autocast("cuda", torch.float16, enabled=more == "autocast"):
            loss = model(x).float().mean()
        loss.backward()
        strides += [p.grad.stride() for p in model.parameters() if p.requires_grad]
        optimizer.step()
        optimizer.zero_grad()
    clock = state.current().clock
    clock.settle()
    kernels = [(e.name, e.nbytes, e.flops, e.end - e.start) for e in clock.events]
    return {"peak": torch.cuda.max_memory_allocated(), "strides": strides,
            "seconds": clock.total(), "kernels": kernels}  # fmt: skip


@pytest.mark.parametrize("more", ["", "autocast", "frozen"])
@pytest.mark.parametrize(
    "make, last",
    [(make, last) for make in NETS for last in (False, True) if make is not sound]
    + [(sound, False)],
    ids=lambda value: getattr(value, "__name__", ("", "last")[value is True]),
)
def test_images_take_the_bytes_and_the_time_that_they_take_with_values(
    make, last, more
):
    simgpu.start(1, "A100", races="off")
    try:
        expected = costs(make, last, more)
    finally:
        simgpu.stop()
    expected["seconds"] = pytest.approx(expected["seconds"], rel=1e-12)
    found = []
    run(Job(card="A100", steps=9), lambda: found.append(costs(make, last, more)))
    assert found[0] == expected


def test_mfu_counts_a_depthwise_convolution_as_much_as_it_is():
    def program():
        model = nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False).cuda()
        steps(model, lambda: torch.randn(8, 32, 64, 64, device="cuda"))

    found = run(Job(card="A100"), program)
    flops = found.mfu * found.step_seconds * find_card("A100").flops["bfloat16"]
    # forward, and the gradient of the weight
    assert flops == pytest.approx(2 * (2 * 8 * 64 * 64 * 32 * 9))


# -- kinds of ranks --------------------------------------------------------------------


def test_ranks_of_which_some_run_meet_in_the_group_of_all():
    def program():
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank() % 2)
        seed = torch.tensor(dist.get_rank(), device="cuda")
        dist.broadcast(seed, 0)
        assert seed.item() == 0
        pairs = [dist.new_group([i, i + 4]) for i in range(4)]
        mine = torch.tensor([dist.get_rank()], device="cuda")
        dist.all_reduce(mine, group=pairs[dist.get_rank() % 4])
        assert mine.item() == 4
        steps(nn.Linear(8, 8).cuda(), lambda: torch.ones(4, 8, device="cuda"))

    found = run(Job(8, node=2, kinds="pp=2"), program)
    assert found.ranks == [0, 4]
    assert found.steps == 3


def test_a_rank_may_take_as_long_to_end_as_it_has_run(monkeypatch, tmp_path):
    """Its last words are not lost where everything is slow."""
    monkeypatch.setattr(kinds, "_SECONDS_TO_END", 0.0)

    def rank(number: int, store: tuple[str, int]) -> SimpleNamespace:
        time.sleep(MOMENT)
        threading.Timer(MOMENT / 4, (tmp_path / str(number)).touch).start()
        return SimpleNamespace(fits=True)

    assert len(kinds.run_all((0, 4), rank)) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"0", "4"}


def test_of_several_kinds_each_figure_is_the_largest_whoever_has_it():
    """A tensor of 2 MiB is in a segment of 20, one of 12 MiB in one of its own."""

    def program():
        dist.init_process_group("nccl")
        torch.cuda.set_device(rank := dist.get_rank())
        torch.empty((12, 2)[rank] * 2**20, dtype=torch.uint8, device="cuda")

    found = run(Job(2, kinds="0,1"), program)
    assert found.peak_bytes == found.kinds[0].peak_bytes == 12 * 2**20
    assert found.reserved_bytes == found.kinds[1].reserved_bytes == 20 * 2**20
    assert found.used_bytes == found.kinds[1].used_bytes > 20 * 2**20


def test_a_dtensor_cut_along_another_dimension_is_a_message():
    """It counts its bytes, and takes as long as such an all-to-all, and some copies."""
    took, given = [], []

    def program():
        dist.init_process_group("nccl")
        torch.cuda.set_device(0)
        mesh = init_device_mesh("cuda", (16,))
        x = DTensor.from_local(
            torch.ones(256, 4096, device="cuda"), mesh, [Shard(0)], run_check=False
        )
        flat = torch.ones(256 * 4096, device="cuda")
        calls = (lambda: dist.all_to_all_single(torch.empty_like(flat), flat),
                 lambda: x.redistribute(mesh, [Shard(1)]))  # fmt: skip
        for call in calls:
            call()  # connects
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with Messages() as messages:
                begin.record()
                out = call()
                end.record()
            end.synchronize()
            took.append(begin.elapsed_time(end))
            given.append([(m.name, m.nbytes, m.ranks) for m in messages.log])
        assert out.to_local().shape == (4096, 256)
        if is_torch((2, 13)):  # 2.11 has no such operation
            torch.ops.c10d.check_for_nan(x.to_local())

    run(Job(16), program)
    assert given == [[("all_to_all", 4 << 20, 16)]] * 2
    assert took[0] < took[1] < 3 * took[0]


def test_a_loaders_thread_may_pin_while_a_collective_is_launched():
    def program():
        dist.init_process_group("nccl")
        torch.cuda.set_device(0)
        x, stop = torch.ones(4, device="cuda"), threading.Event()

        def pin():
            while not stop.is_set():
                torch.ones(8).pin_memory()

        with ThreadPoolExecutor() as pool:
            pinning = pool.submit(pin)
            for _ in range(500):
                dist.all_reduce(x)
            stop.set()
            pinning.result()  # raises its error
        steps(nn.Linear(8, 8).cuda(), lambda: torch.ones(4, 8, device="cuda"))

    assert run(Job(8), program).steps == 3


# -- what is reported ------------------------------------------------------------------


class Tables(nn.ModuleList):
    """Several tables of one shape, as value embeddings have."""

    def forward(self, tokens):
        return sum(table(tokens) for table in self)


def test_tokens_are_those_of_one_table_of_several():
    def program():
        tables = Tables(nn.Embedding(64, 16) for _ in range(4)).cuda()
        steps(tables, lambda: torch.ones(4, 10, dtype=int, device="cuda"))

    assert run(Job(8), program).tokens == 8 * 40  # with a mesh: test_dry_fed.py


def test_activations_of_a_split_model_are_no_messages():
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def program():
        mesh = init_device_mesh("cuda", (8,))
        model = nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 512))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(model.cuda(), mesh, plan)
        steps(model, lambda: torch.ones(8192, 512, device="cuda"))

    kinds = run(Job(8), program).memory_by_kind
    assert kinds["activations"] > 2 * 8192 * 512 * 4  # of ReLU alone
    assert kinds.get("communication", 0) <= 2 * 8192 * 512 * 4


@pytest.mark.parametrize("trains_all", [True, False])
@pytest.mark.parametrize("ranks", [1, 8])
def test_frozen_weights_are_parameters(ranks, trains_all):
    def program():
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
        model[:3].requires_grad_(False)
        model.cuda()
        if ranks > 1:
            dist.init_process_group("nccl")
            for part in [*model, model]:
                fully_shard(part)
        given = [p for p in model.parameters() if p.requires_grad or trains_all]
        steps(model, lambda: torch.randn(8, 1024, device="cuda"), given, count=2)

    kinds = run(Job(ranks, steps=2), program).memory_by_kind
    assert kinds["parameters"] == 4 * 4 * 1024**2 // ranks


@pytest.mark.parametrize("memory", [None, "23.69GiB", "128MB"])
def test_what_cuda_and_its_libraries_take_is_not_left(memory):
    def program():
        dist.init_process_group("nccl")
        dist.all_reduce(torch.ones(1, device="cuda"))
        x = torch.ones(64, 64, device="cuda")
        assert (x @ x).shape == (64, 64)

    found = run(Job(8, memory=memory), program)
    if memory == "128MB":  # no card has so little: an example
        assert found.used_bytes == found.reserved_bytes == 2 * 2**20
        assert "workspaces" not in found.memory_by_kind
        return
    libraries = overhead.CONTEXT + overhead.NCCL_BUFFERS
    assert found.used_bytes == found.reserved_bytes + libraries
    assert found.memory_by_kind["workspaces"] == 32 * 2**20  # cuBLAS's, of an H100
    left = found.total_bytes - found.used_bytes
    assert f"fits: {left / 2**30:.2f} GiB of" in str(found)


@pytest.mark.parametrize("free, fits", [(500, True), (400, False)])
def test_a_smaller_card_has_a_context_too(free, fits):
    def program():
        torch.empty(8 * 2**30 - free * 2**20, dtype=torch.uint8, device="cuda")

    assert run(Job(memory="8GiB"), program).fits is fits


def test_a_program_that_leaves_the_gpu_alone_has_no_rates():
    found = run(Job(), lambda: steps(nn.Linear(8, 8), lambda: torch.ones(4, 8)))
    assert (found.step_seconds, found.mfu, found.tokens_per_second) == (0.0, None, None)
    assert "nothing ran on the GPU" in str(found)


@pytest.mark.parametrize("name, expected", [
    ("all_reduce, all ranks", "all_reduce, all ranks"),
    ("all_reduce, ranks 0, 8", "all_reduce, ranks 0, 8"),
    ("send, ranks 1, 2, 3, 4 (group 2)", "send, ranks 1 to 4 (group 2)"),
    ("all_gather, ranks 0, 8, 16, 24", "all_gather, ranks 0 to 24 by 8"),
    ("all_gather, ranks 0, 1, 8, 9", "all_gather, ranks 0, 1, ... 9 (4)"),
])  # fmt: skip
def test_a_group_of_many_ranks_is_named_briefly(name, expected):
    assert words.briefly(name) == expected


# -- the command -----------------------------------------------------------------------


def test_the_traceback_of_a_program_that_fails_is_its_own(tmp_path, capsys):
    script = tmp_path / "fails.py"
    script.write_text("def f():\n    raise KeyError('x')\nf()\n")
    assert command.main(["--world", "2", str(script)]) == command.FAILED
    said = capsys.readouterr().err
    assert f'File "{script}", line 2, in f' in said
    assert "_dry" not in said


def test_torchrun_says_how_many_ranks(script):
    words = ["torchrun", "--nnodes=4", "--nproc-per-node=8", script, "--lr", "1"]
    options = command.read(words)
    assert (options.world, options.node) == (32, 8)
    assert (options.program, options.arguments) == (script, ["--lr", "1"])


PARSERS = {  # stand-ins: where a launcher's own module lies, and what it says
    "accelerate/commands/launch.py": """
import argparse, os, torch.distributed.run as run
default_config_file = "nowhere"
def launch_command_parser():
    made = argparse.ArgumentParser()
    for name in ("num_processes", "num_machines"):
        made.add_argument("--" + name, type=int)
    for name in ("use_fsdp", "use_deepspeed", "use_megatron_lm", "multi_gpu"):
        made.add_argument("--" + name, action="store_true")
    made.add_argument("--config_file")
    made.add_argument("script")
    made.add_argument("words", nargs=argparse.REMAINDER)
    return made
def _validate_launch_command(args):
    return args, None, False
def simple_launcher(args):
    raise SystemExit("one process")
def launch_command(args):
    args, _, _ = _validate_launch_command(args)
    if not (args.multi_gpu or args.use_fsdp):
        return simple_launcher(args)
    os.environ["ACCELERATE_USE_FSDP"] = str(args.use_fsdp).lower()
    each = args.num_processes // args.num_machines
    words = [f"--nproc-per-node={each}", args.script, *args.words]
    run.run(run.get_args_parser().parse_args(words))
""",
    "deepspeed/launcher/runner.py": """
import argparse
def parse_args(words):
    made = argparse.ArgumentParser()
    made.add_argument("--num_gpus", type=int, default=-1)
    made.add_argument("--num_nodes", type=int, default=-1)
    made.add_argument("--module", action="store_true")
    made.add_argument("--no_local_rank", action="store_true")
    made.add_argument("user_script")
    made.add_argument("user_args", nargs=argparse.REMAINDER)
    return made.parse_args(words)
""",
}


@pytest.fixture
def script(tmp_path, monkeypatch) -> str:
    """A script, and stand-ins for launchers, which a new process finds."""
    for name, text in PARSERS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        for folder in (path.parent, path.parent.parent):
            (folder / "__init__.py").touch()
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    monkeypatch.setattr(sys, "path", [*sys.path])  # a dry run adds its script's folder
    script = tmp_path / "train.py"
    script.touch()
    return str(script)


@pytest.mark.parametrize("before, words, world, node", [
    ([], ["--use_fsdp", "--num_processes=16", "--num_machines=4"], 16, 4),
    (["--world", "64"], ["--use_fsdp"], 64, None),
    (["--world", "64", "--node", "4"], ["--use_fsdp", "--num_processes=8"], 64, 4),
])  # fmt: skip
def test_accelerate_launch_says_what_the_environment_has(
    script, before, words, world, node
):
    found = command.read([*before, "accelerate", "launch", *words, script, "--x", "1"])
    assert (found.world, found.node) == (world, node)
    assert found.environ["ACCELERATE_USE_FSDP"] == "true"
    assert (found.program, found.arguments) == (script, ["--x", "1"])


def test_accelerate_launch_without_ranks_says_what_to_write(script, capfd):
    with pytest.raises(SystemExit):
        command.read(["accelerate", "launch", script])
    assert "write --world N" in capfd.readouterr().err


def test_deepspeed_tells_each_rank_its_place(script, tmp_path, capsys):
    words = ["deepspeed", "--num_gpus=4", "--num_nodes=2", script, "--stage", "1"]
    found = command.read(["--rank", "6", *words])
    assert (found.world, found.node) == (8, 4)
    (tmp_path / "train.py").write_text("import sys\nprint(*sys.argv[1:])")
    run(command.job_of(found), command.program_of(found))
    assert "--local_rank=2 --stage 1" in capsys.readouterr().out
