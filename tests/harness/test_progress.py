"""Lines about a long run: what they say, and what stands where they are off."""

import threading
from types import SimpleNamespace

import pytest

from support.limits import SHORT
from tests.harness import progress
from tests.harness.small_course import PLAIN, SmallCourse

pytest_plugins = ["pytester"]


def of(*tests: str) -> list:
    return [SimpleNamespace(nodeid=test) for test in tests]


@pytest.fixture
def written() -> list[str]:
    return []


@pytest.fixture
def run(written):
    stats = {"passed": of("a::1", "a::2"), "error": of("a::3", "a::3")}
    return progress.Progress(SimpleNamespace(stats=stats, write_line=written.append))


def test_a_line_says_how_far_a_run_is_and_what_runs_longest(run):
    run.pytest_xdist_node_collection_finished(None, ["a"] * 8)
    run.pytest_sessionfinish()
    for test, begun in (("b::slow", 100.0), ("b::next", 130.0)):
        run._running[test] = begun
    run._begun = 10.0
    assert run.line(161.2) == "  2:31  38%  2 passed, 1 error; b::slow runs for 61 s"
    run.pytest_runtest_logfinish("b::slow")
    assert run.line(161.2).endswith("; b::next runs for 31 s")


def test_lines_come_while_nothing_ends_and_stop_with_the_run(run, written, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.01)
    came = threading.Event()
    run._reporter.write_line = lambda line: (written.append(line), came.set())
    run.pytest_collection_finish(SimpleNamespace(items=of("b::hangs")))
    run.pytest_runtest_logstart("b::hangs")
    assert came.wait(SHORT)
    run.pytest_sessionfinish()
    run._lines.join(SHORT)
    assert not run._lines.is_alive()
    assert "b::hangs" in written[-1] or len(written) == 1


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_a_run_has_no_dots_and_names_a_failure_at_once(pytester, workers):
    course = SmallCourse(pytester.path)
    course.copy_tests()
    tests = "def test_right():\n    pass\n\ndef test_wrong():\n    assert 3 == 4\n"
    (course.root / "test_some.py").write_text(tests)
    plain = [word for word in PLAIN if word != "-rA"]
    done = pytester.runpytest_subprocess(*plain, "--progress", *workers, "test_some.py")
    done.assert_outcomes(passed=1, failed=1)
    assert "failed: test_some.py::test_wrong" in done.outlines
    assert not any(line.startswith((".", "F")) for line in done.outlines[:-4])
