"""Notebooks as tests, seen in runs of small ones: one real pytest, else in-process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from nbformat.v4 import new_code_cell, new_output

from support.limits import JOB
from tests.harness.small_course import (
    PLAIN,
    SmallCourse,
    cell,
    png,
    result,
    show,
    stream,
)

pytest_plugins = ["pytester"]


# -- what strict nbval compares --------------------------------------------------------


def test_a_real_run_finds_all_settings_and_keeps_notebooks_together(tmp_path):
    """Two workers, started in the notebooks' folder, on a machine with real GPUs."""
    course = SmallCourse(tmp_path)
    course.copy_tests()
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
        # no port that another process could have taken before the kernel binds it
        cell(
            "import ipykernel\nipykernel.get_connection_info(unpack=True)['transport']",
            result(plain="'ipc'"),
        ),
    )
    for name in ("02", "03"):
        course.add(name, "a = 0", *["a = a + 1"] * 4, "assert a == 4")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PLAIN, "--nbval", "-n", "2"],
        cwd=tmp_path / "notebooks",
        env={**clean, "HELPERS_GPUS": "real"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=JOB,
    )
    assert done.returncode == 0, done.stdout
    assert "20 passed" in done.stdout
    assert "outputs compared: 4 of 5 (80 %)" in done.stdout


def test_real_gpus_with_lax_only(course, run, monkeypatch):
    course.add("01", "import os\nassert os.environ['HELPERS_GPUS'] == 'real'")
    monkeypatch.setenv("HELPERS_GPUS", "real")
    _, done = run("--nbval-lax", "notebooks")
    done.assert_outcomes(passed=1, skipped=1)


def test_what_is_compared(course, run):
    error = new_output("error", ename="ValueError", evalue="old", traceback=[])
    svg = "<svg><title>{}</title></svg>"
    pictures = {"png": png(0), "plain": "<Figure size 1x2 with 1 Axes>"}
    fresh_pictures = {"png": png(255), "plain": "<Figure size 3x4 with 2 Axes>"}
    differ = {
        "text": cell("print('new')", stream("old\n")),
        "value": cell("2", result(plain="3")),
        "simulated time": cell("print('3.1 ms')", stream("3.2 ms\n")),
        "last place, no tag": cell("print('loss 1.4977')", stream("loss 1.4978\n")),
        "second place": cell(
            "print('loss 1.5978')", stream("loss 1.4978\n"), tag="floating-point"
        ),
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
        "last place": cell(
            "print('loss 1.4977')", stream("loss 1.4978\n"), tag="floating-point"
        ),
        "ignored": cell("print(1)", stream("2\n"), tag="nbval-ignore-output"),
    }
    course.add("01", *differ.values(), *agree.values())
    found, done = run()
    expected = {**dict.fromkeys(differ, "FAILED"), **dict.fromkeys(agree, "PASSED")}
    assert {name: found[f"01 Cell {i}"] for i, name in enumerate(expected)} == expected
    assert found["01 budget"] == "PASSED"
    assert done.ret == 1


# -- when a notebook goes wrong --------------------------------------------------------


