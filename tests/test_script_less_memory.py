"""`less_memory.py`: lesson 10's script, run unmodified."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import take_home

pytestmark = pytest.mark.slow

SIMULATED = "python -m simgpu --gpus 1 less_memory.py"
OPTIONS = (
    "",
    "--offload",
    "--checkpoint --offload",
    "--accumulate 4 --checkpoint --offload",
)


class Found(NamedTuple):
    """What the script prints: a number for each step, and the peak in MiB."""

    losses: list[float]
    norms: list[float]
    ms: list[float]
    peak: float


def read(printed: str) -> Found:
    steps = re.findall(r"loss ([\d.]+), gradient ([\d.]+), ([\d.]+) ms", printed)
    (peak,) = re.findall(r"peak ([\d.]+) MiB", printed)
    losses, norms, ms = ([float(x) for x in xs] for xs in zip(*steps, strict=True))
    return Found(losses, norms, ms, float(peak))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By the options: what the script prints."""
    folder = tmp_path_factory.mktemp("less_memory")
    printed = {o: take_home.run_command(f"{SIMULATED} {o}", folder) for o in OPTIONS}
    printed["lesson's"] = take_home.run("10", folder)
    return {options: read(text) for options, text in printed.items()}


def test_losses_and_gradients_are_the_same_with_every_option(found):
    plain = found[""]
    assert len(plain.losses) == 5 and plain.losses[-1] < plain.losses[0]
    for other in found.values():
        assert other.losses == pytest.approx(plain.losses, abs=2e-4)
        assert other.norms[0] == pytest.approx(plain.norms[0], rel=1e-3)


def test_less_memory_takes_more_time(found):
    plain, lessons, offload = found[""], found["lesson's"], found["--offload"]
    assert lessons.peak < plain.peak / 2
    assert plain.ms[-1] < lessons.ms[-1] < offload.ms[-1]
    assert offload.peak < lessons.peak


def test_after_checkpointing_little_travels(found):
    both, offload = found["--checkpoint --offload"], found["--offload"]
    assert both.ms[-1] < offload.ms[-1] / 2


def test_a_card_of_64_mib_refuses_the_plain_step_only(tmp_path: Path):
    small = SIMULATED.replace("less", "--memory 64MB less")
    with pytest.raises(AssertionError, match="OutOfMemoryError"):
        take_home.run_command(small, tmp_path)
    assert "step 4" in take_home.run_command(f"{small} --checkpoint", tmp_path)
