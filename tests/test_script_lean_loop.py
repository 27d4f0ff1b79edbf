"""`lean_loop.py`: the script that lesson 02 gives to take home."""

import re
from pathlib import Path

import pytest

import simgpu
from helpers import count_copies
from tests import take_home
from tests.launching import load

pytestmark = pytest.mark.slow

LOSSES = re.compile(r"epoch (\d): loss (\d\.\d{4}) first, (\d\.\d{4}) last")


@pytest.fixture
def gpu():
    simgpu.start(1)
    yield
    simgpu.stop()


def test_the_losses_fall_from_epoch_to_epoch(tmp_path: Path):
    found = LOSSES.findall(take_home.run("02", tmp_path))
    assert [epoch for epoch, _, _ in found] == ["0", "1", "2"]
    last = [float(loss) for _, _, loss in found]
    assert last == sorted(last, reverse=True) and last[-1] < 1


def test_an_epoch_reads_its_losses_in_one_copy_and_sends_nothing(gpu, capsys):
    script = load("lean_loop.py")
    with count_copies() as copies:
        script.main()
    sent, *read = copies
    assert (sent.source, sent.nbytes) == ("cpu", 2048 * 64 * 4)
    assert read == [("cuda:0", "cpu", 2048 // script.BATCH * 4)] * script.EPOCHS
    assert len(capsys.readouterr().out.splitlines()) == script.EPOCHS
