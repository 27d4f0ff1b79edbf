"""What tests of the scripts share: each command that starts one runs once."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import take_home
from tests.launching import edited
from tests.take_home import Runs


@pytest.fixture(scope="session")
def ran(tmp_path_factory) -> Runs:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of the run
    return Runs(folder / "scripts")


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., str]:
    """Starts a script with a reader's own text in places."""

    def run(name: str, edits: dict[str, str], way="1 gpus", code: int | None = 0):
        """What it prints; or writes to stderr, if its status is not to be 0.

        Args:
            name: of the script.
            edits: old text -> new text.
            way: how many and options: "2 ranks --tp 2", "1 gpus --length 8".
            code: the exit status; None is any but 0.
        """
        command = take_home.command_of(edited(name, edits, tmp_path), way)
        done = take_home.start_command(command, tmp_path)
        is_right = done.returncode != 0 if code is None else done.returncode == code
        assert is_right, done.stderr
        return done.stdout if code == 0 else done.stderr

    return run
