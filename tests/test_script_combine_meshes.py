"""`combine_meshes.py`: the script that lesson 23 gives to take home, unmodified."""

import re
from pathlib import Path

import pytest

from tests import take_home

pytestmark = pytest.mark.slow

WAYS = {  # ranks and options -> copies, shards and slices of the model
    "1": (1, 1, 1),
    "2": (1, 2, 1),
    "4 --tp 2": (1, 2, 2),
    "4 --replicate 2": (2, 2, 1),
}


def printed(way: str, folder: Path) -> str:
    if way == "4 --tp 2":
        return take_home.run("23", folder)  # the lesson's own command
    ranks, _, options = way.partition(" ")
    words = f"torchrun --standalone --nproc-per-node={ranks} combine_meshes.py"
    return take_home.run_command(
        f"python -m simgpu --gpus {ranks} {words} {options}".strip(), folder
    )


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("meshes")
    return {way: printed(way, folder) for way in WAYS}


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d\.\d{4})", text)]


def stored(text: str) -> int:
    return int(re.search(r"stores ([\d,]+) bytes", text)[1].replace(",", ""))


def test_the_loss_falls(outputs):
    found = losses(outputs["1"])
    assert len(found) == 8 and found[-1] < 0.9 * found[0]


@pytest.mark.parametrize("way", list(WAYS)[1:])
def test_each_mesh_has_the_losses_of_one_process(outputs, way):
    # sums in another order
    assert losses(outputs[way]) == pytest.approx(losses(outputs["1"]), abs=2e-4)
    assert f"mesh {WAYS[way]}, step 0" in outputs[way]


@pytest.mark.parametrize("way", list(WAYS)[1:])
def test_copies_do_not_divide_what_a_rank_stores(outputs, way):
    _, shards, slices = WAYS[way]
    share = stored(outputs["1"]) / shards / slices
    assert share <= stored(outputs[way]) < 1.02 * share


def test_a_mesh_that_does_not_fit_the_ranks_is_refused(tmp_path):
    words = "torchrun --standalone --nproc-per-node=2 combine_meshes.py --tp 4"
    with pytest.raises(AssertionError, match="1 x 4 does not divide 2 ranks"):
        take_home.run_command(f"python -m simgpu --gpus 2 {words}", tmp_path)
