"""Lessons do without what many machines lack; faults.py sees to it, and sees faults.

Two quick lessons, together and under all faults at once. `python tests/faults.py` runs
the others as well.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import faults
from tests.test_budgets import LEAVES_A_SERVER
from tests.test_harness import Course

ROOT = Path(__file__).resolve().parents[1]
WHY_NOT = faults.why_not()
needs_root = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
ALL = "these hold: twice user path home shm network memory"
ONLY_ONCE = "assert 'again' not in globals(), 'a second time'\nagain = True"
LEAVES = LEAVES_A_SERVER + 'open("written.txt", "w").close()'


def run(root: Path, *words: str) -> tuple[int, str]:
    """Run the script of a course, for at most four minutes."""
    done = subprocess.run(
        [sys.executable, root / "tests" / "faults.py", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout


@needs_root
def test_two_lessons_together_with_all_faults():
    """Once; twice would take a minute more."""
    missing = ALL.removeprefix("these hold: twice ")
    words = ("02", "12", "--at-a-time", "2", "--only", *missing.split())
    code, printed = run(ROOT, *words)
    assert code == 0, printed
    assert f"these hold: {missing}" in printed
    assert printed.count(" ran ") == 2


@needs_root
def test_what_lessons_do_wrong_is_found(tmp_path):
    course = Course(tmp_path)
    shutil.copytree(ROOT / "helpers", tmp_path / "helpers")
    shutil.copy(ROOT / "tests" / "faults.py", tmp_path / "tests")
    course.add("01-only-once", ONLY_ONCE)
    course.add("02-leaves-much", LEAVES)
    course.add("03-is-right", "a = 1")
    code, printed = run(tmp_path, "01", "02", "--at-a-time", "2")
    assert code == 1
    assert ALL in printed
    assert "AssertionError: a second time" in printed
    assert "02-leaves-much: left running: process" in printed
    assert "02-leaves-much: a socket not on loopback: LISTEN 0.0.0.0" in printed
    assert "01-only-once and 02-leaves-much: wrote" in printed
    code, printed = run(tmp_path, "03", "--only", "network")
    assert code == 0, printed
    assert "these hold: network\n" in printed


def test_the_probe_sees_that_faults_do_not_hold(tmp_path):
    """Those that no machine has by itself, as far as this is run by somebody."""
    here = subprocess.run(
        [sys.executable, "-c", faults.PROBE, str(tmp_path), "user", "path", "home"],
        env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert (here.returncode, here.stdout.split()) == (0, [])
