"""`train_on_nodes.py`: the script that lesson 25 gives to take home, unmodified."""

import os
import re
import shlex
from pathlib import Path

import pytest

from tests import take_home
from tests.launching import prose_of

pytestmark = pytest.mark.slow

NAME = "train_on_nodes.py"
LESSON = "25-leave-one-machine.ipynb"


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d\.\d{4})", text)]


def places(text: str) -> list[tuple[int, ...]]:
    """(rank, node, GPU) of each rank."""
    found = re.findall(r"rank (\d): node (\d), GPU (\d)", text)
    return [tuple(map(int, place)) for place in found]


def speed(text: str, where: str) -> float:
    return float(re.search(rf"{where}: ([\d.]+) GB/s", text)[1])


def on_one_machine(options: str, ranks: int, folder: Path, more: str = "") -> str:
    words = f"torchrun --standalone --nproc-per-node={ranks} {NAME} {more}".strip()
    return take_home.run_command(f"python -m simgpu {options} {words}", folder)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("nodes")
    (shown,) = re.findall(r"```sh\npython (.*)\n```", prose_of(LESSON))
    return {
        "1": on_one_machine("--gpus 1", 1, folder),
        "2": on_one_machine("--gpus 2", 2, folder),
        "2 nodes": take_home.run_command(f"python {shown}", folder),
        "2 agents": take_home.run_agents("25", folder, nodes=2),
    }


def test_the_loss_falls(outputs):
    found = losses(outputs["1"])
    assert len(found) == 4 and found[-1] < 0.6 * found[0]


@pytest.mark.parametrize("way", ["2", "2 nodes", "2 agents"])
def test_any_number_of_nodes_has_the_losses_of_one_process(outputs, way):
    # sums in another order
    assert losses(outputs[way]) == pytest.approx(losses(outputs["1"]), abs=2e-4)


@pytest.mark.parametrize("way", ["2 nodes", "2 agents"])
def test_each_rank_takes_a_gpu_of_its_node(outputs, way):
    expected = [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert places(outputs[way]) == expected


def test_the_network_is_slower_than_the_links_inside(outputs):
    text = outputs["2 nodes"]
    # 10 Gbit/s for two GPUs, of which NCCL is assumed to reach 90 %
    assert speed(text, "between nodes") == pytest.approx(0.6, abs=0.06)
    assert speed(text, "inside a node") > 50
    assert "between nodes" not in outputs["2"]
    assert "GB/s" not in outputs["1"]


def test_a_job_that_is_started_again_goes_on(outputs, tmp_path):
    for steps in (10, 20):
        more = shlex.join(["--folder", str(tmp_path), f"--steps={steps}"])
        text = on_one_machine("--gpus 2", 2, tmp_path, more)
    assert losses(text) == pytest.approx(losses(outputs["1"])[2:], abs=2e-4)
    assert os.listdir(tmp_path) == ["checkpoint.pt"]
