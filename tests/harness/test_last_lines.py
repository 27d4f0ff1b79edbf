"""The last lines of a run, and what is run once more: seen in runs of small courses."""

import pytest
from nbformat.v4 import new_output

from tests.harness import last_lines, versions
from tests.harness.small_course import PLAIN, SmallCourse, cell, stream

pytest_plugins = ["pytester"]


@pytest.fixture
def course(pytester):
    course = SmallCourse(pytester.path)
    course.copy_tests()
    return course


def test_a_line_says_which_output_differs_and_where():
    then = [new_output("stream", name="stdout", text="a\nkeeps 2.2 blocks\nc\n")]
    now = [new_output("stream", name="stdout", text="a\nkeeps 3.0 blocks\nd\n")]
    said = last_lines.first_difference(now, then, str)
    assert said == 'stored "keeps 2.2 blocks", now "keeps 3.0 blocks"'
    assert last_lines.first_difference([], then, str) == 'stored "a", now ""'
    long = "x" * 500
    now[0].text, then[0].text = f"{long}1{long}", f"{long}2{long}"
    said = last_lines.first_difference(now, then, str)
    assert len(said) < 2 * last_lines.WIDTH + 30 and "x1x" in said and "x2x" in said


def test_the_line_has_the_command_and_the_versions(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: "2.14")
    line = last_lines.cell_line("18-shard-everything.ipynb", 20, "it differs")
    assert line == (
        "18, cell 20: it differs (torch 2.14; stored with 2.15). "
        "Again: python3 -m helpers test notebooks/18-shard-everything.ipynb"
    )


@pytest.mark.parametrize(
    "said, accident",
    [
        ("subprocess.TimeoutExpired: Command 'x' timed out after 5 seconds", True),
        ("TimeoutError: no answer in 3 s", True),
        ("Timeout of 400 seconds exceeded while executing cell", True),
        ("Failed: Timeout (>600.0s) from pytest-timeout.", True),
        ("the kernel died (exit status -9, SIGKILL)", True),
        ("worker 'gw0' crashed while running 'tests/test_a.py::test_b'", True),
        ("AssertionError: assert 3 == 4", False),
        ("Cell outputs differ", False),
    ],
)
def test_only_limits_and_dead_processes_are_accidents(said, accident):
    assert bool(last_lines.ACCIDENT.search(said)) is accident


ONCE = """
import pathlib

def test_late():
    seen = pathlib.Path("seen")
    if not seen.exists():
        seen.touch()
        raise TimeoutError("no answer in 3 s")

def test_right():
    pass
"""
DIFFERS = "\ndef test_wrong():\n    assert 3 == 4\n"


@pytest.mark.parametrize("more, status", [("", 0), (DIFFERS, 1)])
def test_an_accident_is_run_once_more_and_named(course, pytester, more, status):
    (course.root / "test_once.py").write_text(ONCE + more)
    done = pytester.runpytest_subprocess(*PLAIN, "--once-more", "test_once.py")
    assert done.ret == status
    lines = done.outlines
    assert "FAILED, THEN PASSED test_once.py::test_late (TimeoutError)" in lines


def test_what_differs_is_not_run_again(course, pytester):
    course.add("01", cell("print('new')", stream("old\n")))
    done = pytester.runpytest_subprocess(*PLAIN, "--once-more", "notebooks")
    assert done.ret == 1
    text = done.stdout.str()
    assert "once more" not in text
    assert '01, cell 0: stored "old", now "new" (torch' in text


def test_a_file_that_cannot_be_collected_is_an_error_and_no_more(course, pytester):
    (course.root / "notebooks" / "01.ipynb").write_text("{")
    done = pytester.runpytest_inprocess(*PLAIN, "notebooks")
    done.assert_outcomes(errors=1)
