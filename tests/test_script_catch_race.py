"""`catch_race.py`: lesson 06's script, run unmodified, and with its cures."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import take_home
from tests.launching import ROOT, SCRIPTS, environment

pytestmark = pytest.mark.slow


def run(folder: Path, cure: str, races: str = "raise") -> subprocess.CompletedProcess:
    options = ["--gpus", "1", "--races", races]
    script = [str(SCRIPTS / "catch_race.py"), "--cure", cure]
    with environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)) as environ:
        return subprocess.run(
            [sys.executable, "-m", "simgpu", *options, *script],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=take_home.SECONDS,
        )


def test_it_prints_both_losses_and_their_difference(tmp_path):
    printed = take_home.run("06", tmp_path)
    two, one = (float(word) for word in re.findall(r"loss (\d\.\d{4})", printed))
    assert two == one < 1.5  # ten classes: guessing has 2.3
    assert "largest difference of a loss: 0.0000" in printed


@pytest.mark.parametrize("cure", ["wait_stream", "wait_event"])
def test_a_cure_leaves_no_race(cure, tmp_path):
    done = run(tmp_path, cure)
    assert done.returncode == 0, done.stderr
    assert f"cure {cure}: loss" in done.stdout


def test_without_a_cure_the_race_is_an_error(tmp_path):
    done = run(tmp_path, "none")
    assert done.returncode != 0
    assert "possible data race" in done.stderr and "in train" in done.stderr


def test_a_warning_names_the_copy_and_the_model(tmp_path):
    done = run(tmp_path, "none", "warn")
    assert done.returncode == 0, done.stderr
    (write,) = re.findall(r"writes it on stream 1 .*: (.+)", done.stderr)
    (read,) = re.findall(r"reads it on the default stream .*: (.+)", done.stderr)
    assert "x.cuda(non_blocking=True)" in write and "model(x)" in read
