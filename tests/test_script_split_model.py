"""`split_model.py`: lesson 13's script, run unmodified."""

import re
from pathlib import Path

import pytest

from tests import take_home

pytestmark = pytest.mark.slow

STEP = re.compile(r"step \d: loss ([\d.]+), on one GPU ([\d.]+|nan)")
PEAK = re.compile(r"(cuda:\d|one GPU).*peak ([\d.]+) MiB")
SIMULATED = "python -m simgpu --gpus {} split_model.py"


def losses(printed: str) -> list[tuple[float, float]]:
    return [(float(split), float(one)) for split, one in STEP.findall(printed)]


def peaks(printed: str) -> dict[str, float]:
    return {name: float(peak) for name, peak in PEAK.findall(printed)}


def test_two_gpus_learn_what_one_learns_in_less_memory_each(tmp_path: Path):
    printed = take_home.run("13", tmp_path)
    found = losses(printed)
    assert len(found) == 5 and found[-1][0] < found[0][0]
    for split, one in found:
        assert split == pytest.approx(one, abs=2e-4)
    peak = peaks(printed)
    assert set(peak) == {"cuda:0", "cuda:1", "one GPU"}
    assert max(peak["cuda:0"], peak["cuda:1"]) < 0.7 * peak["one GPU"]
    assert peak["cuda:0"] == pytest.approx(peak["cuda:1"], rel=0.1)


def test_four_gpus_learn_the_same_and_need_less(tmp_path: Path):
    printed = take_home.run_command(SIMULATED.format(4), tmp_path)
    for split, one in losses(printed):
        assert split == pytest.approx(one, abs=2e-4)
    peak = peaks(printed)
    assert len(peak) == 5
    assert all(peak[f"cuda:{k}"] < 0.5 * peak["one GPU"] for k in range(4))


def test_a_model_that_one_card_refuses_trains_on_two(tmp_path: Path):
    command = SIMULATED.format("2 --memory 64MB")
    printed = take_home.run_command(command, tmp_path)
    assert "one GPU: out of memory" in printed
    found = [split for split, _ in losses(printed)]
    assert len(found) == 5 and found[-1] < found[0]
