"""`check_ranks.py`: what lesson 17 takes home, run unmodified."""

import re
from pathlib import Path

import pytest

from tests import take_home

pytestmark = pytest.mark.slow

ONE = "python -m simgpu --gpus 4 torchrun --standalone --nproc-per-node={} {}"


def run(ranks: int, folder: Path, options: str = "") -> str:
    command = ONE.format(ranks, f"check_ranks.py {options}".strip())
    return take_home.run_command(command, folder)


def losses(printed: str) -> list[float]:
    return [float(x) for x in re.findall(r"^epoch \d: loss ([\d.]+)$", printed, re.M)]


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> str:
    """One process, three epochs in a row."""
    return run(1, tmp_path_factory.mktemp("one"), "--epochs 3")


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> tuple[str, str]:
    """The lesson's own command, and a second start that goes on and is spoilt."""
    folder = tmp_path_factory.mktemp("four")
    first = take_home.run("17", folder)
    return first, run(4, folder, "--epochs 3 --spoil 2")


def test_four_ranks_stay_in_step_and_have_the_loss_of_one(one, four):
    first, _ = four
    assert first.count("9 tensors are equal on 4 ranks") == 4
    assert first.count("256 samples a rank; 2 left out") == 2
    assert "IS OUT OF STEP" not in first and "SHARE" not in first
    assert losses(first) == pytest.approx(losses(one)[:2], abs=1e-4)
    assert len(re.findall(r"\d+\.\d[,\]]", first.splitlines()[-1])) == 4  # peaks


def test_a_second_start_goes_on_with_the_weights_of_the_first(one, four):
    _, second = four
    assert "checkpoint.pt: go on with epoch 2" in second
    assert losses(second) == pytest.approx(losses(one)[2:], abs=1e-4)


def test_a_rank_that_differs_is_named_with_the_tensor(four):
    _, second = four
    assert "step 3: 9 tensors are equal on 4 ranks" in second
    assert "step 7: rank 2 IS OUT OF STEP in 0.weight" in second
    assert second.count("IS OUT OF STEP") == 1


def test_two_ranks_have_the_loss_of_one_and_neither_is_blamed_alone(one, tmp_path):
    printed = run(2, tmp_path, "--epochs 1 --spoil 1")
    assert losses(printed) == pytest.approx(losses(one)[:1], abs=1e-4)
    for rank in range(2):
        assert f"step 7: rank {rank} IS OUT OF STEP in 0.weight" in printed
