"""`bus_bandwidth.py`: lesson 15's script, run unmodified on four ranks and on two."""

import re
from pathlib import Path

import pytest

import simgpu
from tests import take_home

pytestmark = pytest.mark.slow

ROW = re.compile(r"^ *([\d,]+) +([\d.]+) +([\d.]+) +([\d.]+)  (.+)$", re.M)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Ranks -> size in bytes -> microseconds, the two bandwidths, the values."""
    found = {}
    for ranks in (4, 2):
        folder: Path = tmp_path_factory.mktemp("bus_bandwidth")
        words = f"torchrun --standalone --nproc-per-node={ranks} bus_bandwidth.py"
        if ranks == 4:
            printed = take_home.run("15", folder)
        else:
            command = f"python -m simgpu --gpus 4 {words}"
            printed = take_home.run_command(command, folder)
        assert f"on {ranks} x NVIDIA A100" in printed
        found[ranks] = {
            int(size.replace(",", "")): (float(t), float(a), float(b), values)
            for size, t, a, b, values in ROW.findall(printed)
        }
    return found


@pytest.mark.parametrize("ranks", [4, 2])
def test_every_sum_is_right(tables, ranks):
    assert [row[3] for row in tables[ranks].values()] == ["right"] * 4


@pytest.mark.parametrize("ranks", [4, 2])
def test_bandwidths_follow_from_the_time(tables, ranks):
    for size, (microseconds, algorithm, bus, _) in tables[ranks].items():
        assert algorithm == pytest.approx(size / microseconds / 1e3, rel=0.01, abs=0.01)
        factor = 2 * (ranks - 1) / ranks
        assert bus == pytest.approx(algorithm * factor, rel=0.01, abs=0.01)


def test_a_large_message_takes_the_simulators_time_for_it(tables):
    chosen = simgpu.estimate_collective("all_reduce", 2**24, ranks=4, card="A100")
    microseconds, _, bus, _ = tables[4][2**24]
    assert microseconds == pytest.approx(chosen.seconds * 1e6, rel=0.03)
    assert bus == pytest.approx(chosen.bus_bandwidth / 1e9, rel=0.03)
