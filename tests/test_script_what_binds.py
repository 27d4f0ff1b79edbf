"""`what_binds.py`, which lesson 08 gives to take home, and the recorded matmuls."""

import re

import pytest

from helpers import explore
from scripts.recorded_matmuls import recorded
from tests import take_home

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> str:
    return take_home.run("08", tmp_path_factory.mktemp("what_binds"))


def test_it_says_how_long_the_step_and_its_kernels_take(printed):
    took, count, busy = map(
        int,
        re.search(r"takes (\d+) µs; its (\d+) kernels run for (\d+)", printed).groups(),
    )
    kernels = explore.step_kernels(1024)
    assert count == len(kernels)
    assert busy == round(1e6 * sum(kernel.seconds for kernel in kernels))
    assert busy < 10 * count < took


def test_it_names_the_longest_kernels_and_what_binds(printed):
    names = re.findall(r"^(\w+) +\d+ x", printed, re.M)
    assert names[:2] == ["mm", "addmm"] and len(names) == 8
    assert re.search(r"^relu .* memory$", printed, re.M)
    assert re.search(r"^addmm .* FLOPs$", printed, re.M)
    assert "launch-bound, or the host waits" in printed.splitlines()[-1]


def test_it_says_the_rate_of_matmuls_and_their_share_of_the_peak(printed):
    rate, share = re.search(r"([\d.]+) TFLOP/s, ([\d.]+)% of PEAK", printed).groups()
    matmuls = [k for k in explore.step_kernels(1024) if k.name.endswith("mm")]
    flops = 1024 * 512 * (4 * 64 + 6 * 10)
    seconds = sum(kernel.seconds for kernel in matmuls)
    assert float(rate) == pytest.approx(flops / seconds / 1e12, rel=0.01)
    assert float(share) == pytest.approx(100 * float(rate) / 19.5, abs=0.1)


def test_no_recorded_matmul_is_faster_than_its_roof():
    found = recorded()
    assert len(found) == 220
    assert all(matmul.seconds > matmul.roof_seconds for matmul in found)


def test_recorded_matmuls_are_found_by_card_and_size():
    found = recorded("H100", 8192)
    assert {(m.card, m.columns, m.inner) for m in found} == {("H100", 8192, 8192)}
    assert [m.rows for m in found] == sorted(m.rows for m in found)
    assert found[0].flops == 2 * 8192 * 8192
    assert found[0].nbytes == 2 * (8192 * 8192 + 2 * 8192)
