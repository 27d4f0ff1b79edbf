"""What tests of the scripts share: each command that starts one runs once."""

import pytest

from tests.take_home import Runs


@pytest.fixture(scope="session")
def ran(tmp_path_factory) -> Runs:
    return Runs(lambda: tmp_path_factory.mktemp("script"))
