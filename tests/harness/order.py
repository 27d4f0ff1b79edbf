"""What a run begins with: what takes longest, so that nothing long is left for the end.

`seconds.json` has the seconds of each notebook and of each file of tests, as a run had
them that was asked to store them: `python3 -m helpers test -n 3 --store-seconds`. What
has no row there is new, and counts as long.

A file's tests stay together, so that what they share is made once. Where slow tests are
among them, those of `LONG` are shared out one by one: they take minutes.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

SECONDS = Path(__file__).with_name("seconds.json")
LONG = ("tests/test_trainers.py", "simgpu/tests/test_dry_twins.py")


def pytest_addoption(parser):
    parser.addoption(
        "--store-seconds",
        action="store_true",
        help=f"store what each file of this run takes in {SECONDS.name}",
    )


def pytest_configure(config):
    option = config.option
    if getattr(option, "dist", "no") in ("load", "worksteal"):
        option.dist = "loadscope"
        option.loadscopereorder = False  # by the number of tests: few may be slow
    if option.store_seconds and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Stopwatch(config.rootpath), "seconds-of-a-run")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    known = stored()
    split = LONG if config.option.markexpr != "not slow" else ()

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if nodeid.startswith(split) else super()._split_scope(nodeid)

        def _assign_work_unit(self, node) -> None:
            longest = max(self.workqueue, key=lambda scope: seconds(scope, known))
            self.workqueue.move_to_end(longest, last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log)


def stored() -> dict[str, int]:
    """Returns file -> seconds."""
    return json.loads(SECONDS.read_text("utf-8"))


def seconds(scope: str, known: dict[str, int]) -> float:
    """Returns what the tests of a file took, or more than any, if that is not known.

    Args:
        scope: a file, or a test or a class in it.
        known: file -> seconds.
    """
    return known.get(scope.partition("::")[0], float("inf"))


class Stopwatch:
    """Adds up what the tests of each file take, and stores it in the end.

    Args:
        root: the folder in which the files are; rows of those that have gone go, too.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._taken: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._taken[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        rows = stored() | {file: round(took) for file, took in self._taken.items()}
        here = [file for file in sorted(rows) if (self._root / file).exists()]
        rows = {file: rows[file] for file in here}
        SECONDS.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
