"""`train_anywhere.py`: lesson 01's script, run unmodified."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import take_home
from tests.launching import ROOT, SCRIPTS, environment

pytestmark = pytest.mark.slow

SCRIPT = "python -m simgpu --gpus 4 train_anywhere.py --device"


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+)", printed)]


def refusal(device: str, visible: str) -> str:
    """What the script says of a device that it cannot use, on four GPUs."""
    command = [sys.executable, "-m", "simgpu", "--gpus", "4"]
    command += [str(SCRIPTS / "train_anywhere.py"), "--device", device]
    with environment(CUDA_VISIBLE_DEVICES=visible, PYTHONPATH=str(ROOT)) as environ:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=environ
        )
    assert done.returncode == 2  # argparse's, without a traceback
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def on_gpu_1(tmp_path_factory):
    """What the lesson's own command prints, and the weights that it saves."""
    folder = tmp_path_factory.mktemp("train_anywhere")
    return take_home.run("01", folder), torch.load(folder / "model.pt")


def test_it_trains_on_the_gpu_that_is_named(on_gpu_1):
    printed, _ = on_gpu_1
    assert printed.startswith("training on cuda:1, NVIDIA A100")
    found = losses(printed)
    assert len(found) == 3 and found == sorted(found, reverse=True)


def test_the_cpu_learns_the_same(on_gpu_1, tmp_path: Path):
    printed = take_home.run_command(f"{SCRIPT} cpu", tmp_path)
    assert printed.startswith("training on cpu, the CPU")
    assert losses(printed) == pytest.approx(losses(on_gpu_1[0]), abs=1e-3)
    alone = torch.load(tmp_path / "model.pt")
    for name, weight in on_gpu_1[1].items():
        torch.testing.assert_close(weight, alone[name], rtol=0, atol=1e-4)


def test_the_saved_weights_are_on_the_cpu_and_fit(on_gpu_1):
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    model.load_state_dict(on_gpu_1[1])
    assert {weight.device.type for weight in on_gpu_1[1].values()} == {"cpu"}


@pytest.mark.parametrize(
    "device, visible, says",
    [
        ("cuda:1", "2", "there is no cuda:1: this process sees cpu, cuda:0."),
        ("cuda", "", "there is no cuda: this process sees cpu."),
        ("gpu", "0", "'gpu' is not cpu, cuda or cuda:N"),
    ],
)
def test_it_says_which_devices_there_are(device, visible, says):
    assert says in refusal(device, visible)
