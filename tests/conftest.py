"""What tests share: values, and each command that starts a script, once in a run."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import take_home
from tests.launching import edited
from tests.once import Once
from tests.take_home import Runs


@pytest.fixture(scope="session")
def of_run(tmp_path_factory) -> Path:
    """A folder that is the same one in all processes of a run."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def ran(of_run: Path) -> Runs:
    return Runs(of_run / "scripts")


@pytest.fixture(scope="session")
def once(of_run: Path) -> Once:
    return Once(of_run / "once")


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
