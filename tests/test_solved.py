"""Which exercises are solved: read from saved notebooks, and checked from the shell."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from helpers import progress, solved
from support.limits import SHORT
from tests.launching import ROOT
from tests.lessons import WHY, lessons, worked_in

TITLES = {"04-one.ipynb": "# One", "07-another-one.ipynb": "# Another one\n\nText."}


def write(path: Path, *cells) -> None:
    cells = [new_markdown_cell(TITLES[path.name]), *cells]
    nbformat.write(new_notebook(cells=cells), path)


def exercise(source: str = "", *said: str):
    outputs = [
        new_output("execute_result", {"text/plain": text}, execution_count=1)
        for text in said
    ]
    return new_code_cell(source, metadata={"tags": ["exercise"]}, outputs=outputs)


def test_progress_is_what_the_notebooks_say(tmp_path: Path):
    right, wrong = "exercise 04.1: right", "exercise 04.2: wrong: 7 is too much"
    failed = "exercise 04.3: not checked: the check itself failed (KeyError: 'x')"
    printed = new_output("stream", name="stdout", text="a line\nexercise 10.1: right\n")
    cell = exercise()
    cell.outputs = [printed]
    cells = exercise("", right), exercise("", "7", wrong), exercise("", failed)
    write(tmp_path / "04-one.ipynb", *cells)
    write(tmp_path / "07-another-one.ipynb", cell, exercise(), new_code_cell("7"))
    found = progress(tmp_path)
    assert repr(found).splitlines() == [
        "04 One          ● ✗ ?",
        "07 Another one  ● ○",
        "solved: 2 of 5 exercises",
    ]
    assert [lesson.solved for lesson in found] == [1, 1]


def test_no_lessons_are_no_error(tmp_path: Path):
    assert repr(progress(tmp_path)) == "There are no lessons in this folder."


def test_the_stored_lessons_are_unsolved():
    """Those that git has; a reader's, who has saved answers, are not stored yet."""
    kept = set(lessons()) - worked_in()
    every = progress(ROOT / "notebooks")
    assert len(every) >= 19
    assert not [
        lesson for lesson, path in zip(every, lessons(), strict=True)
        if lesson.solved and path in kept
    ]  # fmt: skip


def test_no_lesson_was_committed_with_a_readers_work():
    command = ["git", "status", "--porcelain", "-z", "--", "notebooks"]
    try:
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        pytest.skip("git is not here")
    if said.returncode:
        pytest.skip("not a git checkout")
    changed = {ROOT / line[3:] for line in said.stdout.split("\0")}
    assert worked_in() <= changed, WHY


def test_a_lesson_is_run_and_its_exercises_are_heard(tmp_path: Path, capsys):
    path = tmp_path / "04-one.ipynb"
    find = f"import sys; sys.path.insert(0, {str(solved.NOTEBOOKS)!r})"
    say = f"{find}; from exercises.exercise import Verdict; Verdict('04.1', '{{}}')"
    fails = new_code_cell("1 / 0", metadata={"tags": ["raises-exception"]})
    cells = exercise(say.format("right")), fails, exercise("[].pop()"), exercise("7")
    write(path, *cells)
    before = path.read_bytes()
    assert not solved.run(path)
    assert capsys.readouterr().out.splitlines() == [
        "exercise 04.1: right",
        "exercise 04.2: wrong: IndexError: pop from empty list",
        "exercise 04.3: wrong: it says nothing",
    ]
    assert path.read_bytes() == before
    write(path, exercise(say.format("right"), "exercise 04.1: wrong: of old"))
    assert solved.run(path)


@pytest.mark.parametrize("number", ["77", "x", ""])
def test_a_lesson_that_is_not_there(number: str):
    command = [sys.executable, "-m", "helpers.solved", number]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=SHORT
    )
    assert done.returncode == 1 and done.stdout == ""
    assert f"There is no lesson {number!r}; there are 00, 01," in done.stderr


def test_one_digit_will_do():
    assert solved.find("4").name == "04-count-memory.ipynb"
