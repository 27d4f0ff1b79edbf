"""`judge_claim.py`: lesson 29's script, run unmodified."""

import re
from pathlib import Path

import pytest

from tests import take_home

pytestmark = pytest.mark.slow

ONE = "python -m simgpu --gpus 4 torchrun --standalone --nproc-per-node={} {}"


def judged(ranks: int, folder: Path, options: str = "") -> tuple[int, str]:
    """The exit status, and what rank 0 printed."""
    command = ONE.format(ranks, f"judge_claim.py {options}".strip())
    done = take_home.start_command(command, folder)
    return done.returncode, done.stdout


def losses(printed: str) -> tuple[float, float]:
    found = re.search(r"loss ([\d.]+), of one process ([\d.]+)", printed)
    return float(found[1]), float(found[2])


def test_the_lessons_command_says_true(tmp_path):
    printed = take_home.run("29", tmp_path)
    assert "the claim: true" in printed
    mine, one = losses(printed)
    assert mine == pytest.approx(one, abs=1e-4)
    assert float(re.search(r"off by ([\d.]+)", printed)[1]) < 1e-4


def test_two_ranks_have_the_loss_of_one(tmp_path):
    printed = take_home.run_command(ONE.format(2, "judge_claim.py"), tmp_path)
    alone = take_home.run_command(ONE.format(1, "judge_claim.py"), tmp_path)
    assert "the claim: true" in printed and "the claim: true" in alone
    assert losses(printed)[0] == pytest.approx(losses(alone)[0], abs=1e-4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_planted_mistake_is_found_and_the_command_fails(ranks, tmp_path):
    status, printed = judged(ranks, tmp_path, "--plant")
    assert status != 0 and "the claim: false" in printed
    assert float(re.search(r"off by ([\d.]+)", printed)[1]) > 0.1


def test_shares_that_are_not_equal_are_found(tmp_path):
    status, printed = judged(3, tmp_path)  # 128 samples: 43, 43 and 42
    assert status != 0 and "the claim: false" in printed


@pytest.mark.parametrize(
    "caps, word",
    [("0.01 25", "true"), ("25 0.01", "false"), ("25 100", "cannot be judged")],
)
def test_buckets_are_judged_only_if_the_times_differ(caps, word, tmp_path):
    status, printed = judged(2, tmp_path, f"--buckets {caps}")
    assert f"the claim: {word}\n" in printed and (status == 0) == (word == "true")
    assert re.search(r"faster in \d+ of 10 rounds", printed)
