"""`expert_parallel.py`: any number of ranks reaches the losses of one."""

import re
from pathlib import Path

import pytest

from tests import take_home

pytestmark = pytest.mark.slow

STEP = re.compile(r"step (\d+): loss ([\d.]+), balance ([\d.]+)")
PEAK = re.compile(r"4 experts on (\d) ranks: peak ([\d.]+) MiB a rank")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """By the number of ranks, what they print; four by the lesson's own command."""
    folder: Path = tmp_path_factory.mktemp("experts")
    found = {4: take_home.run("22", folder)}
    for ranks in (1, 2):
        words = f"torchrun --standalone --nproc-per-node={ranks} expert_parallel.py"
        command = f"python -m simgpu --gpus 4 {words}"
        found[ranks] = take_home.run_command(command, folder)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_are_those_of_one_rank(printed, ranks):
    one, many = STEP.findall(printed[1]), STEP.findall(printed[ranks])
    assert [step for step, *_ in many] == ["3", "6", "9", "12"]
    for (_, loss, balance), (_, found, its) in zip(one, many, strict=True):
        assert float(found) == pytest.approx(float(loss), abs=5e-4)
        assert float(its) == pytest.approx(float(balance), abs=0.011)


def test_the_model_learns(printed):
    losses = [float(loss) for _, loss, _ in STEP.findall(printed[4])]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 3.7 < losses[0]


def test_more_ranks_need_less_memory_each(printed):
    peaks = {
        int(n): float(mib) for text in printed.values() for n, mib in PEAK.findall(text)
    }
    assert peaks[4] < peaks[2] < peaks[1]
