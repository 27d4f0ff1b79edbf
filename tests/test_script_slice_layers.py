"""`slice_layers.py`: lesson 19's script, run unmodified."""

import re
from pathlib import Path

import pytest

from tests import take_home

pytestmark = pytest.mark.slow

WEIGHTS = 1_685_760  # bytes of the model, on one rank


def printed(ranks: int, folder: Path) -> str:
    if ranks == 4:
        return take_home.run("19", folder)  # the lesson's own command
    words = f"torchrun --standalone --nproc-per-node={ranks} slice_layers.py"
    return take_home.run_command(f"python -m simgpu --gpus {ranks} {words}", folder)


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d\.\d{4})", text)]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[int, str]:
    folder = tmp_path_factory.mktemp("slices")
    return {ranks: printed(ranks, folder) for ranks in (1, 2, 4)}


def test_the_loss_falls(outputs):
    found = losses(outputs[1])
    assert len(found) == 3 and found[-1] < 0.9 * found[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_have_the_losses_of_one_process(outputs, ranks):
    # sums have another order, which moves the last of the four digits at most
    assert losses(outputs[ranks]) == pytest.approx(losses(outputs[1]), abs=2e-4)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_keeps_its_share_of_the_weights_and_says_so(outputs, ranks):
    rows = re.findall(r"rank (\d) of (\d): weights ([\d,]+), peak", outputs[ranks])
    assert [(int(a), int(b)) for a, b, _ in rows] == [(r, ranks) for r in range(ranks)]
    for *_, weights in rows:
        kept = int(weights.replace(",", ""))
        assert WEIGHTS / ranks <= kept < 1.02 * WEIGHTS / ranks  # norms are not cut


def test_more_ranks_need_less_memory_each(outputs):
    peaks = [
        int(re.search(r"peak ([\d,]+)", outputs[ranks])[1].replace(",", ""))
        for ranks in (1, 2, 4)
    ]
    assert peaks == sorted(peaks, reverse=True)
