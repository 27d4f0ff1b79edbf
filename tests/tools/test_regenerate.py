"""What `python -m tests.tools.regenerate` stores, in this process."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell

from tests import lesson_rules as rules
from tests.harness.small_course import (
    PLAIN,
    SmallCourse,
    cell,
    png,
    result,
    show,
    stream,
)
from tests.tools import regenerate

pytest_plugins = ["pytester"]


@pytest.fixture
def course(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> SmallCourse:
    monkeypatch.setattr(regenerate, "ROOT", pytester.path)
    return SmallCourse(pytester.path)


def test_outputs_are_stored_as_the_rules_want_them_and_as_nbval_reads_them(
    course, pytester, monkeypatch
):
    monkeypatch.setenv("HELPERS_GPUS", "real")
    path = course.add(
        "01-try-this",
        new_markdown_cell("# Try this"),
        cell("print('a')"),
        cell("import sys\nx = print('b', file=sys.stderr)"),
        cell("object()"),
        cell("import json\njson.loads('')", tag="raises-exception"),
        cell("import time\nprint(time.time(), 's')", tag="nbval-ignore-output"),
        cell(show(png=png(9))),
        cell("import os\nos.environ['HELPERS_GPUS']"),
    )
    nb = nbformat.read(path, 4)
    nb.metadata.widgets = {}
    nb.cells[1].metadata.execution = {"iopub.status.idle": "2026-08-19"}
    nb.cells[2].id = "warning"
    nbformat.write(nb, path)

    assert regenerate.main(["01"]) == 0
    nb = rules.read(path)
    assert [c.id for c in nb.cells][:4] == ["01-00", "01-01", "warning", "01-03"]
    assert nb.cells[1].outputs == [stream("a\n")]
    assert nb.cells[2].outputs == [stream("b\n", "stderr")]
    assert nb.cells[7].outputs[0].data["text/plain"] == "'simulated'"
    for rule in (
        rules.counts_run_from_one,
        rules.metadata_is_canonical,
        rules.file_is_as_written,
        rules.errors_are_tagged,
    ):
        assert rules.complaints(rule, nb, path) == []
    nb.cells[3].outputs = []  # an address, as the cell deserves
    nb.cells[5].outputs = []
    assert rules.complaints(rules.no_traces, nb, path) == []

    assert regenerate.main(["--check"]) == 0  # a second time changes nothing
    assert pytester.runpytest_inprocess(*PLAIN).ret == 0


def test_no_more_is_changed_than_must_be(course, capsys):
    path = course.add(
        "01-try-this",
        cell("print(object())", stream("<object object at 0x1234567890>\n")),
        cell("print('3.1 ms')", stream("7.7 ms\n"), tag="nbval-ignore-output"),
        cell("print('3.1 s')", stream("7.7 ms\n"), tag="nbval-ignore-output"),
        cell(show(png=png(9)), result(png=png(12))),
        cell(show(png=png(9)), result(png=png(99))),
        cell("print('new')", stream("old\n")),
        cell(
            "print('3.1 ms')\n" + show(plain="9 s"),
            stream("7.7 ms\n"),
            result(plain="9 ms"),
            tag="nbval-ignore-output",
        ),
        cell("print('2.344')", stream("2.345\n"), tag="floating-point"),
    )
    nb = nbformat.read(path, 4)
    for number, old in enumerate(nb.cells):
        old.id = f"01-{number:02d}"
    nb.cells.insert(1, new_code_cell("'inserted'"))
    nbformat.write(nb, path)
    before = path.read_text()

    assert regenerate.main(["--check"]) == 1
    assert "changed" in capsys.readouterr().out
    assert path.read_text() == before
    assert regenerate.main(["01"]) == 0
    nb = rules.read(path)
    ids = ["01-00", "01-08", *(f"01-0{number}" for number in range(1, 8))]
    assert [c.id for c in nb.cells] == ids
    address, inserted, kept, reshaped, close, far, text, two, near = (
        c.outputs for c in nb.cells
    )
    assert inserted[0].data["text/plain"] == "'inserted'"
    assert address == [stream("<object object at 0x1234567890>\n")]
    assert (kept, reshaped) == ([stream("7.7 ms\n")], [stream("3.1 s\n")])
    assert (close[0].data["image/png"], far[0].data["image/png"]) == (png(12), png(9))
    assert text == [stream("new\n")]
    assert two == [stream("3.1 ms\n"), result(plain="9 s")]
    assert near == [stream("2.345\n")]


@pytest.mark.parametrize(
    "source, said",
    [("1 / 0", "ZeroDivisionError"), ("import os\nos._exit(1)", "Kernel died")],
    ids=["raises", "dies"],
)
def test_an_error_stops_it_before_anything_is_written(course, capsys, source, said):
    paths = [course.add("01-a-b", "1"), course.add("02-c-d", source)]
    before = [path.read_text() for path in paths]
    assert regenerate.main([]) == 1
    assert said in capsys.readouterr().out
    assert [path.read_text() for path in paths] == before


def test_a_lesson_that_is_not_there_is_named(course, capsys):
    course.add("01-a-b", "1")
    with pytest.raises(SystemExit, match="2"):
        regenerate.main(["07"])
    assert "no lesson has the number 07" in capsys.readouterr().err
