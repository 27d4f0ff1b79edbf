"""The linter and the formatter are content with every .py and .ipynb."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def ruff(*command: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, f"{run.stdout}{run.stderr}"


def test_lint():
    ruff("check", "--no-cache")


def test_format():
    ruff("format", "--check", "--no-cache")
