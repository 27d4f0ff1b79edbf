"""`stretch_sequence.py`: lesson 21's script, run unmodified."""

import re
from pathlib import Path

import pytest

from tests import take_home

pytestmark = pytest.mark.slow


def printed(ranks: int, folder: Path, *options: str) -> str:
    if ranks == 4 and not options:
        return take_home.run("21", folder)  # the lesson's own command
    words = f"torchrun --standalone --nproc-per-node={ranks} stretch_sequence.py"
    command = " ".join((f"python -m simgpu --gpus {ranks} {words}", *options))
    return take_home.run_command(command, folder)


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d\.\d{4})", text)]


def peaks(text: str) -> list[int]:
    return [int(p.replace(",", "")) for p in re.findall(r"peak ([\d,]+)", text)]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[int, str]:
    folder = tmp_path_factory.mktemp("sequences")
    return {ranks: printed(ranks, folder) for ranks in (1, 2, 4)}


def test_the_loss_falls(outputs):
    found = losses(outputs[1])
    assert len(found) == 3 and found[-1] < 0.9 * found[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_of_sequences_have_the_losses_of_one_process(outputs, ranks):
    # sums have another order, which moves the last of the four digits at most
    assert losses(outputs[ranks]) == pytest.approx(losses(outputs[1]), abs=2e-4)


def test_every_rank_says_its_peak_and_more_ranks_need_less(outputs):
    found = [peaks(outputs[ranks]) for ranks in (1, 2, 4)]
    assert [len(each) for each in found] == [1, 2, 4]
    largest = [max(each) for each in found]
    assert largest == sorted(largest, reverse=True)


def test_a_length_that_does_not_divide_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="128 does not divide 50 tokens"):
        printed(2, tmp_path, "--length=50")
