"""`prefetch.py`: lesson 05's script, run unmodified."""

import re

import pytest

from tests import take_home

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> str:
    return take_home.run("05", tmp_path_factory.mktemp("prefetch"))


def numbers(printed: str, name: str) -> tuple[float, list[float]]:
    """The milliseconds and the losses of a training: "with" or "without"."""
    pattern = rf"^{name} prefetching: ([\d.]+) ms, losses:\n(.+)$"
    found = re.search(pattern, printed, re.M)
    return float(found[1]), [float(word) for word in found[2].split()]


def test_the_losses_are_the_same_and_fall(printed):
    _, without = numbers(printed, "without")
    _, with_it = numbers(printed, "with")
    assert with_it == without and len(without) == 8
    assert without == sorted(without, reverse=True)
    assert without[-1] < 0.8 * without[0]


def test_prefetching_is_faster(printed):
    without, with_it = numbers(printed, "without")[0], numbers(printed, "with")[0]
    assert with_it < 0.8 * without


def test_there_is_no_race(tmp_path):
    """With `--races raise`, a race would end the script with an error."""
    command = "python -m simgpu --gpus 1 --races raise prefetch.py"
    assert "without prefetching" in take_home.run_command(command, tmp_path)
