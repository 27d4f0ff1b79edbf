"""The linter and the formatter are content with every .py and .ipynb of the project."""

import subprocess
import sys

from support import checkout
from support.limits import SHORT
from tests.lessons import ROOT, worked_in


def ruff(*command: str) -> None:
    files = {*checkout.files(ROOT, "*.py", "*.ipynb")} - worked_in()
    run = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--force-exclude", *sorted(files)],
        cwd=ROOT, capture_output=True, text=True, timeout=SHORT,
    )  # fmt: skip
    assert run.returncode == 0, f"{run.stdout}{run.stderr}"


def test_lint():
    ruff("check", "--no-cache")


def test_format():
    ruff("format", "--check", "--no-cache")
