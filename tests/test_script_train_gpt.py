"""`train_gpt.py`: every way takes the steps of one process, and goes on from any."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import helpers
from helpers import simgpu, text
from tests.launching import (
    NOTEBOOKS,
    SCRIPTS,
    in_ranks,
    last_calls,
    prose_of,
    text_of,
    train_elastic,
)

sys.path.insert(0, str(NOTEBOOKS))
from scripts import train_gpt  # noqa: E402

GPT = "train_gpt.py"
TINY = ("--width=16", "--layers=1", "--context=16")


def prepare(*words: str) -> train_gpt.Training:
    return train_gpt.Training(train_gpt.options([*TINY, *words]))


def train(*words: str) -> train_gpt.Training:
    return prepare(*words).run()


@pytest.fixture(scope="module")
def alone() -> train_gpt.Training:
    """Twelve steps of one process."""
    return train("--steps=12")


def near(losses: list[float], alone: train_gpt.Training, tolerance=1e-4) -> None:
    expected = torch.tensor(alone.losses[-len(losses) :])
    torch.testing.assert_close(torch.tensor(losses), expected, rtol=0, atol=tolerance)


@contextlib.contextmanager
def two_gpus():
    simgpu.start(2)
    try:
        yield
    finally:
        simgpu.stop()


# -- in ranks, and launched ------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("--parallel=ddp", "--accumulate=3"),
        ("--parallel=fsdp", "--accumulate=2", "--write=5"),
    ],
)
def test_four_ranks_take_the_steps_of_one_process(words, alone, tmp_path: Path):
    """One process goes on where they stopped."""
    more = "--steps=7", f"--folder={tmp_path}", "--every=7"
    first, *written = in_ranks(GPT, 4, *TINY, *words, *more).splitlines()
    before, after = alone.bits[0], train("--steps=7").bits[1]
    assert first == (
        f"[0] 4 x cpu: {before:.3f} bits a letter, after step 7 {after:.3f}"
    )
    lengths = [len(line.removeprefix("[0] ")) for line in written]
    assert lengths == ([9] if "--write=5" in words else [])
    log = (tmp_path / "log.jsonl").read_text()
    assert log.count('"loaded"') == 4 and log.count('"event": "step"') == 28
    whole, spoilt = train_elastic.newest(tmp_path)
    assert spoilt == [] and list(whole["model"]) == list(alone.model.state_dict())
    on = train("--steps=12", f"--folder={tmp_path}")
    assert len(on.losses) == 5
    near(on.losses, alone)


def test_an_unmodified_run_on_simulated_gpus(capfd):
    words = *TINY, "--steps=3", "--write=20"
    gpus = ("-m", "simgpu", "--gpus", "4", str(SCRIPTS / GPT), *words)
    done = subprocess.run(
        [sys.executable, *gpus, "--device=cuda", "--parallel=dp"],
        cwd=NOTEBOOKS.parent, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    train_gpt.main(list(words))
    assert done.stdout == capfd.readouterr().out.replace("cpu", "cuda")


def test_float16_goes_with_fsdp(alone):
    words = "--device=cuda", "--parallel=fsdp", "--amp=float16", "--steps=12"
    launch = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    done = subprocess.run(
        [sys.executable, *launch, "-m", "simgpu", str(SCRIPTS / GPT), *TINY, *words],
        cwd=NOTEBOOKS, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *_, before, after = re.findall(r"[\d.]+", done.stdout.partition("2 x cuda")[2])
    assert float(before) == 12
    assert float(after) == pytest.approx(alone.bits[1], abs=0.01)


def test_the_end_of_the_script_leaves_at_once():
    assert last_calls(GPT) == ["main()", "sys.stdout.flush()", "os._exit(0)"]
    script = text_of(GPT)
    assert "aborts" in script.partition("__main__")[2]
    main = script[script.index("def main(") :]
    assert "dist.destroy_process_group()" in main
    assert "Training(" not in main  # DDP's model is gone by then, or a rank may hang


# -- in this process -------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, tolerance",
    [
        ("", 0.0),
        ("--accumulate=5", 1e-4),
        ("--accumulate=16", 1e-4),
        ("--amp=bfloat16", 0.05),
        ("--device=cuda", 0.0),
        ("--device=cuda --parallel=dp", 1e-4),
        ("--device=cuda --amp=float16", 0.05),
    ],
)
def test_every_way_takes_the_steps_of_the_plain_one(words, tolerance, alone):
    with two_gpus() if "cuda" in words else contextlib.nullcontext():
        near(train("--steps=12", *words.split()).losses, alone, tolerance)


def test_a_run_goes_on_to_the_bit(alone, tmp_path: Path):
    folder = f"--folder={tmp_path}"
    first = train("--steps=5", folder)
    assert train("--steps=5", folder).losses == []
    second = train("--steps=12", folder)
    assert first.losses + second.losses == alone.losses
    assert second.bits == [first.bits[1], alone.bits[1]]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-000005.pt", "step-000010.pt"]
    both = second.model.state_dict(), alone.model.state_dict()
    torch.testing.assert_close(*both, rtol=0, atol=0)


def test_the_loss_scale_is_in_the_checkpoint(tmp_path: Path):
    folder = f"--folder={tmp_path}"
    words = "--device=cuda", "--amp=float16", folder
    with two_gpus():
        first = train("--steps=5", *words)
        assert first.scaler.state_dict()["_growth_tracker"] == 5
        first.scaler.update(1024.0)
        first.save()
        second = prepare(*words)
        second.load()
        assert second.scaler.get_scale() == 1024.0
        train("--steps=6", folder)  # a way without one can go on
        (tmp_path / "step-000005.pt").unlink()
        prepare("--device=cpu", folder).save()
        train("--steps=6", *words)  # and one with it from a checkpoint without


def test_a_step_that_overflows_is_left_out():
    with two_gpus():
        training = prepare("--device=cuda", "--amp=float16")
        training.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
        before = [p.clone() for p in training.model.parameters()]
        training.take_step()
        assert training.scaler.get_scale() == 2.0**39 and training.step == 1
        assert all(map(torch.equal, before, training.model.parameters()))


def test_a_folder_is_made(tmp_path: Path):
    folder = tmp_path / "a" / "b"
    train("--steps=0", f"--folder={folder}")
    assert folder.is_dir()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_ranks_share_the_rows_of_a_step(ranks):
    training = prepare()
    every, rows = training.mine().tolist(), []
    training.ranks = ranks
    for training.rank in range(ranks):
        rows += training.mine().tolist()
    assert sorted(rows) == sorted(every)


def test_it_learns_and_writes(alone):
    before, after = alone.bits
    assert 6.5 < before < 6.7 and after < before - 0.1
    said = alone.write("The ", 30)
    assert said == alone.write("The ", 30) and len(said) == 34


@pytest.mark.parametrize(
    "ranks, words, why",
    [
        (None, "--parallel ddp", "go with torchrun"),
        (4, "", "go with torchrun"),
        (4, "--parallel ddp --batch 15 --accumulate 4", "less than one row"),
        (None, "--batch 3 --accumulate 4", "less than one row"),
        (None, "--parallel dp", "dp needs --device cuda"),
        (None, "--amp float16", "float16 needs --device cuda"),
        (None, "--hold=3", "--hold needs --folder"),
    ],
)
def test_wrong_arguments_are_refused(ranks, words, why, monkeypatch, capfd):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if ranks:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(SystemExit, match="2"):
        train_gpt.main(words.split())
    assert why in capfd.readouterr().err


# -- the text, the lesson --------------------------------------------------------------


def test_the_text():
    data = text()
    assert len(data.train) == 191_406 and len(data.test) == 10_074
    assert len(data.letters) == 94 and data.letters.isascii()
    assert data.words(data.train[:20]) == "Special method names"
    file = Path(helpers.__file__).with_name("language_reference.txt.gz")
    assert file.stat().st_size < 80_000


@pytest.mark.parametrize(
    "first, behind",
    [
        ("def wrap(", "\n\n\n# -- the training"),
        ("    def take_step(", "\n\n    @torch.no_grad()"),
        ("    def save(", "\n\n    def load("),
    ],
)
def test_lesson_27_shows_the_functions_as_they_are(first, behind):
    script = text_of(GPT)
    function = script[script.index(first) :].partition(behind)[0]
    assert f"```python\n{function}\n```" in prose_of("27-train-it-all.ipynb")
