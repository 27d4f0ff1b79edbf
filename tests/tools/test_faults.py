"""Lessons do without what many machines lack; faults.py sees to it, and sees faults.

Two quick lessons, one of them with ranks. `python -m tests.tools.faults` runs the
others as well.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.limits import JOB, SHORT
from tests.harness.small_course import LEAVES_A_SERVER, ROOT, SmallCourse
from tests.tools import faults

pytestmark = pytest.mark.slow

WHY_NOT = faults.why_not()
needs_root = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
ONCE = ["user", "path", "home", "shm", "network", "memory"]
ONLY_ONCE = "assert 'again' not in globals(), 'a second time'\nagain = True"
LEAVES = LEAVES_A_SERVER + 'open("written.txt", "w").close()'


def run(root: Path, *words: str) -> tuple[int, str]:
    """Runs the command of a course, for at most four minutes."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.faults", *words],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=JOB,
    )
    return done.returncode, done.stdout


@needs_root
@pytest.mark.long
def test_two_lessons_with_all_faults():
    """Once; twice would take a minute more."""
    code, printed = run(ROOT, "02", "12", "--only", *ONCE)
    assert code == 0, printed
    assert f"these hold: {' '.join(ONCE)}\n" in printed
    assert printed.count(" ran ") == 2


@needs_root
def test_what_lessons_do_wrong_is_found(tmp_path):
    course = SmallCourse(tmp_path)
    course.copy_tests()
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "__init__.py").touch()
    course.add("01-only-once", ONLY_ONCE)
    course.add("02-leaves-much", LEAVES)
    course.add("03-is-not-asked-for", "1 / 0")
    code, printed = run(tmp_path, "01", "02")
    assert code == 1
    assert f"these hold: twice {' '.join(ONCE)}\n" in printed
    for words in (
        "AssertionError: a second time",
        "02-leaves-much: left running: process",
        "02-leaves-much: a socket not on loopback: LISTEN 0.0.0.0",
        "02-leaves-much: wrote",
    ):
        assert words in printed
    assert "03-is-not" not in printed


def test_the_probe_sees_that_faults_do_not_hold(tmp_path):
    """Those that no machine has by itself, as far as this is run by somebody."""
    here = subprocess.run(
        [sys.executable, "-c", faults.PROBE, str(tmp_path), "user", "path", "home"],
        env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=SHORT,
    )
    assert (here.returncode, here.stdout.split()) == (0, [])
