"""Which tests a change touches: every file has a row, and a run does what it says."""

import ast
import subprocess
from pathlib import Path

import pytest

from support import checkout
from tests.harness import touched
from tests.harness.small_course import PLAIN, SmallCourse

pytest_plugins = ["pytester"]
ONE = "notebooks/05-overlap-with-streams.ipynb"


# -- the table -------------------------------------------------------------------------


def test_every_file_has_a_row_with_tests():
    if checkout._known_to_git(touched.ROOT) is None:
        pytest.skip("without git, a file may be anybody's")

    def is_told(file: str) -> bool:
        row = touched.row_of(file)
        return row is not None and bool(
            touched.everything in row.tests or touched.tests_of(file)
        )

    untold = [file for file in touched.files() if not is_told(file)]
    assert untold == [], "give these a row in TABLE; without one, all tests run"


def test_every_row_is_used_and_its_tests_exist():
    rows = {touched.row_of(file) for file in touched.files()}
    assert [row for row in touched.TABLE if row not in rows] == []
    patterns = [it for row in rows if row for it in row.tests if isinstance(it, str)]
    lost = [it for it in (*touched.ALWAYS, *patterns) if not touched.matching(it)]
    assert lost == []


@pytest.mark.parametrize(
    "file, tests, others",
    [
        (ONE, [ONE, "tests/test_lesson_rules.py", "tests/test_take_home.py"],
         ["notebooks/06-catch-races.ipynb", "simgpu/tests/test_streams.py"]),
        ("notebooks/scripts/prefetch.py", [ONE, "tests/test_take_home.py"],
         ["notebooks/06-catch-races.ipynb"]),
        # the script of a lesson that a test starts by the lesson's number
        ("notebooks/scripts/combine_meshes.py", ["tests/test_scripts_in_ranks.py"],
         ["tests/test_scripts_of_one_process.py"]),
        ("notebooks/exercises/lesson_05.py", [ONE, "tests/test_check.py"], []),
        ("tests/answers/lesson_05.py", ["tests/test_check.py"], [ONE]),
        ("helpers/elastic.py", ["notebooks/24-survive-failures.ipynb"], [ONE]),
        ("helpers/draw/averaging.py", ["notebooks/16-average-gradients.ipynb"], [ONE]),
        # by way of a module that imports it, or a file that reads it
        ("helpers/draw/stages.py", ["tests/test_stages.py"], []),
        ("helpers/digits.csv.gz", ["notebooks/16-average-gradients.ipynb"], []),
        ("simgpu/src/simgpu/_dry/peers.py",
         ["simgpu/tests/test_dry_run.py", "notebooks/27-choose-a-layout.ipynb"],
         [ONE, "simgpu/tests/test_streams.py"]),
        ("simgpu/src/simgpu/_prove/run.py",
         ["simgpu/tests/test_prove.py", "tests/test_incidents.py"], [ONE]),
        ("simgpu/README.md", ["simgpu/tests/test_readme.py", "tests/test_pages.py"],
         [ONE]),
        ("simgpu/tests/test_clock.py", ["simgpu/tests/test_clock.py"], [ONE]),
        ("simgpu/tests/recorded/replay.py", ["tests/test_fidelity.py"], [ONE]),
    ],
)  # fmt: skip
def test_a_file_selects_its_tests(file, tests, others):
    found = touched.tests_of(file)
    assert found is not None and found >= {*tests}
    assert not found & {*others}


@pytest.mark.parametrize(
    "file",
    ["requirements.txt", "conftest.py", "tests/harness/kernels.py", "helpers/new.txt",
     "simgpu/src/simgpu/_timing/clock.py", "a/new/file.txt", "tests/test_was_here.py",
     "simgpu/tests/support/limits.py", "notebooks/scripts/new.json"],
)  # fmt: skip
def test_what_cannot_be_told_selects_everything(file):
    assert touched.tests_of(file) is None


def test_a_cell_that_is_no_python_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(touched, "ROOT", tmp_path)
    course = SmallCourse(tmp_path)
    course.add("99-own", "%matplotlib inline\nimport helpers", "x = ?", "import tests")
    imported = [
        ast.unparse(node) for node in touched._tree("notebooks/99-own.ipynb").body
    ]
    assert imported == ["import helpers", "import tests"]


