"""What a run of the tests says at its end: a line for each failure, and what to type.

A failure that may be this machine's (a limit of time, a process that died) is run once
more, alone, when all else has ended. If it passes then, the run is green, its last
lines name the test as one that failed and then passed, and `ACCIDENTS` gets a line. A
test is red while lines of that file are committed: somebody is to mend the cause, and
to remove the line. An output that differs, or any other failure, is not run again.
"""

import datetime
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import numbers, versions

WIDTH = 60  # characters of a line that differs
ACCIDENTS = "tests/accidents.txt"  # from the root of the checkout, a line for each
MOST = 12  # failures that are run again: where more fail, it is no accident
# what a limit of time, or the death of a process, says of itself: an exception's line
ACCIDENT = re.compile(
    r"(\w+\.)*(?P<what>TimeoutExpired|\w*TimeoutError)\b"
    r"|(\w+: )?(?P<late>Command .* timed out after [\d.]+ seconds$"
    r"|Timeout of [\d.]+ seconds exceeded|Timeout \(?>\s*[\d.]+s?"
    r"|Timed out waiting for idle kernel|the kernel (died|did not start)"
    r"|worker '\w+' crashed)"
)
# the first line of an exception in a traceback, such as "ValueError: no such rank"
RAISED = re.compile(r"^(?:\w+\.)*[A-Z]\w*(?:: .*)?$", re.MULTILINE)
COLOURS = re.compile(r"\x1b\[[\d;]*m")


# -- one failure -----------------------------------------------------------------------


def first_difference(fresh: list, stored: list, view: Callable[[str], str]) -> str:
    """Returns where the outputs of a cell differ first, in words.

    Args:
        fresh: outputs that it has now.
        stored: those in the notebook.
        view: a text as it is compared.
    """
    now, then = (
        {(kind, n): view(place[key]) for n, (kind, place, key) in enumerate(found)}
        for found in (numbers.texts(fresh), numbers.texts(stored))
    )
    for key in then | now:
        old, new = (side.get(key, "").splitlines() for side in (then, now))
        for n in range(max(len(old), len(new))):
            one, other = ("".join(lines[n : n + 1]) for lines in (old, new))
            if one != other:
                start = max(0, len(os.path.commonprefix([one, other])) - WIDTH // 2)
                one, other = (line[start : start + WIDTH] for line in (one, other))
                return f'stored "{one.strip()}", now "{other.strip()}"'
    return "other kinds of output than stored"


def exception_line(error: Exception) -> str:
    """Returns the line of what stopped a cell: its exception's, if it raised one."""
    said = str(error).partition("\n")[0]
    traceback = getattr(error, "inner_traceback", None) or ""
    raised = RAISED.findall(COLOURS.sub("", traceback))
    return raised[-1] if raised and said.endswith("caused an exception") else said


def cause(report: pytest.TestReport) -> str:
    """Returns the line of what failed a test: its exception's."""
    crash = getattr(report.longrepr, "reprcrash", None)
    said = crash.message if crash else str(report.longrepr)
    return dict(report.user_properties).get(CAUSE, said).partition("\n")[0]


def accident(report: pytest.TestReport) -> str | None:
    """Returns which limit or death failed a test; None if something else did."""
    found = ACCIDENT.match(cause(report))
    return found and (found["what"] or found["late"])


def cell_line(notebook: str, cell: int, what: str) -> str:
    """Returns the line of a cell that failed, with the command that repeats it."""
    torch = versions.installed()
    with_what = f"torch {torch}"
    if torch != versions.STORED_WITH:
        with_what += f"; stored with {versions.STORED_WITH}"
    command = f"python3 -m helpers test notebooks/{notebook}"
    return f"{notebook[:2]}, cell {cell}: {what} ({with_what}). Again: {command}"


# -- all of a run ----------------------------------------------------------------------

LINE = "line"  # property of a report: what to say of it in the end
CAUSE = "cause"  # and what stopped a cell; "" if its outputs differ
AGAIN = pytest.StashKey[list[str]]()  # lines about what was run once more


def pytest_addoption(parser):
    parser.addoption(
        "--once-more",
        action="store_true",
        help="run what a limit of time or a dead process has failed once more, alone",
    )


@pytest.hookimpl(trylast=True)  # when the workers have ended
def pytest_sessionfinish(session):
    config = session.config
    if not config.option.once_more or hasattr(config, "workerinput"):
        return
    failed = _failed(config.pluginmanager.getplugin("terminalreporter"))
    accidents = {
        _what_to_run(report.nodeid): report for report in failed if accident(report)
    }
    if not 0 < len(accidents) <= MOST:
        return
    passed = sorted(name for name in accidents if _passes_alone(config, name))
    config.stash[AGAIN] = [
        f"FAILED, THEN PASSED {name} ({accident(accidents[name])})" for name in passed
    ]
    if passed:
        lines = [f"{name}: {cause(accidents[name])}" for name in passed]
        config.stash[AGAIN].append(_keep(config.rootpath, lines))
    if all(_what_to_run(report.nodeid) in passed for report in failed):
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter, config):
    for report in _failed(terminalreporter):
        # one of a collection has none
        properties = dict(getattr(report, "user_properties", ()))
        for line in properties.get(LINE, "").splitlines():
            terminalreporter.write_line(line)
    for line in config.stash.get(AGAIN, ()):
        terminalreporter.write_line(line)


def _failed(reporter) -> list[pytest.TestReport]:
    return [*reporter.stats.get("failed", []), *reporter.stats.get("error", [])]


def _what_to_run(nodeid: str) -> str:
    """Returns a test, or the notebook of a cell: its cells need those before them."""
    file = nodeid.partition("::")[0]
    return file if file.endswith(".ipynb") else nodeid


def _passes_alone(config: pytest.Config, name: str) -> bool:
    print(f"\nonce more, alone: {name}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    return subprocess.run(command, cwd=config.rootpath).returncode == 0


def _keep(root: Path, lines: list[str]) -> str:
    """Adds accidents to `ACCIDENTS`; returns the sentence that says so."""
    when = f"{datetime.date.today()} {_commit(root)}"
    try:
        with open(root / ACCIDENTS, "a", encoding="utf-8") as file:
            file.write("".join(f"{when} {line}\n" for line in lines))
    except OSError as error:
        return f"{len(lines)} failed, then passed; not kept in {ACCIDENTS}: {error}"
    return f"{len(lines)} failed, then passed; mend the cause, listed in {ACCIDENTS}"


def committed(root: Path) -> str:
    """Returns what the last commit has in `ACCIDENTS`; "" where there is none."""
    return _git(root, "show", f"HEAD:{ACCIDENTS}") or ""


def _commit(root: Path) -> str:
    found = _git(root, "rev-parse", "--short", "HEAD")
    return "(no git)" if found is None else found.strip() or "(no commit)"


def _git(root: Path, *words: str) -> str | None:
    """Returns what git prints; "" if it fails, None if it is not there."""
    try:
        return subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True
        ).stdout
    except OSError:
        return None
