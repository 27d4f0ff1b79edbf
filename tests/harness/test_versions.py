"""With another PyTorch, cells are left out by name only, and a line says so."""

import json

from tests.harness import versions
from tests.lessons import lessons


def test_every_cell_that_depends_on_pytorch_is_one_and_has_a_reason():
    cells = {
        cell["id"]
        for path in lessons()
        for cell in json.loads(path.read_text("utf-8"))["cells"]
        if cell["cell_type"] == "code" and cell["outputs"]
    }
    assert versions.SINCE.keys() <= cells
    assert all(why for _, why in versions.SINCE.values())


def test_a_line_says_what_is_not_compared(monkeypatch):
    since = {"07-03": ("2.15", "other sums"), "08-01": ("2.12", "other words")}
    monkeypatch.setattr(versions, "SINCE", since)
    assert versions.note("2.15") is None
    assert versions.note("2.14").endswith(". Run and not compared: 07-03")
    assert versions.note("2.11").endswith(". Run and not compared: 07-03, 08-01")
    assert "nothing newer was tested" in versions.note("2.16")
    assert versions.reason("08-01", "2.11") == "other words"
    assert versions.reason("08-01", "2.12") is None
    assert versions.reason("08-02", "2.11") is None
