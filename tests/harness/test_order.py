"""What a run in several processes begins with, as its scheduler hands it out."""

import json
from types import SimpleNamespace

import pytest

from support import checkout
from tests.harness import order
from tests.harness.small_course import ROOT

TRAINERS, TWINS = order.LONG


class Worker:
    """One process of a run: what it is given, it has done at once.

    Attributes:
        done: tests, in their order.
    """

    shutting_down = False

    def __init__(self, collected: list[str]) -> None:
        self.done: list[str] = []
        self._collected = collected
        self._given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self._given += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    def work(self, scheduler) -> None:
        while self._given:
            index = self._given.pop(0)
            self.done.append(self._collected[index])
            scheduler.mark_test_complete(self, index)


def scheduler_of(markexpr: str = "not slow", dist: str = "loadscope"):
    """What shares the tests of a run out, made as xdist has it made."""
    config = SimpleNamespace(
        getvalue={"dist": dist, "tx": ["popen"]}.get,
        option=SimpleNamespace(markexpr=markexpr, loadscopereorder=False),
    )
    return order.pytest_xdist_make_scheduler(config, None)


def handed_out(collected: list[str], scheduler) -> list[str]:
    """In which order one worker gets tests."""
    worker = Worker(collected)
    scheduler.add_node(worker)
    scheduler.add_node_collection(worker, collected)
    scheduler.schedule()
    worker.work(scheduler)
    return worker.done


def test_what_takes_longest_is_first_and_a_new_file_before_it(monkeypatch):
    known = {"tests/test_a.py": 1, "notebooks/01.ipynb": 30, "tests/test_b.py": 2}
    monkeypatch.setattr(order, "stored", lambda: known)
    a, b, new = (f"tests/test_{name}.py::test" for name in ("a", "b", "new"))
    cells = ["notebooks/01.ipynb::Cell 0", "notebooks/01.ipynb::budget"]
    of_class = "tests/test_b.py::Class::test"
    found = handed_out([a, b, of_class, *cells, new], scheduler_of())
    assert found == [new, *cells, b, of_class, a]


@pytest.mark.parametrize("markexpr, together", [("not slow", True), ("slow", False)])
def test_tests_of_a_long_file_are_shared_out_only_where_slow_ones_are_among_them(
    monkeypatch, markexpr, together
):
    monkeypatch.setattr(order, "stored", dict)
    tests = [f"{TRAINERS}::test[{n}]" for n in range(4)]
    scheduler = scheduler_of(markexpr)
    parts = {scheduler._split_scope(test) for test in tests}
    assert len(parts) == (1 if together else len(tests))
    assert sorted(handed_out(tests, scheduler)) == tests


def test_another_way_to_share_tests_out_is_left_alone():
    assert scheduler_of(dist="loadfile") is None


def test_what_a_run_takes_is_stored_beside_what_is_known(tmp_path, monkeypatch):
    path = tmp_path / "seconds.json"
    path.write_text('{"old.py": 7, "gone.py": 9, "test_a.py": 1}')
    monkeypatch.setattr(order, "SECONDS", path)
    for name in ("old.py", "test_a.py"):
        (tmp_path / name).touch()
    stopwatch = order.Stopwatch(tmp_path)
    for test, took in ("test_a.py::test", 2.25), ("test_a.py::Class::test", 1.5):
        report = SimpleNamespace(nodeid=test, duration=took)
        stopwatch.pytest_runtest_logreport(report)
    stopwatch.pytest_sessionfinish()
    assert json.loads(path.read_text()) == {"old.py": 7, "test_a.py": 4}


def test_the_stored_rows_are_files_of_this_project():
    files = {path.relative_to(ROOT).as_posix() for path in checkout.files(ROOT)}
    assert order.stored().keys() <= files
    assert {TRAINERS, TWINS} <= files
