"""`train_gpt.py`: every way takes the steps of one process, and goes on from any."""

import json
import sys
from pathlib import Path

import pytest
import torch

import helpers
from helpers import text
from tests import take_home
from tests.launching import NOTEBOOKS

sys.path.insert(0, str(NOTEBOOKS))
from scripts import train_gpt  # noqa: E402

pytestmark = pytest.mark.slow

Log = dict[int, dict]


def log_of(printed: str) -> Log:
    """Step -> its record."""
    lines = [json.loads(line) for line in printed.splitlines()]
    return {line["step"]: line for line in lines}


def torchrun(folder: Path, ranks: int, options: str) -> Log:
    way = f"{ranks} ranks --text=book.txt --steps=10 --every=4 {options}"
    return log_of(take_home.run_command(take_home.command_for("27", way), folder))


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> dict[str, Log]:
    folder = tmp_path_factory.mktemp("train_gpt")
    data = text()
    book = data.words(torch.cat([data.train, data.test]))
    (folder / "book.txt").write_text(book, encoding="ascii", newline="")
    found = {
        "one": torchrun(folder, 1, ""),
        "4 fsdp tp bf16": log_of(take_home.run("27", folder)),  # the lesson's command
        "4 ddp": torchrun(folder, 4, "--accumulate=3 --folder=of_ddp"),
    }
    kept = sorted(path.name for path in (folder / "of_ddp").iterdir())
    assert kept == ["latest", "step-000008", "step-000010"]
    (folder / "of_ddp" / "latest").write_text("step-000008")
    found["2 fsdp tp"] = torchrun(folder, 2, "--parallel=fsdp --tp=2 --folder=of_ddp")
    options = "--parallel=fsdp --recompute --accumulate=2 --peak=312"
    found["2 fsdp"] = torchrun(folder, 2, options)
    return found


@pytest.mark.parametrize(
    "way, first, tolerance",
    [
        ("4 ddp", 0, 1e-4),
        ("2 fsdp", 0, 1e-4),
        ("2 fsdp tp", 8, 1e-4),  # goes on where four ranks with DDP have saved
        ("4 fsdp tp bf16", 0, 0.02),
    ],
)
@pytest.mark.parametrize("what", ["loss", "norm"])
def test_every_way_has_the_numbers_of_one_process(logs, way, first, tolerance, what):
    one = {step: line[what] for step, line in logs["one"].items() if step >= first}
    other = {step: line[what] for step, line in logs[way].items()}
    assert other == pytest.approx(one, abs=tolerance)


def test_it_learns_and_tests(logs):
    one = logs["one"]
    assert one[9]["loss"] < 0.8 * one[0]["loss"]
    assert [step for step in one if "test" in one[step]] == [3, 7, 9]
    assert one[9]["test"] < one[3]["test"] < 8
    for way in ("4 ddp", "2 fsdp", "2 fsdp tp"):
        assert logs[way][9]["test"] == pytest.approx(one[9]["test"], abs=2e-3)


def test_mfu_is_written_if_asked_for(logs):
    assert "mfu" not in logs["one"][9]
    line = logs["2 fsdp"][9]
    flops = 6 * (2 * 12 * 64 * 64 + 4 * 64 + 64 * 256) + 12 * 2 * 64 * 64
    expected = line["tokens_per_s"] * flops / (312e12 * 2)
    assert line["mfu"] == pytest.approx(expected, abs=1e-4)


# -- its parts -------------------------------------------------------------------------


def test_an_epoch_has_each_row_once():
    rows = torch.cat([train_gpt.rows_of_step(step, 16, 100) for step in range(6)])
    assert len(set(rows.tolist())) == 96
    again = train_gpt.rows_of_step(3, 16, 100)
    assert again.tolist() == rows[48:64].tolist()
    assert train_gpt.rows_of_step(6, 16, 100).tolist() != rows[:16].tolist()


def test_the_learning_rate_rises_and_falls_to_a_tenth():
    args = train_gpt.options(["--text=x", "--steps=100", "--lr=1", "--warmup=4"])
    rates = [train_gpt.learning_rate(step, args) for step in range(101)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[100] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "ranks, words, why",
    [
        (1, "", "--text"),
        (4, "--text=x --tp=2", "needs --parallel=fsdp"),
        (3, "--text=x --tp=2 --parallel=fsdp", "3 ranks cannot divide"),
        (4, "--text=x --batch=15 --accumulate=4", "4 ranks cannot divide"),
    ],
)
def test_wrong_options_are_refused(ranks, words, why, monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(SystemExit, match="2"):
        train_gpt.options(words.split())
    assert why in capfd.readouterr().err


# -- the text --------------------------------------------------------------------------


def test_the_text():
    data = text()
    assert len(data.train) == 191_406 and len(data.test) == 10_074
    assert len(data.letters) == 94 and data.letters.isascii()
    assert data.words(data.train[:20]) == "Special method names"
    file = Path(helpers.__file__).with_name("language_reference.txt.gz")
    assert file.stat().st_size < 80_000
