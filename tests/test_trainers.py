"""The trainers of `notebooks/scripts/trainer`: each equals one GPU, in every layout.

One GPU trains a tiny Llama without anything that is parallel. All the others have its
losses, gradient norms and test losses, and in the end its weights.
"""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from support import checkout
from support.limits import JOB
from tests.launching import ROOT, SCRIPTS, WarmRanks, environment, load

TRAINERS = SCRIPTS / "trainer"
STEPS = 4  # of "tiny", and of "tiny-tied", which has one head of keys


class Ran(NamedTuple):
    """What a training has left."""

    lines: list[dict]
    folder: Path

    def column(self, name: str) -> list[float]:
        return [line[name] for line in self.lines if name in line]


COMMON = "--data=text --workers=0 --float32 --every=2"


def command(trainer, ranks, options, files=TRAINERS) -> list[str]:
    """The words that start a trainer on as many simulated GPUs as it has ranks."""
    launcher = ["torchrun", "--standalone", f"--nproc-per-node={ranks}"]
    words = [sys.executable, "-m", "simgpu", "--gpus", str(ranks)]
    words += [] if trainer == "one" else launcher
    return [*words, str(files / f"{trainer}.py"), *COMMON.split(), *options.split()]


def started(words, folder: Path, data=None) -> subprocess.CompletedProcess:
    (folder / "text").write_bytes(data or text())
    with environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)) as environ:
        return subprocess.run(
            words,
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=JOB,
        )


WARM = WarmRanks()


@pytest.fixture(scope="module", autouse=True)
def _end_of_the_ranks():
    yield
    WARM.close()


def train(trainer, ranks, options, folder: Path, files=TRAINERS, data=None) -> Ran:
    (folder / "text").write_bytes(data or text())
    words = [*COMMON.split(), *options.split()]
    printed = WARM.run(files / f"{trainer}.py", ranks, words, folder)
    return Ran(lines_of(printed), folder)


def lines_of(printed: str) -> list[dict]:
    lines = (line for line in printed.splitlines() if line.startswith("{"))
    return [json.loads(line) for line in lines]


def text() -> bytes:
    """Words in a random order, of documents that end with a zero."""
    generator = torch.Generator().manual_seed(1)
    words = [bytes([97 + i % 23, 98 + i % 7, 99 + i % 5]) for i in range(40)]
    order = torch.randint(0, 40, (8000,), generator=generator).tolist()
    return b" ".join(words[i] + b"\0" * (k % 50 == 49) for k, i in enumerate(order))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """What one GPU does with a size and these options, computed once."""
    ran = {}

    def of(size: str, options: str = "", files: Path = TRAINERS) -> Ran:
        key = size, options, files
        if key not in ran:
            folder = tmp_path_factory.mktemp("one")
            settings = f"--size={size} --steps={STEPS} --folder=saved {options}"
            ran[key] = train("one", 1, settings, folder, files)
        return ran[key]

    return of


def must_equal(found: Ran, expected: Ran) -> None:
    for name in ("step", "loss", "norm", "test"):
        assert found.column(name) == pytest.approx(expected.column(name), abs=2e-5), (
            name
        )


def weights(ran: Ran, step: int = STEPS) -> dict[str, torch.Tensor]:
    """What `export.py` reads of a checkpoint."""
    return load("trainer/export.py").weights_of(ran.folder / f"saved/step-{step:06}")


def weights_must_equal(found: Ran, expected: Ran) -> None:
    mine, theirs = weights(found), weights(expected)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        # AdamW makes whole steps of gradients that are nearly zero: 1 % of four steps
        torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-4)


MODELS = ROOT / "tests" / "models"
# model's file -> its data's file, and the trainers that suit it, with their options
BROUGHT = {
    "vit": ("images", ("fsdp", "whole --stages=2 --accumulate=2")),
    "resnet": ("images", ("ddp",)),
    "lora": (None, ("fsdp",)),
    "hf_llama": (None, ("ddp", "fsdp", "whole --stages=2 --accumulate=2")),
    "hf_gpt2": (None, ("fsdp", "stages --accumulate=4")),
}


