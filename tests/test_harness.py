"""The harness itself: small notebooks in a copy of the course, tested by real runs.

Each test starts pytest, or regenerate.py, as a reader would, and reads what it says.
"""

import base64
import io
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import (
    new_code_cell,
    new_markdown_cell,
    new_notebook,
    new_output,
)
from PIL import Image

from tests import hygiene

ROOT = Path(__file__).resolve().parents[1]
HARNESS = ["conftest.py", ".pytest.ini"] + [
    f"tests/{name}"
    for name in (
        "__init__.py",
        "nbplus.py",
        "watch.py",
        "budgets.py",
        "sanitize.cfg",
        "regenerate.py",
    )
]
RUN_LIMIT = 120  # seconds, for a machine with other things to do


class Course:
    """A folder with the harness and, in notebooks/, what a test puts there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "tests").mkdir()
        (root / "notebooks").mkdir()
        for name in HARNESS:
            shutil.copy(ROOT / name, root / name)

    def add(self, name, *cells):
        """Stores a notebook that has been run, of cells or of their sources."""
        cells = [new_code_cell(c) if isinstance(c, str) else c for c in cells]
        for number, cell in enumerate(cells, 1):
            if cell.cell_type == "code":
                cell.execution_count = number
        path = self.root / "notebooks" / f"{name}.ipynb"
        nbformat.write(new_notebook(cells=cells), path)
        return path

    def run(self, *command, folder=".", **environment):
        """Runs a Python command and returns its exit code and what it printed."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
        done = subprocess.run(
            [sys.executable, *command],
            cwd=self.root / folder,
            env={**clean, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_LIMIT,
        )
        return done.returncode, done.stdout

    def pytest(self, *options, **settings):
        plain = ["-rA", "--color=no", "-p", "no:cacheprovider"]
        plain += ["-p", "no:hypothesispytest"]  # a second less to start
        return self.run("-m", "pytest", *plain, *options, **settings)

    def regenerate(self, *options):
        return self.run("tests/regenerate.py", *options)


@pytest.fixture
def course(tmp_path):
    return Course(tmp_path)


def cell(source, *outputs, tag=None):
    metadata = {"tags": [tag]} if tag else {}
    return new_code_cell(source, metadata=metadata, outputs=list(outputs))


def stream(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def result(**data):
    mimes = {"plain": "text/plain", "html": "text/html", "svg": "image/svg+xml"}
    mimes["png"] = "image/png"
    return new_output("display_data", {mimes[key]: data[key] for key in data})


def png(grey, size=(64, 64)):
    file = io.BytesIO()
    Image.new("L", size, grey).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def show(**data):
    """Returns the source of a cell that shows exactly these."""
    mimes = dict(result(**data).data)
    return f"from IPython.display import display\ndisplay({mimes!r}, raw=True)"


def outcomes(printed):
    """Returns the outcome of each cell, `01 Cell 0`, in pytest's report."""
    lines = re.findall(r"^([A-Z]+) \S*?(\w+)\.ipynb::(Cell \d+)", printed, re.M)
    return {f"{notebook} {number}": outcome for outcome, notebook, number in lines}


# What strict nbval compares


@pytest.mark.parametrize(
    "options, folder",
    [([], "."), (["--nbval", "notebooks"], "."), (["--nbval"], "notebooks")],
    ids=["pytest", "pytest --nbval notebooks", "cd notebooks && pytest --nbval"],
)
def test_commands_find_the_sanitizer_and_settle_the_kernel(course, options, folder):
    course.add(
        "01",
        cell("object()", result(plain="<object at 0x1234567890>")),
        cell(
            "import os\n[os.environ.get(x) for x in "
            "('HELPERS_GPUS', 'OMP_NUM_THREADS', 'NO_COLOR', 'PYTEST_CURRENT_TEST')]",
            result(plain="['simulated', '1', '1', None]"),
        ),
        # ipykernel's thread for what children print: what it has not read when a cell
        # ends comes too late for nbval, so the output of a child is no test.
        cell("import sys\nsys.stdout.watch_fd_thread.is_alive()", result(plain="True")),
        cell("print(1)", stream("2\n"), tag="nbval-ignore-output"),
    )
    code, printed = course.pytest(*options, folder=folder, HELPERS_GPUS="real")
    assert code == 0, printed
    assert set(outcomes(printed).values()) == {"PASSED"}
    assert "outputs compared: 3 of 4 (75 %)" in printed


def test_real_gpus_with_lax_only(course):
    course.add("01", "import os\nassert os.environ['HELPERS_GPUS'] == 'real'")
    code, printed = course.pytest("--nbval-lax", "notebooks", HELPERS_GPUS="real")
    assert code == 0, printed


def test_what_is_compared(course):
    error = new_output("error", ename="ValueError", evalue="old", traceback=[])
    svg = "<svg><title>{}</title></svg>"
    pictures = {"png": png(0), "plain": "<Figure size 1x2 with 1 Axes>"}
    fresh_pictures = {"png": png(255), "plain": "<Figure size 3x4 with 2 Axes>"}
    differ = {
        "text": cell("print('new')", stream("old\n")),
        "value": cell("2", result(plain="3")),
        "simulated time": cell("print('3.1 ms')", stream("3.2 ms\n")),
        "svg": cell(show(svg=svg.format("new")), result(svg=svg.format("old"))),
        "html": cell(show(html="<b>1</b>"), result(html="<b>2</b>")),
        "error": cell("raise ValueError('new')", error, tag="raises-exception"),
        "no error": cell("pass", error, tag="raises-exception"),
        "no output": cell("pass", stream("old\n")),
        "unexpected output": cell("print('new')"),
    }
    agree = {
        "png": cell(show(**fresh_pictures), result(**pictures)),
        "stderr": cell(
            "import sys\nx = print('new', file=sys.stderr)", stream("old\n", "stderr")
        ),
        "unexpected stderr": cell("import sys\nx = sys.stderr.write('new')"),
        "pid": cell("print('pid 12, pid=3')", stream("pid 4567, pid=89\n")),
        "ignored": cell("print(1)", stream("2\n"), tag="nbval-ignore-output"),
    }
    course.add("01", *differ.values(), *agree.values())
    code, printed = course.pytest()
    found = outcomes(printed)
    expected = {**dict.fromkeys(differ, "FAILED"), **dict.fromkeys(agree, "PASSED")}
    assert {name: found[f"01 Cell {i}"] for i, name in enumerate(expected)} == expected
    assert code == 1


def test_stored_stderr_is_forbidden(course):
    path = course.add("01", cell("warn()", stream("a warning\n", "stderr")))
    assert hygiene.no_stderr(hygiene.read(path), path)


# When a notebook goes wrong


def test_dead_kernel(course):
    course.add("01", "a = 1", "import os\nos._exit(7)", "a")
    course.add("02", "import ctypes\nctypes.string_at(0)", "a = 1")
    killer = "import os, threading\nthreading.Timer(0.3, os._exit, [3]).start()"
    course.add("03", killer, "import time\ntime.sleep(170)", "a = 1")
    course.add("04", "b = 1")
    started = time.monotonic()
    code, printed = course.pytest()
    assert code == 1
    assert time.monotonic() - started < 60  # nbval alone: 400 s a kernel
    assert outcomes(printed) == {
        "01 Cell 0": "PASSED",
        "01 Cell 1": "FAILED",
        "02 Cell 0": "FAILED",
        "03 Cell 0": "PASSED",
        "03 Cell 1": "FAILED",
        "04 Cell 0": "PASSED",
    }
    for how in ("exit status 7", "exit status -11, SIGSEGV", "exit status 3"):
        assert f"the kernel died ({how})" in printed
    assert "3 failed, 4 passed, 6 skipped" in printed
    assert "cell 1 stopped this notebook: the kernel died" in printed


def test_cell_that_raised_stops_its_notebook_only(course):
    course.add("01", "a = 1", "1 / 0", "a", "a")
    course.add("02", "b = 1", "b = b + 1")
    code, printed = course.pytest()
    assert code == 1
    assert "1 failed, 4 passed, 3 skipped" in printed
    assert "cell 1 stopped this notebook: Cell execution caused an exc" in printed


def test_different_output_stops_nothing(course):
    course.add("01", cell("print(1)", stream("2\n")), "a = 1")
    assert "1 failed, 2 passed" in course.pytest()[1]


def test_time_limit(course):
    wait = "import time\ntime.sleep(170)"
    deaf = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    course.add("01", wait, "a = 1")
    course.add("02", deaf + wait, "a = 1")
    course.add("03", "b = 1")
    code, printed = course.pytest("--nbval-cell-timeout=1")
    assert code == 1
    assert printed.count("Timeout of 1 seconds exceeded") >= 2
    assert "2 failed, 2 passed, 4 skipped" in printed


def test_default_time_limit():
    assert "--nbval-cell-timeout=400" in (ROOT / ".pytest.ini").read_text()


def test_kernel_that_does_not_start(course):
    launcher = course.root / "notebooks" / "ipykernel_launcher.py"
    launcher.write_text("raise SystemExit('no kernel today')")
    course.add("01", "a = 1", "a")
    code, printed = course.pytest()
    assert code == 1
    assert "the kernel did not start" in printed
    assert "no kernel today" in printed
    assert "2 skipped, 1 error" in printed


START_PROCESSES = """
import subprocess, sys

sleep = [sys.executable, "-c", "import time; time.sleep(170)"]
child = subprocess.Popen(sleep)
escaped = subprocess.Popen(sleep, start_new_session=True)
start = f"import subprocess as s; print(s.Popen({sleep}, stdout=s.DEVNULL).pid)"
start = [sys.executable, "-c", start]
orphan = subprocess.check_output(start, text=True, start_new_session=True)
with open("pids", "a") as file:
    x = print(child.pid, escaped.pid, orphan, file=file)
"""


def test_no_process_outlives_its_notebook(course):
    ends = ["a = 1", "import os\nos._exit(1)"]
    for number, end in enumerate(ends):
        course.add(f"0{number}", START_PROCESSES, end)
    course.pytest()
    pids = [int(pid) for pid in (course.root / "notebooks/pids").read_text().split()]
    assert len(pids) == 3 * len(ends)
    left = [process for process in psutil.process_iter() if process.pid in pids]
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []


def test_two_workers_keep_a_notebook_together(course):
    for name in ("01", "02", "03"):
        course.add(name, "a = 0", *["a = a + 1"] * 4, "assert a == 4")
    code, printed = course.pytest("-n", "2")
    assert code == 0, printed
    assert "21 passed" in printed


# regenerate.py


def test_regenerate_stores_canonical_outputs_once(course):
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

    code, printed = course.regenerate("01")
    assert code == 0, printed
    stored = path.read_text(encoding="utf-8")
    nb = hygiene.read(path)
    assert [c.id for c in nb.cells][:4] == ["01-00", "01-01", "warning", "01-03"]
    assert nb.cells[1].outputs == [stream("a\n")]
    assert nb.cells[2].outputs == [stream("b\n", "stderr")]
    assert nb.cells[7].outputs[0].data["text/plain"] == "'simulated'"
    for rule in (
        hygiene.counts_run_from_one,
        hygiene.metadata_is_canonical,
        hygiene.file_is_as_written,
        hygiene.errors_are_tagged,
    ):
        assert rule(nb, path) == []
    nb.cells[3].outputs = []  # an address, as the cell deserves
    nb.cells[5].outputs = []
    assert hygiene.no_traces(nb, path) == []

    assert course.regenerate("--check")[0] == 0
    assert course.regenerate()[0] == 0
    assert path.read_text(encoding="utf-8") == stored
    code, printed = course.pytest()
    assert code == 0, printed


def test_regenerate_changes_no_more_than_it_must(course):
    path = course.add(
        "01-try-this",
        cell("print(object())", stream("<object object at 0x1234567890>\n")),
        cell("print('3.1 ms')", stream("7.7 ms\n"), tag="nbval-ignore-output"),
        cell("print('3.1 s')", stream("7.7 ms\n"), tag="nbval-ignore-output"),
        cell(show(png=png(9)), result(png=png(12))),
        cell(show(png=png(9)), result(png=png(99))),
        cell("print('new')", stream("old\n")),
    )
    nb = nbformat.read(path, 4)
    for number, old in enumerate(nb.cells):
        old.id = f"01-{number:02d}"
    nb.cells.insert(1, new_code_cell("'inserted'"))
    nbformat.write(nb, path)
    before = path.read_text()

    code, printed = course.regenerate("--check")
    assert (code, "changed" in printed) == (1, True), printed
    assert path.read_text() == before
    assert course.regenerate("01")[0] == 0
    nb = hygiene.read(path)
    ids = ["01-00", "01-06", "01-01", "01-02", "01-03", "01-04", "01-05"]
    assert [c.id for c in nb.cells] == ids
    address, inserted, kept, reshaped, close, far, text = (c.outputs for c in nb.cells)
    assert inserted[0].data["text/plain"] == "'inserted'"
    assert address == [stream("<object object at 0x1234567890>\n")]
    assert (kept, reshaped) == ([stream("7.7 ms\n")], [stream("3.1 s\n")])
    assert (close[0].data["image/png"], far[0].data["image/png"]) == (png(12), png(9))
    assert text == [stream("new\n")]


@pytest.mark.parametrize(
    "source, said",
    [("1 / 0", "ZeroDivisionError"), ("import os\nos._exit(1)", "Kernel died")],
    ids=["raises", "dies"],
)
def test_regenerate_stops_at_an_error(course, source, said):
    paths = [course.add("01-a-b", "1"), course.add("02-c-d", source)]
    before = [path.read_text() for path in paths]
    code, printed = course.regenerate()
    assert (code, said in printed) == (1, True), printed
    assert [path.read_text() for path in paths] == before


def test_regenerate_knows_its_lessons(course):
    course.add("01-a-b", "1")
    code, printed = course.regenerate("07")
    assert (code, "no lesson has the number 07" in printed) == (2, True)
