"""`pipeline_layers.py`: lesson 20's script, run unmodified."""

import re
from pathlib import Path

import pytest
import torch

from tests import take_home
from tests.launching import load

pytestmark = pytest.mark.slow

SCRIPT = "pipeline_layers.py"
PARAMETERS = 1_065_354  # of the model


def losses(printed: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\d\.\d{4})", printed)]


def run(folder: Path, ranks: int, schedule: str) -> str:
    words = f"torchrun --standalone --nproc-per-node={ranks} {SCRIPT}"
    command = f"python -m simgpu --gpus {ranks} {words} --schedule {schedule}"
    return take_home.run_command(command, folder)


@pytest.fixture(scope="module")
def script():
    return load(SCRIPT)


@pytest.fixture(scope="module")
def alone(script) -> list[float]:
    """The same losses of plain PyTorch on the CPU, with the full batch at once."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*script.make_layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(12):
        images, labels = script.batch_of(step)
        loss = script.loss_of(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found[3::4]


def test_the_loss_falls(alone):
    assert alone == sorted(alone, reverse=True) and alone[-1] < 0.7 * alone[0]


def test_the_lessons_command_has_the_losses_of_one_process(alone, tmp_path):
    """And every rank has a quarter of the parameters, and says so."""
    printed = take_home.run("20", tmp_path)
    assert losses(printed) == pytest.approx(alone, abs=2e-4)
    rows = re.findall(r"rank (\d): ([\d,]+) parameters, peak \d+\.\d MiB", printed)
    kept = [int(parameters.replace(",", "")) for _, parameters in rows]
    assert [int(rank) for rank, _ in rows] == [0, 1, 2, 3]
    assert sum(kept) == PARAMETERS and max(kept) < 0.26 * PARAMETERS


@pytest.mark.parametrize(
    "ranks, schedule", [(2, "gpipe"), (4, "interleaved"), (2, "zero-bubble")]
)
def test_every_schedule_has_the_losses_of_one_process(alone, tmp_path, ranks, schedule):
    assert losses(run(tmp_path, ranks, schedule)) == pytest.approx(alone, abs=2e-4)


def test_the_cut_balances_parameters(script):
    layers = [torch.nn.Linear(4, n, bias=False) for n in (8, 1, 1, 2, 4)]
    parts = script.cut(layers, 2)
    assert [len(part) for part in parts] == [1, 4]
    assert sum(map(list, parts), []) == layers


def test_too_few_layers_are_refused(script):
    with pytest.raises(SystemExit, match="2 layers are too few for 4 stages"):
        script.cut([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], 4)
