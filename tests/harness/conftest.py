"""A small course for a test, and pytest on it in this process.

A test file that uses these names `pytester` in `pytest_plugins`.
"""

from collections.abc import Callable

import pytest

from support.limits import MOMENT, SHORT
from tests.harness import kernels, processes
from tests.harness.small_course import PLAIN, SmallCourse, outcomes

Run = Callable[..., tuple[dict[str, str], pytest.RunResult]]


@pytest.fixture
def course(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> SmallCourse:
    """A course without notebooks; what its notebooks leave is killed soon."""
    monkeypatch.setattr(processes, "GRACE", MOMENT)
    monkeypatch.setattr(kernels, "SECONDS_TO_STOP", MOMENT)
    return SmallCourse(pytester.path)


@pytest.fixture
def run(course: SmallCourse, pytester: pytest.Pytester) -> Run:
    """Runs pytest on the course; the outcome of each test, and all of the result."""

    def run(*options: str) -> tuple[dict[str, str], pytest.RunResult]:
        limit = f"--nbval-cell-timeout={SHORT}"
        done = pytester.runpytest_inprocess(*PLAIN, limit, *options)
        return outcomes(done.stdout.str()), done

    return run
