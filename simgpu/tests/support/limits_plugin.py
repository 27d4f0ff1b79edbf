"""A pytest plugin: no test takes longer than `limits.TEST`, where pytest-timeout is.

The head of a run says how slow the machine is. A test that takes too long fails
with the stacks of all its threads, and the run goes on (where there are signals).

A test that finds no space in a full /dev/shm, where locks, queues and shared tensors of
processes are, is skipped: that is this machine's, as a tool that it lacks.
"""

import shutil

import pytest

from support import limits

SHARED = "/dev/shm"
LITTLE = 1 << 20  # bytes


def pytest_report_header() -> str:
    return limits.note()


def pytest_itemcollected(item: pytest.Item) -> None:
    manager, option = item.config.pluginmanager, item.config.option
    if not manager.hasplugin("timeout") or option.timeout is not None:
        return  # it is not installed, or the command says how long
    if item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(limits.TEST))


def is_full() -> bool:
    """Whether shared memory has next to nothing left."""
    try:
        return shutil.disk_usage(SHARED).free < LITTLE
    except OSError:  # there is none here
        return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if (
        report.failed
        and "No space left on device" in str(report.longrepr)
        and is_full()
    ):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), None, f"Skipped: {SHARED} is full")
    return report