@pytest.fixture(scope="module")
def brought(tmp_path_factory):
    """The trainers' folder, with another model in the place of the course's."""
    made = {}

    def of(model: str) -> Path:
        if model not in made:
            made[model] = tmp_path_factory.mktemp(model) / "trainer"
            shutil.copytree(TRAINERS, made[model])
            shutil.copy(TRAINERS / "model.py", made[model] / "llama.py")
            shutil.copy(MODELS / f"{model}.py", made[model] / "model.py")
            data = BROUGHT[model][0]
            if data:
                shutil.copy(MODELS / f"{data}.py", made[model] / "data.py")
        return made[model]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, way",
    [
        pytest.param(model, way, marks=pytest.mark.long if way == "fsdp" else ())
        for model, (_, ways) in BROUGHT.items()
        for way in ways
    ],
)
def test_a_model_that_a_user_brings_equals_one_gpu(one, tmp_path, brought, model, way):
    if model.startswith("hf_"):
        pytest.importorskip("transformers")
    files = brought(model)
    expected = one("tiny", "", files)
    trainer, _, options = way.partition(" ")
    settings = f"--size=tiny --steps={STEPS} --folder=saved {options}"
    ran = train(trainer, 2, settings, tmp_path, files)
    must_equal(ran, expected)
    weights_must_equal(ran, expected)
    if trainer != "fsdp":
        return
    shutil.rmtree(tmp_path / "saved" / f"step-{STEPS:06}")
    again = train(trainer, 2, settings, tmp_path, files)
    assert again.column("step") == [2, 3, 3]
    weights_must_equal(again, expected)


def test_a_model_that_a_user_brings_takes_at_most_forty_lines():
    files = [MODELS / f"{model}.py" for model in BROUGHT]
    lines = [len(file.read_text("utf-8").splitlines()) for file in files]
    assert max(lines) <= 40


LAYOUTS = [  # trainer, ranks, its options
    ("ddp", 2, ""),
    ("fsdp", 2, ""),
    ("slices", 2, ""),
    ("stages", 2, "--accumulate=4"),
]
LARGER = [
    ("ddp", 3, "--size=tiny --accumulate=2"),
    ("fsdp", 3, "--size=tiny-tied --recompute --accumulate=2"),
    ("slices", 4, "--size=tiny-tied"),
    ("long", 4, "--size=tiny --cp=2"),
    ("ddp", 4, "--size=tiny-experts"),
    ("experts", 4, "--size=tiny-experts --ep=2"),
    ("meshes", 4, "--size=tiny-tied --tp=2"),
    ("whole", 8, "--size=tiny-tied --stages=2 --tp=2 --accumulate=4"),
]
ONCE = ("experts", "long", "meshes")  # have no smaller layout above
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "trainer, ranks, options",
    [
        pytest.param(*layout, marks=() if layout[0] in ("fsdp", "stages") else SLOW)
        for layout in LAYOUTS
    ],
)
def test_a_layout_equals_one_gpu(one, tmp_path, trainer, ranks, options):
    size = "tiny" if trainer == "ddp" else "tiny-tied"
    must_be_that_of_one_gpu(
        one, tmp_path, trainer, ranks, f"--size={size} {options}", size
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer, ranks, options",
    [
        pytest.param(*layout, marks=() if layout[0] in ONCE else pytest.mark.long)
        for layout in LARGER
    ],
)
def test_a_larger_layout_equals_one_gpu(one, tmp_path, trainer, ranks, options):
    size = options.split()[0].removeprefix("--size=")
    must_be_that_of_one_gpu(one, tmp_path, trainer, ranks, options, size)


def must_be_that_of_one_gpu(one, folder, trainer, ranks, options, size) -> None:
    settings = f"{options} --steps={STEPS} --folder=saved"
    ran = train(trainer, ranks, settings, folder)
    must_equal(ran, one(size))
    weights_must_equal(ran, one(size))


def test_a_frozen_norm_stays_frozen_in_slices(tmp_path):
    """PyTorch's `SequenceParallel` makes parameters that learn."""
    styles = load(TRAINERS / "styles.py")
    norm = torch.nn.LayerNorm(4)
    norm.bias.requires_grad_(False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        parallelize_module(norm, mesh, styles.styles_of({"": "tokens"})[""])
    finally:
        dist.destroy_process_group()
    assert isinstance(norm.bias, DTensor)
    assert norm.weight.requires_grad and not norm.bias.requires_grad


def test_what_is_learned_is_learned(one):
    losses = one("tiny").column("loss")
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.95 * losses[0]
    tests = one("tiny").column("test")
    assert len(tests) == 2 and tests[1] < tests[0]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "first, then",
    [
        (("stages", 2, "--accumulate=4"), ("fsdp", 3, "")),
        (("meshes", 4, "--tp=2"), ("stages", 3, "--accumulate=4")),
    ],
)
def test_one_layout_goes_on_where_another_stopped(one, tmp_path, first, then):
    whole = one("tiny-tied")
    trainer, ranks, options = first
    settings = "--size=tiny-tied --folder=saved --steps="
    train(trainer, ranks, f"{settings}{STEPS} {options}", tmp_path)
    # as if it had been stopped after step 2
    shutil.rmtree(tmp_path / "saved" / f"step-{STEPS:06}")
    trainer, ranks, options = then
    ran = train(trainer, ranks, f"{settings}{STEPS} {options}", tmp_path)
    assert ran.column("step") == [2, 3, 3]
    for name, count in (("loss", 2), ("norm", 2), ("test", 1)):
        expected = whole.column(name)[-count:]
        assert ran.column(name) == pytest.approx(expected, abs=2e-5)
    weights_must_equal(ran, whole)


