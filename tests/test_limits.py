"""Limits of time: all of them stand in one file, and fit the machine that runs them."""

import ast
import contextlib
import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import checkout, limits, limits_plugin
from tests.launching import ROOT

pytest_plugins = ["pytester"]
LIMITS = ROOT / "simgpu" / "tests" / "support" / "limits.py"
# folders of commands that measure, and of programs that tests start
PASSED_OVER = {"benchmarks", "layouts", "models", "recorded", "scripts", "tools"}
# what a line says that has a number, and is right to have it
EXCUSE = re.compile(r"# (the limit is what is tested|no limit\b)")
KEYWORDS = {"timeout", "seconds"}
# where the limit stands among the arguments without a name
METHODS = {
    "exception": 0, "join": 0, "poll": 0, "result": 0, "settimeout": 0, "wait": 0,
    "acquire": 1, "communicate": 1, "create_connection": 1, "get": 1, "wait_for": 1,
    "put": 2,
}  # fmt: skip
ASK_FIRST = {"acquire", "get"}  # of a lock and a queue: whether to wait, then how long
FUNCTIONS = {"create_connection": 1, "wait": 2}  # that of support/waiting.py
CONSTANT = re.compile(r"(SECONDS|LIMIT|TIMEOUT)$")


def is_number(node: ast.AST | None) -> bool:
    """Whether it is a number that is written out, or several that are multiplied."""
    if isinstance(node, ast.BinOp):
        return is_number(node.left) and is_number(node.right)
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def limit_without_a_name(call: ast.Call) -> list[ast.expr]:
    """The argument that is one, if it is there."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    place = (METHODS if isinstance(call.func, ast.Attribute) else FUNCTIONS).get(name)
    if place is None or len(call.args) <= place:
        return []
    if name in ASK_FIRST and not isinstance(getattr(call.args[0], "value", 0), bool):
        return []  # `{}.get("key", 5)`
    return [call.args[place]]


def programs_in(tree: ast.Module) -> Iterator[ast.Module]:
    """The texts in a file that are programs, each parsed, at its place in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            texts = [
                it.value if isinstance(it, ast.Constant) else "x" for it in node.values
            ]
            text = "".join(texts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = re.sub(r"\{\w*\}", "x", node.value)  # for `format`
        else:
            continue
        with contextlib.suppress(SyntaxError, ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is no program
            program = ast.parse(textwrap.dedent(text))
            yield ast.increment_lineno(program, node.lineno - 1)


def numbers_in(tree: ast.Module) -> Iterator[ast.AST]:
    """The calls, functions and assignments with a limit that is written out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            named = [it.value for it in node.keywords if it.arg in KEYWORDS]
            named += limit_without_a_name(node)
            if any(map(is_number, named)):
                yield node
        elif isinstance(node, ast.FunctionDef):
            every = [*node.args.posonlyargs, *node.args.args]
            values = node.args.defaults
            named = dict(zip(every[len(every) - len(values) :], values, strict=True))
            named |= dict(zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True))
            if any(
                it.arg in KEYWORDS and is_number(value) for it, value in named.items()
            ):
                yield node.args
    for node in tree.body:
        if isinstance(node, ast.Assign) and is_number(node.value):
            names = [it.id for it in node.targets if isinstance(it, ast.Name)]
            if any(map(CONSTANT.search, names)):
                yield node


def complaints(path: Path) -> list[str]:
    """Where a file has a limit of its own."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    found = []
    tree = ast.parse(text)
    programs = [] if path == Path(__file__) else programs_in(tree)  # has planted ones
    for node in (it for one in (tree, *programs) for it in numbers_in(one)):
        first = getattr(node, "lineno", None) or node.args[0].lineno
        last = getattr(node, "end_lineno", None) or first
        if not any(map(EXCUSE.search, lines[first - 1 : last])):
            found.append(f"{path.name}:{first}: {lines[first - 1].strip()}")
    return found


def test_files() -> Iterator[Path]:
    """Those of both products."""
    for folder in (ROOT / "tests", ROOT / "simgpu" / "tests"):
        for path in checkout.files(folder, "*.py"):
            within = set(path.relative_to(folder).parts[:-1])
            if not within & PASSED_OVER and path != LIMITS:
                yield path
    yield from checkout.files(ROOT / "tests" / "tools", "test_*.py")


test_files.__test__ = False


def test_no_test_has_a_limit_of_its_own():
    found = [line for path in test_files() for line in complaints(path)]
    assert not found, "\n".join(["take one of support/limits.py:", *found])


@pytest.mark.parametrize(
    "line, is_found",
    [
        ("run(['a'], check=True, timeout=60)", True),
        ("run(['a'],\n    timeout=2 * 60.5,\n)", True),
        ("group(timeout=timedelta(seconds=1))", True),
        ("process.communicate(timeout=30)", True),
        ("process.communicate(None, 30)", True),
        ("queue.get(True, 5)", True),
        ("lock.acquire(True, 2 * 5)", True),
        ("assert pipe.poll(5)", True),
        ("create_connection(address, 5)", True),
        ("wait(lambda: done, 'the end', 20)", True),
        ("TEXT = '''\nimport a\nthread.join(10)\n'''", True),
        ("run(['python', '-c', 'import a; a.wait(5)'])", True),
        ("run(f'''\nprocess.wait({n})\nprocess.join(3)\n''')", True),
        ("words = '{name}.join(5)'", True),
        ("TEXT = '''\nit.join(10)  # the limit is what is tested\n'''", False),
        ("it.get('bytes', 0)\n{}.get(key, 5)", False),
        ("'waits for 5 s (timeout=5)'", False),
        ("def f():\n    thread.join(10)", True),
        ("assert pool.submit(f).result(10) == 1", True),
        ("def wait(it, seconds=300):\n    pass", True),
        ("def wait(it, *, timeout: float = 300):\n    pass", True),
        ("SECONDS = 60", True),
        ("HARD_LIMIT = 10.0  # seconds", True),
        ("SECONDS = JOB", False),
        ("run(['a'], timeout=SHORT)", False),
        ("run(['a'], timeout=None)", False),
        ("thread.join()\n', '.join(words)", False),
        ("time.sleep(3)", False),
        ("ranks.run(f, timeout=1)  # the limit is what is tested", False),
        ("ranks.run(\n    f,\n    timeout=1,  # the limit is what is tested\n)", False),
        ("axis(seconds=588)  # no limit: of the picture", False),
    ],
)
def test_a_planted_limit_is_found(tmp_path, line, is_found):
    file = tmp_path / "test_planted.py"
    file.write_text(line + "\n")
    assert bool(complaints(file)) == is_found


# -- the factor ------------------------------------------------------------------------


def slowness_in(**environ: str) -> str:
    """What a new process finds, and hands to what it starts."""
    kept = {k: v for k, v in os.environ.items() if k != limits.NAME}
    words = "import os; from support import limits as it; "
    words += "print(it.SLOWNESS, it.SHORT / 60, float(os.environ[it.NAME]))"
    done = subprocess.run(
        [sys.executable, "-c", words], cwd=LIMITS.parents[1], env=kept | environ,
        capture_output=True, text=True, check=True, timeout=limits.SHORT,
    )  # fmt: skip
    return done.stdout.split()


def test_it_is_measured_once_and_handed_down():
    found = [float(word) for word in slowness_in()]
    assert found == pytest.approx([found[0]] * 3) and 1 <= found[0] <= limits.MOST
    assert slowness_in(TESTS_SLOWNESS="2.5") == ["2.5", "2.5", "2.5"]
    assert slowness_in(TESTS_SLOWNESS="0.1")[:2] == ["1.0", "1.0"]  # no shorter


@pytest.mark.parametrize(
    "times, found",
    [(0.1, 1.0), (1.0, 1.0), (1.44, 1.4), (10, 10.0), (1e6, limits.MOST)],
)
def test_it_is_how_often_longer_it_takes(times, found):
    assert limits.slowness(times * limits.REFERENCE) == found


@pytest.mark.parametrize("slowness, said", [(1.0, "as fast as"), (1.4, "1.4 times as")])
def test_the_head_of_a_run_says_it(monkeypatch, slowness, said):
    monkeypatch.setattr(limits, "SLOWNESS", slowness)
    assert f"limits: this machine is {said}" in limits.note()


# -- the limit of each test ------------------------------------------------------------

HANGS = """
import threading

import pytest


def test_hangs():
    threading.Event().wait()


def test_is_quick():
    pass


@pytest.mark.timeout(1234)
def test_has_its_own(request):
    assert request.node.get_closest_marker("timeout").args == (1234,)
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs pytest with nothing but the plugin, on tests of which one hangs."""
    monkeypatch.setattr(limits, "TEST", 2.0)
    pytester.makepyfile(HANGS)

    def run(*options: str) -> pytest.RunResult:
        plain = ("-p", "support.limits_plugin", "-p", "no:cacheprovider")
        return pytester.runpytest_inprocess(*plain, *options)

    return run


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX signals")
def test_a_test_that_hangs_fails_and_the_run_goes_on(run):
    pytest.importorskip("pytest_timeout")
    done = run("-v")
    done.assert_outcomes(passed=2, failed=1)
    printed = done.stdout.str()
    assert printed.count("limits: this machine is") == 1
    assert "threading.Event().wait()" in printed and "Timeout (>2.0s)" in printed


def test_without_pytest_timeout_there_is_no_limit(run):
    done = run("-p", "no:timeout", "-k", "quick")
    done.assert_outcomes(passed=1, deselected=2)
    assert "limits: this machine is" in done.stdout.str()


def test_who_says_how_long_is_obeyed(run):
    pytest.importorskip("pytest_timeout")
    done = run("--timeout=3", "-k", "hangs")
    assert "Timeout (>3.0s)" in done.stdout.str()


# -- what else a machine may lack ------------------------------------------------------

NO_SPACE = """
import errno, os

def test_makes_a_lock():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def test_is_wrong():
    assert 3 == 4
"""


@pytest.mark.parametrize(
    "full, outcomes",
    [(True, dict(skipped=1, failed=1)), (False, dict(failed=2))],
)
def test_without_shared_memory_a_test_is_skipped(pytester, monkeypatch, full, outcomes):
    monkeypatch.setattr(limits_plugin, "is_full", lambda: full)
    pytester.makepyfile(NO_SPACE)
    plain = ("-p", "support.limits_plugin", "-p", "no:cacheprovider", "-rs")
    done = pytester.runpytest_inprocess(*plain)
    done.assert_outcomes(**outcomes)
    assert ("/dev/shm is full" in done.stdout.str()) == full
