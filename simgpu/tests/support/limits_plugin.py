"""A pytest plugin: no test takes longer than `limits.TEST`, where pytest-timeout is.

The head of a run says how slow the machine is. A test that takes too long fails
with the stacks of all its threads, and the run goes on (where there are signals).
"""

import pytest

from support import limits


def pytest_report_header() -> str:
    return limits.note()


def pytest_itemcollected(item: pytest.Item) -> None:
    manager, option = item.config.pluginmanager, item.config.option
    if not manager.hasplugin("timeout") or option.timeout is not None:
        return  # it is not installed, or the command says how long
    if item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(limits.TEST))
