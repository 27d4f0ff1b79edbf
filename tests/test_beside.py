"""Packages beside the lessons are found from everywhere, and never somebody else's."""

import subprocess
import sys
from pathlib import Path

import pytest

from helpers import beside
from support.limits import SHORT

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "notebooks" / "exercises" / "__init__.py"
LOAD = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from helpers import beside
print(beside.load("exercises").__file__)
"""


def run_in(folder: Path, code: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=SHORT
    )


def test_exercises_are_found_from_another_folder(tmp_path):
    done = run_in(tmp_path, LOAD)
    assert (done.stdout, done.stderr) == (f"{HOME}\n", "")


def test_a_users_own_exercises_beside_a_notebook_are_not_taken(tmp_path):
    (tmp_path / "exercises.py").write_text("raise RuntimeError('not yours')")
    assert run_in(tmp_path, LOAD).stdout == f"{HOME}\n"


@pytest.mark.parametrize("first", ["import exercises", "sys.path += [NOTEBOOKS]"])
@pytest.mark.parametrize("name", ["exercises.py", "exercises/__init__.py"])
def test_a_users_own_exercises_that_come_first_are_named(tmp_path, first, name):
    own = tmp_path / name
    own.parent.mkdir(exist_ok=True)
    own.write_text("")
    code = f"import sys; NOTEBOOKS = {str(HOME.parents[1])!r}; {first}\n{LOAD}"
    done = run_in(tmp_path, code)
    last = done.stderr.splitlines()[-1]
    assert f"`import exercises` gives {own}, and the course needs {HOME.parent}" in last
    assert "rename yours" in last


def test_a_folder_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(beside, "NOTEBOOKS", tmp_path)
    with pytest.raises(ImportError, match="exercises is missing: this copy of the"):
        beside.load("exercises")
