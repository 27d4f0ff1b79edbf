"""`mixed_precision.py`: lesson 09's script, run unmodified in three types."""

import re
from pathlib import Path

import pytest

from tests import take_home

pytestmark = pytest.mark.slow

COMMAND = "python -m simgpu --gpus 1 mixed_precision.py --dtype"


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]


def test_too_large_a_scale_skips_steps_until_it_fits(tmp_path: Path):
    printed = take_home.run("09", tmp_path)  # the lesson's own command
    (skipped,) = re.findall(r"float16: (\d+) of 48 steps skipped", printed)
    assert 1 <= int(skipped) < 24
    first, *_, last = losses(printed)
    assert last < first < 2.4


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed_precision")
    types = ("float32", "float16", "bfloat16")
    return {t: take_home.run_command(f"{COMMAND} {t}", folder) for t in types}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixed_precision_learns_like_float32(dtype, printed):
    assert losses(printed[dtype]) == pytest.approx(losses(printed["float32"]), abs=0.01)
    assert f"{dtype}: 0 of 48 steps skipped" in printed[dtype]


def test_narrow_steps_are_slower_in_mixed_precision(printed):
    """Casts are kernels, and this step is bound by launches."""
    times = {
        dtype: float(re.search(r"([\d.]+) ms a step", text)[1])
        for dtype, text in printed.items()
    }
    assert times["float16"] > times["bfloat16"] > times["float32"]
