"""`time_step.py`, which lesson 07 gives to take home, run by the lesson's command."""

import re

import pytest
import torch
from torch import nn

import simgpu
from tests import take_home

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> str:
    return take_home.run("07", tmp_path_factory.mktemp("time_step"))


def kernel_milliseconds() -> float:
    """What the kernels of the script's step take."""

    def step(model, x, labels):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
        x, labels = torch.empty(16384, 64), torch.empty(16384, dtype=torch.int64)
    cost = simgpu.estimate(step, model, x, labels, card="A100")
    return 1e3 * cost.kernel_seconds


def test_it_says_median_least_and_most(printed):
    found = re.search(r"median ([\d.]+) ms, min ([\d.]+) ms, max ([\d.]+) ms", printed)
    median, least, most = map(float, found.groups())
    assert least <= median <= most
    # no marked step finds an idle GPU: each is launched while the one before computes
    assert least == most == pytest.approx(kernel_milliseconds(), rel=0.01)


def test_it_names_the_card_and_says_the_rate(printed):
    assert printed.startswith("NVIDIA A100-SXM4-80GB (simulated), torch ")
    median = float(re.search(r"median ([\d.]+)", printed)[1])
    rate = float(re.search(r"([\d,]+) samples a", printed)[1].replace(",", ""))
    assert rate == pytest.approx(16384 / median, rel=0.01)
