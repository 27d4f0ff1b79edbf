"""`score_all.py`: lesson 00's script, run unmodified."""

import re
from pathlib import Path

import pytest
import torch

from tests import take_home

pytestmark = pytest.mark.slow

IMAGES = 20_000


def shares(printed: str) -> dict[str, int]:
    """By the device, how many images it says it has scored."""
    found = re.findall(r"^(cpu|cuda:\d) .*: ([\d,]+) images", printed, re.M)
    return {device: int(count.replace(",", "")) for device, count in found}


def scores_in(folder: Path) -> torch.Tensor:
    return torch.load(folder / "scores.pt")


@pytest.fixture(scope="module")
def on_four(tmp_path_factory):
    """What the lesson's own command prints, and the scores that it saves."""
    folder = tmp_path_factory.mktemp("score_all")
    return take_home.run("00", folder), scores_in(folder)


def test_four_gpus_share_all_images(on_four):
    printed, _ = on_four
    found = shares(printed)
    assert list(found) == [f"cuda:{index}" for index in range(4)]
    assert sum(found.values()) == IMAGES
    assert max(found.values()) - min(found.values()) <= 1024  # a batch
    assert printed.count("A100") == 4  # each GPU by its name
    assert "20,000 images scored" in printed
    assert float(re.search(r"in the first batch: (\S+)", printed)[1]) < 1e-5


@pytest.mark.parametrize("visible, device", [("0", "cuda:0"), ("", "cpu")])
def test_one_device_gives_the_scores_of_four(
    on_four, visible, device, tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    printed = take_home.run("00", tmp_path)
    assert shares(printed) == {device: IMAGES}
    alone, (_, four) = scores_in(tmp_path), on_four
    torch.testing.assert_close(four, alone, rtol=0, atol=1e-5)
