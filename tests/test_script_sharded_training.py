"""`sharded_training.py`: the script that lesson 18 gives to take home."""

import re
from pathlib import Path

import pytest

from tests import take_home

pytestmark = pytest.mark.slow

SCRIPT = "sharded_training.py"


def losses(printed: str) -> dict[int, float]:
    """Step -> the loss that was printed for it."""
    found = re.findall(r"\d ranks, step (\d+): loss (\d\.\d{4})", printed)
    return {int(step): float(loss) for step, loss in found}


def peaks(printed: str) -> list[float]:
    """MiB of each rank."""
    return [float(mib) for mib in printed.partition("each rank: ")[2].split(", ")]


def torchrun(folder: Path, ranks: int, options: str) -> str:
    words = f"torchrun --standalone --nproc-per-node={ranks} {SCRIPT} {options}"
    return take_home.run_command(f"python -m simgpu --gpus 4 {words}", folder)


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> dict[str, str]:
    """What four ranks print, what two print that go on, and what one process prints."""
    folder = tmp_path_factory.mktemp("sharded_training")
    return {
        "four": take_home.run("18", folder),  # the lesson's own command: it saves
        "two": torchrun(folder, 2, "--load=checkpoint"),
        "one": torchrun(folder, 1, "--steps=20"),
    }


def test_four_ranks_and_then_two_have_the_losses_of_one_process(printed):
    one = losses(printed["one"])
    four, two = losses(printed["four"]), losses(printed["two"])
    assert list(one) == list(range(20))
    assert [*four, *two] == list(one)
    assert {**four, **two} == pytest.approx(one, abs=2e-4)  # sums in another order
    assert one[19] < 0.6 * one[0]


def test_a_rank_of_four_needs_less_memory_than_one_process(printed):
    (alone,) = peaks(printed["one"])
    four = peaks(printed["four"])
    assert len(four) == 4 and max(four) < 0.75 * alone
