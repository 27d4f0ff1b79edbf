"""What a notebook takes is measured, and what is too much is found."""

import os
import re
import uuid

import pytest
import torch
from nbformat.v4 import new_code_cell, new_markdown_cell

from tests.harness import budgets, files, usage
from tests.harness.small_course import LEAVES_A_SERVER

pytest_plugins = ["pytester"]
TOO_LONG = 2 * budgets.SECONDS
measured = pytest.mark.skipif(not usage.MEASURABLE, reason="read from /proc")
ALLOWED = {
    "peak": 1.1e9, "cpu": 30.0, "clock": 40.0, "others": 5.0, "left": [],
    "sockets": [], "stores": ["a store"], "questions": ["a question"],
    "uses_store": True, "opens_store": False, "files": [],
}  # fmt: skip


def test_pytorch_built_for_cuda_is_allowed_more_memory():
    assert budgets.CUDA == (torch.version.cuda is not None)
    assert budgets.MEMORY == (2.4e9 if budgets.CUDA else 1.2e9)
    (complaint,) = budgets.over({**ALLOWED, "peak": budgets.MEMORY + 2e6})
    most = budgets.MEMORY / 1e6
    assert (
        complaint == f"its processes had {most + 2:.0f} MB; {most:.0f} MB is the most"
    )


def test_what_is_allowed():
    assert budgets.over(ALLOWED) == []
    assert budgets.over({**ALLOWED, "clock": 500.0, "others": 450.0}) == []
    listens = {"sockets": ["LISTEN :: port 7"], "opens_store": True}
    assert budgets.over({**ALLOWED, **listens}) == []


@pytest.mark.parametrize(
    "more, said",
    [
        ({"peak": 0}, "none of its processes was seen"),
        ({"peak": 1.1 * budgets.MEMORY}, "MB is the most"),
        ({"cpu": TOO_LONG}, f"computed for {TOO_LONG:.0f} s"),
        ({"clock": TOO_LONG}, f"it took {TOO_LONG:.0f} s, 5 of them for others"),
        ({"left": ["process 7: sleep"]}, "left running: process 7: sleep"),
        ({"sockets": ["LISTEN 0.0.0.0"]}, "a socket not on loopback: LISTEN 0.0.0.0"),
        ({"sockets": ["ESTABLISHED 1.2.3.4"], "opens_store": True}, "ESTABLISHED"),
        ({"uses_store": False}, "asked a name server: a question"),
        ({"files": ["a.txt"]}, "not in the temporary folder: a.txt"),
    ],
)
def test_what_is_too_much(more, said):
    (complaint,) = budgets.over({**ALLOWED, **more})
    assert said in complaint


@pytest.mark.parametrize(
    "cell, uses",
    [
        (new_code_cell("words = ['-m', 'torch.distributed.run']"), True),
        (new_code_cell("!torchrun a.py"), True),
        (new_code_cell("store = TCPStore('127.0.0.1', port)"), True),
        (new_code_cell("ranks = Ranks(4, card='T4')"), True),
        (new_code_cell('ranks = Ranks(4, threads=2, device="cpu")'), False),
        (new_code_cell("import torch.distributed"), False),
        (new_markdown_cell("In practice: `torchrun`"), False),
    ],
)
def test_only_code_that_uses_a_store_may_ask_a_name_server(cell, uses):
    assert budgets.has_code([new_code_cell("a = 1"), cell], budgets.STORE) is uses


def test_a_lesson_that_opens_a_store_is_told_from_one_that_calls_one():
    called, opened = "TCPStore('a', 1)", "TCPStore('a', 0,\n is_master=True, x=1)"
    assert not budgets.has_code([new_code_cell(called)], budgets.OPENED)
    assert budgets.has_code([new_code_cell(opened)], budgets.OPENED)


def test_the_table_says_what_each_notebook_took():
    quiet = {**ALLOWED, "notebook": "01", "stores": [], "questions": []}
    table = budgets.table([{**ALLOWED, "notebook": "13-b"}, quiet])
    assert table.splitlines() == [
        "notebook  peak MB  computed s  clock s",
        "01       1100        30.0     40.0",
        "13-b     1100        30.0     40.0  1 stores of torchrun on all addresses"
        "  asked a name server",
    ]


@measured
def test_a_notebook_that_takes_too_much(course, run, monkeypatch):
    monkeypatch.setattr(files, "still_unused", files.unused)  # at once
    shared = files.SHARED_MEMORY / f"left-{uuid.uuid4().hex}"
    writes = f"""
from pathlib import Path
for place in (Path.home() / "a", Path("a")):
    size = place.write_text("here")
block = Path({str(shared)!r}).open("w")
"""
    course.add("01", LEAVES_A_SERVER, writes)
    try:
        found, done = run()
    finally:
        os.unlink(shared)
    assert found == {
        "01 Cell 0": "PASSED", "01 Cell 1": "PASSED", "01 budget": "FAILED"
    }  # fmt: skip
    printed = done.stdout.str()
    for line in (
        r"left running: process \d+: .*time\.sleep\(170\)",
        r"a socket not on loopback: LISTEN 0\.0\.0\.0 port \d+",
        r"not in the temporary folder: .*/home-\w+/a\b",
        r"not in the temporary folder: .*/notebooks/a\b",
        rf"not in the temporary folder: {shared}",
        r"(?m)^01 +\d+ +\d+\.\d +\d+\.\d$",
    ):
        assert re.search(line, printed), line


@measured
def test_a_part_of_a_notebook_is_not_judged(course, run):
    course.add("01", "a = 1", "a")
    _, done = run("notebooks/01.ipynb::Cell 0", "notebooks/01.ipynb::budget")
    done.assert_outcomes(passed=1, skipped=1)
    assert "1 of 2 cells were run" in done.stdout.str()
