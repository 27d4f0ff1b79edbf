"""`less_memory.py`: lesson 10's script, run unmodified."""

import re
from pathlib import Path

import pytest

from tests import take_home

SIMULATED = "python -m simgpu --gpus 1 less_memory.py"
OPTIONS = ("", "--offload", "--accumulate 4 --checkpoint --offload")


def read(printed: str) -> tuple[list[float], list[float], float]:
    """Losses, milliseconds and the peak in MiB."""
    steps = re.findall(r"step \d: loss ([\d.]+), ([\d.]+) ms", printed)
    (peak,) = re.findall(r"peak ([\d.]+) MiB", printed)
    return [float(a) for a, _ in steps], [float(b) for _, b in steps], float(peak)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By the options: what the script prints."""
    folder = tmp_path_factory.mktemp("less_memory")
    printed = {o: take_home.run_command(f"{SIMULATED} {o}", folder) for o in OPTIONS}
    printed["lesson's"] = take_home.run("10", folder)
    return {options: read(text) for options, text in printed.items()}


def test_the_losses_are_the_same_with_every_option(found):
    plain, _, _ = found[""]
    assert len(plain) == 5 and plain[-1] < plain[0]
    for losses, _, _ in found.values():
        assert losses == pytest.approx(plain, abs=2e-4)


def test_less_memory_takes_more_time(found):
    _, plain_ms, plain_peak = found[""]
    _, ms, peak = found["lesson's"]
    assert peak < plain_peak / 2
    assert plain_ms[-1] < ms[-1] < found["--offload"][1][-1]
    assert found["--offload"][2] < peak


def test_a_card_of_64_mib_refuses_the_plain_step_only(tmp_path: Path):
    small = SIMULATED.replace("less", "--memory 64MB less")
    with pytest.raises(AssertionError, match="OutOfMemoryError"):
        take_home.run_command(small, tmp_path)
    assert "step 4" in take_home.run_command(f"{small} --checkpoint", tmp_path)
