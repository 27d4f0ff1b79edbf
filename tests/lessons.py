"""The lessons as tests see them: which there are, and which a reader has worked in.

A reader solves exercises, runs cells and saves. That is no fault: what such a lesson
prints is not compared, its exercises may raise, and the rules for what is published
are not for it. That nobody commits one, `test_solved.py` looks after.
"""

import functools
import json
import re
from pathlib import Path

import pytest

from support import checkout

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
WHY = "somebody has worked in this lesson: it is saved by Jupyter, not as it is stored"
_SAID = re.compile(r"exercise \d\d\.\d: (right|wrong|not checked)")


def lessons() -> list[Path]:
    """The notebooks of the course, in order; none of a reader's own beside them."""
    return checkout.here(NOTEBOOKS, "[0-9][0-9]*.ipynb")


def is_exercise(cell: dict) -> bool:
    """Whether it is a cell for a reader's answer."""
    return "exercise" in cell["metadata"].get("tags", ())


def is_readers(cell: dict) -> bool:
    """Whether a reader writes it: an answer, or a cell that has no name of ours."""
    return is_exercise(cell) or not re.match(r"\d\d-", cell.get("id", ""))


def is_worked_in(nb: dict) -> bool:
    """Whether it was saved after a kernel had it, or one of its exercises was tried.

    `python -m tests.tools.regenerate` stores a lesson without Python's version.
    """
    if "version" in nb["metadata"].get("language_info", {}):
        return True
    return any(
        output["output_type"] == "error" or _SAID.search(str(output))
        for cell in filter(is_exercise, nb["cells"])
        for output in cell.get("outputs", ())
    )


@functools.cache
def worked_in() -> frozenset[Path]:
    """Those of the lessons."""
    texts = {path: path.read_text(encoding="utf-8") for path in lessons()}
    return frozenset(p for p, text in texts.items() if is_worked_in(json.loads(text)))


def as_parameters() -> list:
    """The lessons for `pytest.mark.parametrize`; those that were worked in skip."""
    skip = pytest.mark.skip(reason=WHY)
    theirs = worked_in()
    return [
        pytest.param(path, marks=skip if path in theirs else (), id=path.stem)
        for path in lessons()
    ]
