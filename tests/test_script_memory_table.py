"""`memory_table.py`: lesson 04's script, run unmodified."""

import re
from pathlib import Path

import pytest
from torch import nn

from tests import take_home

pytestmark = pytest.mark.slow

MIB = 2**20
PARAMETERS = sum(
    p.nbytes
    for layer in (nn.Linear(64, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 10))
    for p in layer.parameters()
)


def table(printed: str) -> dict[str, float]:
    """MiB by the name of the part."""
    rows = re.findall(r"^(\w[\w ,]+?) +([\d.]+) MiB$", printed, re.M)
    return {name: float(size) for name, size in rows}


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> str:
    """By the lesson's own command, with 1000 samples."""
    return take_home.run("04", tmp_path_factory.mktemp("memory"))


def test_parameters_gradients_and_moments_are_bytes_of_the_model(printed):
    found, model = table(printed), PARAMETERS / MIB
    assert found["parameters and buffers"] == pytest.approx(model, abs=0.006)
    assert found["gradients"] == pytest.approx(model, abs=0.006)
    assert found["optimizer state"] == pytest.approx(2 * model, abs=0.006)


def test_what_remains_is_two_workspaces(printed):
    assert table(printed)["workspaces, rounding"] == pytest.approx(16.25, abs=1.5)


def test_activations_are_what_the_hidden_layers_return(printed):
    hidden = 2 * 1000 * 1024 * 4 / MIB
    assert table(printed)["activations"] == pytest.approx(hidden, rel=0.2)


def test_the_peaks_are_those_of_the_lesson(printed):
    found, model, hidden = table(printed), PARAMETERS / MIB, 1000 * 1024 * 4 / MIB
    always = 3 * model + found["batch"] + found["workspaces, rounding"]
    assert found["peak in forward"] == pytest.approx(always + 3 * hidden, rel=0.05)
    assert found["peak in step"] == pytest.approx(always + 2 * model, rel=0.05)
    assert found["peak in backward"] > found["peak in forward"]
    assert found["reserved by PyTorch"] >= found["peak in backward"]


def test_a_larger_batch_changes_activations_and_not_the_model(printed, tmp_path: Path):
    command = "python -m simgpu --gpus 1 memory_table.py 2000"
    small, large = table(printed), table(take_home.run_command(command, tmp_path))
    for name in ("parameters and buffers", "gradients", "optimizer state"):
        assert large[name] == small[name]
    ratio = large["activations"] / small["activations"]
    assert ratio == pytest.approx(2, rel=0.1)
