"""What every run of these tests has: with the course's tests, or alone."""

import functools
import signal
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

import simgpu
from support import limits


def pytest_configure(config: pytest.Config) -> None:
    # `pytest_plugins` is for a conftest.py at the root; the course's loads it, too
    config.pluginmanager.import_plugin("support.limits_plugin")
    # in the background of a script it is ignored, also by what the tests interrupt
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def simulated_ranks(simulated_ranks: Callable) -> Callable:
    """The plugin's, with a limit that fits this machine."""
    return functools.partial(simulated_ranks, seconds=limits.JOB)


@pytest.fixture
def log(simulated_gpus: ModuleType):
    """What runs on the GPUs of the test's mark."""
    return simulated_gpus.timeline()


@pytest.fixture
def stopped() -> Iterator[None]:
    """For tests that start GPUs themselves: none are left."""
    yield
    simgpu.stop()
