"""Defects have their places, and who finds one says so; planted.py is quick here."""

import pytest

from tests.tools import planted
from tests.tools.planted import DEFECTS, ROOT, Defect, find, passes_without

EVERY = [defect for defects in DEFECTS.values() for defect in defects]


@pytest.mark.parametrize("defect", EVERY, ids=lambda defect: defect.name)
def test_a_defect_has_one_place_and_tests_that_are_there(defect):
    text = (ROOT / defect.file).read_text(encoding="utf-8")
    assert planted.planted(text, defect) != text
    path, _, word = defect.tests.partition(" -k ")
    there = (ROOT / path).read_text(encoding="utf-8")
    assert word in there or f"def {word}(" in text  # a test's name, or an exercise's


def test_each_area_has_five():
    assert {area: len(its) for area, its in DEFECTS.items()} == dict.fromkeys(
        ("allocator and clock", "collectives", "dry runs", "lessons"), 5
    )
    assert len({defect.name for defect in EVERY}) == len(EVERY)


PROGRAM = "def larger(a, b):\n    return a if a > b else b\n"
TESTS = """
from program import larger

def test_larger():
    assert larger(1, 2) == 2
"""


@pytest.mark.parametrize(
    "new, tests, said",
    [
        ("a if a < b", "test_it.py", "found by test_it.py::test_larger"),
        ("a if a >= b", "test_it.py", "MISSED"),
        ("a if a < b", "test_other.py", "NOT RUN: ERROR: file or directory not found"),
    ],
)
def test_what_came_of_a_defect_is_told(new, tests, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(planted, "ROOT", tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "test_it.py").write_text(TESTS)
    defect = Defect("the smaller one", "program.py", "a if a > b", new, tests)
    assert find(defect) == said.startswith("found")
    assert f"  the smaller one: {said}" in capsys.readouterr().out
    assert (tmp_path / "program.py").read_text() == PROGRAM


def test_tests_that_fail_without_a_defect_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(planted, "ROOT", tmp_path)
    (tmp_path / "test_it.py").write_text("def test_no():\n    assert False\n")
    assert not passes_without(["test_it.py"])
    assert "fails without a defect: test_it.py: test_it.py::" in capsys.readouterr().out
