"""The last lines of a run, and what is run once more: seen in runs of small courses."""

import datetime
import re
import subprocess
from types import SimpleNamespace

import pytest
from nbformat.v4 import new_output

from tests.harness import last_lines, versions
from tests.harness.small_course import PLAIN, ROOT, SmallCourse, cell, stream

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
    "said, what",
    [
        ("subprocess.TimeoutExpired: Command 'x' timed out", "TimeoutExpired"),
        ("TimeoutError: no answer in 3 s", "TimeoutError"),
        (
            "AssertionError: Command 'x' timed out after 9.5 seconds",
            "Command 'x' timed out after 9.5 seconds",
        ),
        ("Failed: Timeout (>600.0s) from pytest-timeout.", "Timeout (>600.0s"),
        ("AssertionError: assert 3 == 4\n  TimeoutError: no answer", None),
        ("AssertionError: assert 'TimeoutError' in 'no answer'", None),
        ("AssertionError: assert 'the kernel died' in ''", None),
    ],
)
def test_only_an_exceptions_own_line_tells_an_accident(said, what):
    crash = SimpleNamespace(reprcrash=SimpleNamespace(message=said))
    report = SimpleNamespace(longrepr=crash, user_properties=[])
    assert last_lines.accident(report) == what


@pytest.mark.parametrize(
    "cause, what",
    [
        ("Timeout of 400 seconds exceeded executing cell", "Timeout of 400 seconds"),
        ("the kernel died (exit status -9, SIGKILL)", "the kernel died"),
        ("TimeoutError: no answer in 3 s", "TimeoutError"),
        ("RankError: rank 1: TimeoutError", None),
        ("", None),  # outputs differ
    ],
)
def test_a_cell_is_judged_by_what_stopped_it(cause, what):
    report = SimpleNamespace(
        longrepr="TimeoutError", user_properties=[(last_lines.CAUSE, cause)]
    )
    said = last_lines.accident(report)
    assert said is what if what is None else said.startswith(what)


def test_a_worker_that_died_is_an_accident():
    died = "worker 'gw0' crashed while running 'tests/test_a.py::test_b'"
    report = SimpleNamespace(longrepr=died, user_properties=[])
    assert last_lines.accident(report) == "worker 'gw0' crashed"


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
def test_an_accident_is_run_once_more_named_and_kept(course, pytester, more, status):
    (course.root / "test_once.py").write_text(ONCE + more)
    accidents = course.root / last_lines.ACCIDENTS
    accidents.write_text("of before\n")
    done = pytester.runpytest_subprocess(*PLAIN, "--once-more", "test_once.py")
    assert done.ret == status
    lines = done.outlines
    assert "FAILED, THEN PASSED test_once.py::test_late (TimeoutError)" in lines
    assert (
        f"1 failed, then passed; mend the cause, listed in {last_lines.ACCIDENTS}"
        in lines
    )
    before, line = accidents.read_text().splitlines()
    today = datetime.date.today()
    assert before == "of before" and re.fullmatch(
        rf"{today} \(no (commit|git)\) test_once.py::test_late: "
        "TimeoutError: no answer in 3 s",
        line,
    )


def test_where_nothing_can_be_written_a_run_says_so_and_stays_green(course, pytester):
    (course.root / "test_once.py").write_text(ONCE)
    (course.root / last_lines.ACCIDENTS).mkdir()  # root may write to any file
    done = pytester.runpytest_subprocess(*PLAIN, "--once-more", "test_once.py")
    assert done.ret == 0
    said = f"1 failed, then passed; not kept in {last_lines.ACCIDENTS}: "
    assert any(line.startswith(said) for line in done.outlines)


def test_no_accident_waits_for_its_cause():
    """Of those that are committed: a reader's own run stays as it was."""
    lines = last_lines.committed(ROOT).splitlines()
    advice = "these failed, and passed alone: mend the cause, then remove the line from"
    assert not lines, "\n".join([f"{advice} {last_lines.ACCIDENTS}", *lines])


def test_only_committed_accidents_wait(tmp_path):
    file = tmp_path / last_lines.ACCIDENTS
    file.parent.mkdir()
    file.write_text("a line\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    assert last_lines.committed(tmp_path) == ""
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    file.write_text("a line\nanother, of this run\n")
    assert last_lines.committed(tmp_path) == "a line\n"


def test_what_differs_is_not_run_again(course, pytester):
    course.add("01", cell("print('new')", stream("old\n")))
    done = pytester.runpytest_subprocess(*PLAIN, "--once-more", "notebooks")
    assert done.ret == 1
    text = done.stdout.str()
    assert "once more" not in text
    assert '01, cell 0: stored "old", now "new" (torch' in text


SAYS = """
print("TimeoutError: no answer in 3 s")
raise ValueError("no such rank")
"""


def test_the_line_of_a_cell_that_raised_has_its_exception(course, pytester):
    course.add("01", cell(SAYS))
    done = pytester.runpytest_subprocess(*PLAIN, "--once-more", "notebooks")
    text = done.stdout.str()
    assert "once more" not in text
    assert "01, cell 0: ValueError: no such rank (torch" in text


def test_a_file_that_cannot_be_collected_is_an_error_and_no_more(course, pytester):
    (course.root / "notebooks" / "01.ipynb").write_text("{")
    done = pytester.runpytest_inprocess(*PLAIN, "notebooks")
    done.assert_outcomes(errors=1)