def test_a_cell_that_stops_its_notebook_stops_no_other(course, run):
    course.add("01", "a = 1", "import os\nos._exit(7)", "a")
    course.add("02", "import ctypes\nctypes.string_at(0)", "a = 1")
    killer = "import os, threading\nthreading.Timer(0.3, os._exit, [3]).start()"
    course.add("03", killer, "import time\ntime.sleep(170)", "a = 1")
    course.add("04", "a = 1", "1 / 0", "a", "a")
    course.add("05", "b = 1", "b = b + 1")
    # a folder in which no kernel starts
    launcher = course.root / "notebooks" / "closed" / "ipykernel_launcher.py"
    course.add("closed/06", "a = 1", "a")
    launcher.write_text("raise SystemExit('no kernel today')")
    found, done = run()
    assert found == {
        "01 Cell 0": "PASSED",
        "01 Cell 1": "FAILED",
        "02 Cell 0": "FAILED",
        "03 Cell 0": "PASSED",
        "03 Cell 1": "FAILED",
        "04 Cell 0": "PASSED",
        "04 Cell 1": "FAILED",
        "05 Cell 0": "PASSED",
        "05 Cell 1": "PASSED",
        "05 budget": "PASSED",
        "06 Cell 0": "ERROR",
    }
    # the cells after these, and the budgets
    done.assert_outcomes(failed=4, passed=6, errors=1, skipped=11)
    printed = done.stdout.str()
    assert "Timeout of" not in printed  # as nbval alone would have waited
    for words in (
        "the kernel died (exit status 7)",
        "the kernel died (exit status -11, SIGSEGV)",
        "the kernel died (exit status 3)",
        "cell 1 stopped this notebook: the kernel died",
        "cell 1 stopped this notebook: ZeroDivisionError: division by zero",
        "the kernel did not start",
        "no kernel today",
    ):
        assert words in printed, words


def test_time_limit(course, run):
    wait = "import time\ntime.sleep(170)"
    deaf = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    course.add("01", wait, "a = 1")
    course.add("02", deaf + wait, "a = 1")
    _, done = run("--nbval-cell-timeout=1")  # the limit is what is tested
    assert done.stdout.str().count("Timeout of 1 seconds exceeded") >= 2
    done.assert_outcomes(failed=2, skipped=4)


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


def test_no_process_outlives_its_notebook(course, run):
    ends = ["a = 1", "import os\nos._exit(1)"]
    for number, end in enumerate(ends):
        course.add(f"0{number}", START_PROCESSES, end)
    run()
    pids = [int(pid) for pid in Path(course.root, "notebooks/pids").read_text().split()]
    assert len(pids) == 3 * len(ends)
    left = [process for process in psutil.process_iter() if process.pid in pids]
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []


SLOW_AND_QUICK = """
import pytest


@pytest.mark.slow
def test_slow():
    pass


def test_quick():
    pass
"""


@pytest.mark.parametrize(
    "options, ran",
    [
        ([], ["test_quick"]),
        (["-m", "slow"], ["test_slow"]),
        (["tests/test_both.py"], ["test_quick", "test_slow"]),
    ],
)
def test_a_run_of_everything_leaves_slow_tests_out(run, course, options, ran):
    (course.root / "tests").mkdir()
    (course.root / "tests" / "test_both.py").write_text(SLOW_AND_QUICK)
    _, done = run(*options)
    passed = re.findall(r"^PASSED .*::(\w+)", done.stdout.str(), re.M)
    assert sorted(passed) == ran


def test_a_lesson_that_a_reader_has_worked_in_is_run_and_not_compared(course, run):
    answer = cell("check()\n1 / 0", stream("exercise 01.1: right"), tag="exercise")
    own = new_code_cell("[].pop()", id="a1b2c3d4")
    lesson = cell("7", result(html="8")), answer, own
    for number, part in enumerate(lesson[:2]):
        part.id = f"01-{number:02}"
    course.add("01-a", *lesson)
    found, done = run()
    assert found == {
        "01-a Cell 0": "PASSED", "01-a Cell 1": "PASSED", "01-a Cell 2": "PASSED"
    }  # fmt: skip
    done.assert_outcomes(passed=3, skipped=1)  # its budget
    assert "somebody has worked in this lesson" in done.stdout.str()


def test_a_cell_of_the_course_that_fails_there_is_an_error_as_ever(course, run):
    answer = cell("7", stream("exercise 01.1: wrong"), tag="exercise")
    fails = cell("1 / 0")
    fails.id = "01-03"
    course.add("01-a", answer, fails)
    found, _ = run()
    assert (found["01-a Cell 0"], found["01-a Cell 1"]) == ("PASSED", "FAILED")