@pytest.mark.slow
def test_another_batch_does_not_go_on_at_another_place_of_the_data(one):
    ran = one("tiny")
    options = f"--size=tiny --steps={STEPS + 1} --folder=saved --batch=8"
    done = started(command("one", 1, options), ran.folder)
    assert done.returncode != 0
    assert "was written with --batch=16 --context=" in done.stderr
    assert "with --batch=8 --context=" in done.stderr


def test_another_text_has_other_rows(tmp_path):
    """What `load` compares; it is an error if it differs."""
    common, model = module_of("common.py"), torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    args = common.options([f"--data={tmp_path / 'text'}"])
    reads = []
    for size in (100, 101):
        args.data.write_bytes(b"a" * size)
        reads.append(common.state_of(model, optimizer, args)[0]["read"])
    assert [read.partition(" --data")[2] for read in reads] == [
        " of 100 bytes",
        " of 101 bytes",
    ]


def test_a_batch_norm_of_each_rank_is_refused_and_one_of_all_ranks_is_not():
    common = module_of("common.py")
    plain, frozen = torch.nn.BatchNorm2d(3), torch.nn.BatchNorm1d(3).eval()
    assert common.is_own_norm(plain)
    for right in (torch.nn.SyncBatchNorm(3), frozen, torch.nn.LayerNorm(3)):
        assert not common.is_own_norm(right)


def test_a_start_file_with_another_shape_is_refused(tmp_path):
    """A head of one row would be repeated for all 256 of this model."""
    values, head = module_of("values.py"), torch.nn.Linear(8, 256, bias=False)
    torch.save({"weight": torch.ones(1, 8)}, tmp_path / "given.pt")
    with pytest.raises(ValueError, match=r"weight: \(1, 8\) in .*, \(256, 8\) in the"):
        values.receive(head, tmp_path / "given.pt")


@pytest.mark.slow
def test_a_start_file_without_a_parameter_is_named(one, tmp_path):
    given = weights(one("tiny"))
    del given["blocks.2.norm1.weight"]
    torch.save(given, tmp_path / "given.pt")
    done = started(command("one", 1, "--size=tiny --weights=given.pt"), tmp_path)
    assert done.returncode and "no blocks.2.norm1.weight" in done.stderr


@pytest.mark.slow
def test_training_starts_from_the_file_that_is_given(one, tmp_path):
    given, start = weights(one("tiny-tied")), "--size=tiny-tied --weights=given.pt"
    torch.save(given, tmp_path / "given.pt")
    alone, shards = (
        train(trainer, ranks, f"{start} --steps=1", tmp_path)
        for trainer, ranks in (("one", 1), ("fsdp", 3))
    )
    must_equal(shards, alone)
    assert alone.column("loss")[0] < one("tiny-tied").column("loss")[-1]


@pytest.mark.long
@pytest.mark.slow
def test_a_ring_equals_one_gpu(tmp_path):
    (tmp_path / "one").mkdir()
    options = f"--size=tiny --context=128 --batch=8 --steps={STEPS} --folder=saved"
    plain = text().replace(b"\0", b" ")  # a ring takes no documents
    expected = train("one", 1, options, tmp_path / "one", data=plain)
    found = train("ring", 4, f"{options} --cp=2", tmp_path, data=plain)
    must_equal(found, expected)
    weights_must_equal(found, expected)


@pytest.mark.long
@pytest.mark.slow
def test_shards_train_what_one_card_refuses(tmp_path):
    options, little = "--size=tiny --steps=2", ["--memory", "30MB"]
    words = command("one", 1, options)
    alone = started([*words[:3], *little, *words[3:]], tmp_path)
    assert alone.returncode and "CUDA out of memory" in alone.stderr
    words = command("fsdp", 4, options)
    shards = started([*words[:3], *little, *words[3:]], tmp_path)
    assert shards.returncode == 0, shards.stderr


@pytest.mark.slow
def test_a_step_does_not_take_the_time_of_a_test(one):
    """Steps 1 and 3 follow one and a test, steps 0 and 2 do not."""
    rates = one("tiny").column("tokens_per_s")
    assert rates[2] == pytest.approx(rates[3], rel=0.02)