# -- what differs ----------------------------------------------------------------------


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    try:
        subprocess.run(
            ["git", *who, *words], cwd=folder, check=True, capture_output=True
        )
    except OSError:
        pytest.skip("git is not here")


def commit(folder: Path) -> None:
    git(folder, "init")
    git(folder, "add", "--all")
    git(folder, "commit", "-m", "all")


@pytest.fixture
def changed(tmp_path, monkeypatch) -> Path:
    """A checkout in which files were changed, removed, renamed and added."""
    monkeypatch.setattr(touched, "ROOT", tmp_path)
    for name in ("same", "changed", "removed", "old name", ".gitignore"):
        (tmp_path / name).write_text(f"{name}\n" * 9)
    (tmp_path / ".gitignore").write_text("ignored\n")
    commit(tmp_path)
    (tmp_path / "changed").write_text("other")
    (tmp_path / "removed").unlink()
    (tmp_path / "old name").rename(tmp_path / "new näme")
    git(tmp_path, "add", "new näme")
    for name in ("added", "ignored"):
        (tmp_path / name).touch()
    return tmp_path


def test_what_differs_is_changed_removed_renamed_or_new(changed, monkeypatch):
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # a hook's
    differs = ["added", "changed", "new näme", "old name", "removed"]
    assert touched.differing("HEAD") == differs


@pytest.mark.parametrize("commit", ["main~999", "no-such", "--all", ""])
def test_a_commit_that_git_does_not_know_selects_everything(changed, commit):
    selected, line = touched.selection(commit)
    assert selected is None
    assert (
        line == f"since {commit}: all tests, because git knows of no such commit here"
    )


def test_without_git_everything_is_selected(changed, monkeypatch):
    monkeypatch.setenv("PATH", "")
    selected, line = touched.selection("HEAD")
    assert selected is None
    assert line == "since HEAD: all tests, because there is no git here"


@pytest.mark.parametrize(
    "differs, number, line",
    [
        ([], 0, "since a: 0 of {all} files, for nothing differs"),
        (["tests/answers/lesson_05.py"], 1 + len(touched.ALWAYS),
         "since a: {number} of {all} files, for tests/answers/lesson_05.py"),
        (["tests/README.md", "requirements.txt", "new"], None,
         "since a: all tests, because of requirements.txt, new"),
    ],
)  # fmt: skip
def test_the_line_says_how_many_and_why(monkeypatch, differs, number, line):
    monkeypatch.setattr(touched, "differing", lambda commit: differs)
    selected, said = touched.selection("a")
    assert (selected if selected is None else len(selected)) == number
    assert said == line.format(number=number, all=len(touched.tests()))


# -- a run -----------------------------------------------------------------------------


@pytest.fixture
def course(pytester):
    course = SmallCourse(pytester.path)
    course.copy_tests()
    for test in (course.root / "tests").rglob("test_*.py"):
        test.unlink()
    ignored = "__pycache__/\n/std*\n/runpytest*\n"  # the last two are of pytester
    (course.root / ".gitignore").write_text(ignored)
    course.add("01-first", "x = 1")
    course.add("02-second", "x = 2")
    commit(course.root)
    return course


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_a_run_has_the_tests_of_what_differs(course, pytester, workers):
    course.add("02-second", "x = 3")
    done = pytester.runpytest_subprocess(*PLAIN, "--since", "HEAD", *workers)
    done.assert_outcomes(passed=2)  # its cell and its budget
    line = "since HEAD: 1 of 2 files, for notebooks/02-second.ipynb"
    assert done.outlines.count(line) == 2  # before the tests, and after


def test_a_run_of_nothing_is_green_and_one_of_everything_says_why(course, pytester):
    done = pytester.runpytest_subprocess(*PLAIN, "--since", "HEAD")
    assert done.ret == 0
    assert "since HEAD: 0 of 2 files, for nothing differs" in done.outlines
    (course.root / "new.txt").touch()
    done = pytester.runpytest_subprocess(*PLAIN, "--since", "HEAD")
    done.assert_outcomes(passed=4)
    assert "since HEAD: all tests, because of new.txt" in done.outlines
