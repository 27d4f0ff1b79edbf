"""`split_batch.py`: lesson 12's script, run unmodified."""

import re

import pytest
import torch
from torch import nn

from tests import take_home

pytestmark = pytest.mark.slow

TOLERANCE = 2e-4  # of printed losses: rounding, which 24 steps of Adam pass on


@pytest.fixture(scope="module")
def printed_and_saved(tmp_path_factory):
    """By the number of GPUs: what the script prints, and the weights that it saves."""
    found = {}
    for gpus in (1, 2, 4):
        folder = tmp_path_factory.mktemp("split_batch")
        command = f"python -m simgpu --gpus {gpus} split_batch.py"
        if gpus == 4:
            printed = take_home.run("12", folder)  # the lesson's own command
        else:
            printed = take_home.run_command(command, folder)
        found[gpus] = printed, torch.load(folder / "model.pt", map_location="cpu")
    return found


def losses(printed: str) -> list[float]:
    found = re.findall(r"epoch \d: loss (\d\.\d{4})", printed)
    return [float(loss) for loss in found]


def test_more_gpus_learn_what_one_learns(printed_and_saved):
    alone = losses(printed_and_saved[1][0])
    assert len(alone) == 3 and alone == sorted(alone, reverse=True)
    for gpus in (2, 4):
        assert losses(printed_and_saved[gpus][0]) == pytest.approx(alone, abs=TOLERANCE)


def test_it_compares_the_first_batch_with_one_gpu(printed_and_saved):
    for gpus, (printed, _) in printed_and_saved.items():
        said = re.search(r"loss (\d\.\d{4}) on one GPU, (\d\.\d{4}) on (\d)", printed)
        assert said[1] == said[2] and int(said[3]) == gpus
        assert "4 gradients agree" in printed


def test_the_first_gpu_holds_the_optimizer_too(printed_and_saved):
    held = re.findall(
        r"cuda:(\d) holds ([\d.]+) MiB, at most ([\d.]+) MiB", printed_and_saved[4][0]
    )
    assert [gpu for gpu, _, _ in held] == list("0123")
    now, peak = ([float(row[i]) for row in held] for i in (1, 2))
    weights = 4 * (64 * 512 + 512 + 512 * 10 + 10) / 2**20
    # weights, gradients and Adam's two numbers; a replica is thrown away
    assert now[0] - now[1] >= 3.9 * weights
    assert now[1] == now[2] == now[3]
    assert peak[0] > peak[1] == peak[2] == peak[3]


def test_the_saved_file_fits_the_bare_model(printed_and_saved):
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    model.load_state_dict(printed_and_saved[4][1])


def test_it_says_what_ddp_needs(printed_and_saved):
    printed, _ = printed_and_saved[2]
    for words in ("torchrun", "LOCAL_RANK", "init_process_group", "DistributedSampler"):
        assert words in printed