def module_of(name: str):
    """A file of the trainers, which finds its neighbours."""
    try:
        with mock.patch.object(sys, "path", [str(TRAINERS), *sys.path]):
            return load(f"trainer/{name}")
    finally:  # other tests have a `model` of their own; PyTorch's modules stay
        for file in checkout.here(TRAINERS, "*.py"):
            sys.modules.pop(file.stem, None)


@pytest.mark.parametrize(
    "tensor, lacks",
    [
        (torch.tensor([1.0, float("nan")]), True),
        (torch.full((3,), 127, dtype=torch.int8), True),
        (torch.tensor([127, 3], dtype=torch.int8), False),  # a value like others
        (torch.tensor(0), False),
        (torch.empty(0, dtype=torch.int64), False),
        (torch.zeros(2, dtype=torch.bool), False),
    ],
)
def test_a_tensor_without_values_is_noticed(tensor, lacks):
    assert module_of("values.py").missing(tensor) is lacks


def test_biases_even_out_the_work_of_experts():
    its = module_of("model.py")
    torch.manual_seed(0)
    moe = its.MoE(its.SIZES["tiny-experts"]).train()
    moe.bias.data.zero_()
    for p in moe.parameters():
        torch.nn.init.normal_(p, std=0.2)
    tokens = torch.randn(1, 512, 64) + 0.2  # a mean, which favours some experts

    def work() -> torch.Tensor:
        moe(tokens)
        return moe.counts / moe.counts.sum()

    before = work().max()
    for _ in range(400):
        moe.adjust(lambda tensor: None)
        after = work().max()
    assert before > 0.32 and after < 0.26  # a quarter is even


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer, ranks, options, why",
    [
        ("ddp", 4, "--batch=3", "has no row for each of 4 ranks"),
        ("one", 1, "--context=4096", "less than a batch of 16"),
        ("slices", 3, "", "3 ranks cannot share 4 heads"),
        ("stages", 5, "--accumulate=8", "4 blocks are too few for 5 stages"),
        ("one", 1, "--size=huge", "--size is one of tiny"),
        ("ring", 2, "--context=128 --batch=8 --cp=2", "takes no mask, so no documents"),
    ],
)
def test_what_cannot_be_says_why(tmp_path, trainer, ranks, options, why):
    done = started(command(trainer, ranks, options), tmp_path)
    assert done.returncode and why in done.stderr, done.stderr


def test_a_checkpoint_becomes_one_file(one, tmp_path):
    ran = train("fsdp", 2, f"--size=tiny --steps={STEPS} --folder=saved", tmp_path)
    must_equal(ran, one("tiny"))
    words = [sys.executable, str(TRAINERS / "export.py"), f"saved/step-{STEPS:06}"]
    done = started([*words, "model.pt"], tmp_path)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert found.keys() == weights(one("tiny")).keys()


@pytest.mark.slow
@pytest.mark.parametrize("trainer, ranks", [("fsdp", 2)])
def test_a_job_that_is_asked_to_end_saves_first(tmp_path, trainer, ranks):
    (tmp_path / "text").write_bytes(text())
    options = "--steps=100000 --folder=saved --every=50000 --workers=1"
    options += " --show=2"  # asked in a step without a line, too
    words = command(trainer, ranks, options)
    with environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)) as environ:
        process = subprocess.Popen(
            words, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
        )
        try:
            steps = [json.loads(process.stdout.readline())["step"] for _ in range(3)]
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=JOB)
        finally:
            process.kill()
    last = lines_of(rest)[-1]
    assert steps == [1, 3, 5] and "test" not in last  # a test might take too long
    (saved,) = (tmp_path / "saved").glob("step-*/.metadata")
    assert int(saved.parent.name[5:]) - last["step"] in (1, 2)


@pytest.mark.long
@pytest.mark.slow
def test_a_step_of_a_large_model_is_near_a_published_one(tmp_path):
    """torchtitan on 64 A100, 70B, all blocks again in backward: 331 tokens/s of a GPU.

    Source: its docs/performance.md (see `published_runs.py`).
    """
    simulated = "-m simgpu dry-run --world 64 --card A100 --json report.json"
    options = "--data=text --workers=0 --size=70b --context=8192 --batch=64 --recompute"
    words = [*simulated.split(), str(TRAINERS / "fsdp.py"), *options.split()]
    done = started([sys.executable, *words], tmp_path, bytes(range(1, 251)) * 48_000)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["fits"] and report["unknown_reads"]
    assert report["tokens_per_second"] / 64 == pytest.approx(331, rel=0.3)


@pytest.mark.slow
def test_a_timeline_is_written(tmp_path):
    train("one", 1, "--size=tiny --steps=5 --profile=trace.json", tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum("ProfilerStep" in event["name"] for event in events) >= 2
