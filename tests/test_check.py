"""Exercises judge right and wrong answers; oracles can fail."""

import importlib
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
import torch

from helpers import check, judges, simgpu  # noqa: F401 - the judges register

HERE = Path(__file__).parent
ANSWERS = {
    path.stem.removeprefix("answers_"): importlib.import_module(
        f"tests.answers.{path.stem}"
    )
    for path in sorted((HERE / "answers").glob("answers_*.py"))
}
RIGHT = [
    pytest.param(name, build, id=f"{name}-{i}")
    for module in ANSWERS.values()
    for name, builds in module.RIGHT.items()
    for i, build in enumerate(builds)
]
WRONG = [
    pytest.param(name, build, why, id=f"{name}-{i}")
    for module in ANSWERS.values()
    for name, builds in module.WRONG.items()
    for i, (build, why) in enumerate(builds)
]


@pytest.fixture(autouse=True)
def gpus():
    simgpu.start(4)
    yield
    simgpu.stop()


@pytest.mark.parametrize("name, build", RIGHT)
def test_right_answers_pass(name, build):
    verdict = check.EXERCISES[name](*build())
    assert verdict.state == "right", verdict


@pytest.mark.parametrize("name, build, why", WRONG)
def test_wrong_answers_fail_with_a_reason(name, build, why):
    verdict = check.EXERCISES[name](*build())
    assert verdict.state == "wrong"
    assert why in verdict.why


def test_a_hang_is_not_what_a_rank_spends_on_imports(tmp_path, monkeypatch):
    text = f"""
import os
import time

from tests.answers.answers_12 import gathered

if "RANK" in os.environ:
    time.sleep({judges.lesson_12.HANGS + 1})


def mine(x):
    return gathered(x)
"""
    (tmp_path / "slow_to_import.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("slow_to_import").mine
    verdict = check.EXERCISES["all_gather_in_a_ring"](mine)
    assert verdict.state == "right", verdict


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /dev/shm")
def test_tensors_that_a_wrong_producer_sends_by_name_do_not_stay(tmp_path):
    def produce(queue, received):
        (tmp_path / "pid").write_text(str(os.getpid()))
        ANSWERS["09"].ends_with_names(queue, received)

    assert check.EXERCISES["delivers_all"](produce).state == "wrong"
    pid = (tmp_path / "pid").read_text()
    assert list(Path("/dev/shm").glob(f"torch_{pid}_*")) == []


@pytest.mark.parametrize("name", check.EXERCISES)
def test_every_exercise_has_answers(name):
    exercise = check.EXERCISES[name]
    module = ANSWERS[exercise.number[:2]]
    assert module.RIGHT[name] and len(module.WRONG[name]) >= 2
    assert exercise(...).state == "not yet"


def test_lessons_use_exactly_the_exercises_there_are():
    used = {}
    for path in (HERE.parent / "notebooks").glob("*.ipynb"):
        for cell in nbformat.read(path, 4).cells:
            if "exercise" in cell.metadata.get("tags", []):
                for name in re.findall(r"check\.(\w+)\(", cell.source):
                    used[name] = path.name[:2]
    there = {name: e.number[:2] for name, e in check.EXERCISES.items()}
    assert used == there


def test_same_accepts_equal_values_on_any_device(capsys):
    check.same(torch.ones(3, device="cuda:1"), torch.ones(3))
    check.same([torch.ones(3), torch.zeros(0)], [torch.ones(3), torch.zeros(0)])
    check.same(torch.ones(3) + 1e-7, torch.ones(3), tolerance=1e-6)
    check.same(torch.tensor([float("inf")]), torch.tensor([float("inf")]))
    out = capsys.readouterr().out
    assert "1 tensor equal exactly" in out and "2 tensors" in out
    assert "within 1e-06" in out


@pytest.mark.parametrize(
    "result, reference",
    [
        (torch.ones(3), torch.ones(3) + 1e-3),
        (torch.ones(3), torch.ones(4)),
        (torch.ones(3), torch.ones(3).double()),
        (torch.tensor([float("nan")]), torch.ones(1)),
        ([torch.ones(3)], []),
        ([], []),
        (torch.tensor([1 + 5j]), torch.tensor([1 + 0j])),
        (torch.tensor([2**53 + 1]), torch.tensor([2**53])),
    ],
)
def test_same_refuses(result, reference):
    with pytest.raises(AssertionError):
        check.same(result, reference, tolerance=1e-6)


def test_predicted_prints_the_error(capsys):
    check.predicted(101, 100, "bytes", tolerance=0.011)
    assert "error 1.0%" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="1.0% off"):
        check.predicted(101, 100, "bytes")
    with pytest.raises(AssertionError):
        check.predicted(float("nan"), 100, "bytes", tolerance=0.5)


def test_an_unwritten_function_is_not_yet_an_answer():
    assert check.spread(lambda x, n: None).state == "not yet"


def test_a_raising_answer_is_wrong_and_says_so():
    def broken(x, n):
        raise KeyError("oops")

    verdict = check.spread(broken)
    assert repr(verdict) == "exercise 00.2: wrong: your code raised KeyError: 'oops'"
