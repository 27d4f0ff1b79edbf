"""`feed_loop.py`: the script that lesson 11 gives to take home."""

import re
from pathlib import Path

import pytest

from tests import take_home

pytestmark = pytest.mark.slow

LINE = re.compile(
    r"epoch (\d): loss (\d\.\d{4}), waited ([\d.]+) ms a step, computed ([\d.]+) ms, "
    r"GPU idle ([\d.]+) ms"
)
ALONE = "python -m simgpu --gpus 1 feed_loop.py --workers 0 --load-ms 0.2"


def test_losses_fall_and_do_not_depend_on_the_workers(tmp_path: Path):
    two = LINE.findall(take_home.run("11", tmp_path))
    alone = LINE.findall(take_home.run_command(ALONE, tmp_path))
    losses = [float(loss) for _, loss, *_ in two]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)
    assert losses == [float(loss) for _, loss, *_ in alone]


def test_without_workers_a_step_waits_for_all_of_its_items(tmp_path: Path):
    for _, _, waited, computed, idle in LINE.findall(
        take_home.run_command(ALONE, tmp_path)
    ):
        assert float(waited) > 128 * 0.2  # ms, measured
        assert 0.1 < float(computed) < 1  # ms, simulated
        assert float(idle) < 0.2  # simulated: your loader's time is not in it
