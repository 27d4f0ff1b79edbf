"""What tests of the scripts share: each command that starts one runs once."""

import os

import pytest

from tests.take_home import Runs


@pytest.fixture(scope="session")
def ran(tmp_path_factory) -> Runs:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of the run
    return Runs(folder / "scripts")
