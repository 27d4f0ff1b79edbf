"""Exercises judge right and wrong answers, help, and own up to failures of their own.

Oracles can fail. What an exercise must call right or wrong is in `tests/answers`.
"""

import ast
import functools
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch

import simgpu
from exercises import exercise
from exercises.exercise import NotYet, Verdict, Wrong, call
from helpers import check
from simgpu import close_ranks
from support import checkout
from support.limits import SHORT, SLOWNESS
from tests.answers import as_answers
from tests.lessons import lessons

ROOT = Path(__file__).parents[1]
LESSONS = {
    path.stem[-2:]: importlib.import_module(f"exercises.{path.stem}")
    for path in checkout.here(exercise.FOLDER, "lesson_*.py")
}
ANSWERS = {
    number: importlib.import_module(f"tests.answers.lesson_{number}")
    for number in LESSONS
}
EXERCISES = {name: exercise.load(number) for name, number in exercise.index().items()}
RIGHT = [
    pytest.param(name, i, id=f"{name}-{i}")
    for answers in ANSWERS.values()
    for name, entries in answers.RIGHT.items()
    for i in range(len(entries))
]
WRONG = [
    pytest.param(name, i, why, id=f"{name}-{i}")
    for answers in ANSWERS.values()
    for name, entries in answers.WRONG.items()
    for i, (_, why) in enumerate(entries)
]
# Seconds that a check grants before it calls an answer wrong, for the wrong answers
# that use them up. A learner's answer has more, since their machine may be busy.
SHORTER = {
    "prefetch_safely": {"PATIENCE": 2},
    "delivers_all": {"ASKS": 4, "STAYS": 1, "ENDS": 2},
    "parallel_accuracy": {"NOTICES": 4},
    "any_rank": {"HANGS": 2},
    "all_gather_in_a_ring": {"HANGS": 2},
    "rotate_without_a_deadlock": {"HANGS": 2},
    "train_in_ranks": {"HANGS": 4},
    "accuracy_of_all": {"HANGS": 4},
    "tie": {"SECONDS": 4},
}
# Constants of lessons that are limits of time.
LIMITS = ("HANGS", "PATIENCE", "SECONDS")
# Sides of matrices that are multiplied before an answer without a meaning is looked at.
SMALLER = {"seconds_alone": {"SIDE": 64}, "part_times": {"SIDES": ((64,) * 3,) * 2}}


@pytest.fixture(autouse=True)
def gpus():
    simgpu.start(4)
    yield
    simgpu.stop()


@pytest.fixture(scope="module", autouse=True)
def real_ranks():
    yield
    close_ranks()


def answers_to(name: str):
    """The answers to the exercises of the lesson that has this check."""
    return ANSWERS[exercise.index()[name][:2]]


@pytest.fixture(autouse=True)
def limits_of_this_machine(monkeypatch):
    """What ranks may take that hang, or seem to."""
    for lesson in LESSONS.values():
        for constant in LIMITS:
            if hasattr(lesson, constant):
                longer = getattr(lesson, constant) * SLOWNESS
                monkeypatch.setattr(lesson, constant, longer)


def be_shorter(name: str, monkeypatch, which=SHORTER) -> None:
    lesson = LESSONS[exercise.index()[name][:2]]
    for constant, less in which.get(name, {}).items():
        less *= SLOWNESS if constant in LIMITS else 1
        assert less < getattr(lesson, constant)
        monkeypatch.setattr(lesson, constant, less)


@pytest.mark.parametrize("name, i", RIGHT)
def test_right_answers_pass(name, i, monkeypatch):
    if name == "delivers_all":  # a right producer stays for as long as it is watched
        monkeypatch.setattr(LESSONS["14"], "STAYS", 0.3)
    verdict = EXERCISES[name](*as_answers(answers_to(name).RIGHT[name][i]))
    assert verdict.state == "right", verdict


@pytest.mark.parametrize("name, i, why", WRONG)
def test_wrong_answers_fail_with_a_reason(name, i, why, monkeypatch):
    be_shorter(name, monkeypatch)
    answer, _ = answers_to(name).WRONG[name][i]
    verdict = EXERCISES[name](*as_answers(answer))
    assert verdict.state == "wrong", verdict
    assert why in verdict.why


def test_a_hang_is_not_what_a_rank_spends_on_imports(tmp_path, monkeypatch):
    be_shorter("all_gather_in_a_ring", monkeypatch)
    text = f"""
import os
import time

from tests.answers.lesson_15 import gathered

if "RANK" in os.environ:
    time.sleep({LESSONS["15"].HANGS + 1})


def mine(x):
    return gathered(x)
"""
    (tmp_path / "slow_to_import.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("slow_to_import").mine
    verdict = check.all_gather_in_a_ring(mine)
    assert verdict.state == "right", verdict


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /dev/shm")
def test_tensors_that_a_wrong_producer_sends_by_name_do_not_stay(tmp_path):
    def produce(queue, received):
        (tmp_path / "pid").write_text(str(os.getpid()))
        ANSWERS["14"].ends_with_names(queue, received)

    assert check.delivers_all(produce).state == "wrong"
    pid = (tmp_path / "pid").read_text()
    assert list(Path("/dev/shm").glob(f"torch_{pid}_*")) == []


@pytest.mark.parametrize("name", EXERCISES)
def test_every_exercise_has_answers(name):
    answers = answers_to(name)
    assert answers.RIGHT.get(name) or exercise.load_solution(EXERCISES[name].number)
    assert len(answers.WRONG[name]) >= 2
    assert EXERCISES[name](...).state == "not yet"


def test_no_answer_belongs_to_nothing():
    for answers in ANSWERS.values():
        assert not ({*answers.RIGHT, *answers.WRONG} - {*EXERCISES})


def exercise_cells() -> dict[str, tuple[str, Path]]:
    """Name of each check that a notebook calls -> the cell, and the notebook."""
    return {
        name: (cell.source, path)
        for path in lessons()
        for cell in nbformat.read(path, 4).cells
        if "exercise" in cell.metadata.get("tags", [])
        for name in re.findall(r"check\.(\w+)\(", cell.source)
    }


def test_lessons_use_exactly_the_exercises_there_are():
    used = {name: path.name[:2] for name, (_, path) in exercise_cells().items()}
    there = {name: number[:2] for name, number in exercise.index().items()}
    assert used == there


# -- answers that make no sense --------------------------------------------------------

ODD = (
    None, "text", 3, -1.5, float("nan"), 10**400, [], [1, "x"], {"a": 1}, (1, 2),
    torch.ones(2), torch.ones(()), torch.ones(3, 4, dtype=torch.int64), object(), int,
)  # fmt: skip
SLOW = {  # checks that take long to refuse an answer: they get fewer of them
    "all_gather_in_a_ring", "any_rank", "rotate_without_a_deadlock", "send_bfloat16",
    "tie", "loss_in_slices", "clip", "shard_it", "delivers_all",
    "parallel_accuracy", "within_32", "lean_evaluation",
}  # fmt: skip


def constant(value):
    return lambda *args, **options: value


@pytest.mark.parametrize("name", EXERCISES)
def test_no_answer_makes_a_check_fail_itself(name, monkeypatch):
    be_shorter(name, monkeypatch, SHORTER | SMALLER)
    count = len(as_answers(answers_to(name).WRONG[name][0][0]))
    for value in ODD[:: 6 if name in SLOW else 1]:
        for answer in (value, constant(value)):
            verdict = EXERCISES[name](*[answer] * count)
            assert verdict.state in ("wrong", "not yet"), (value, verdict)
    assert EXERCISES[name](*[1] * 30).state == "wrong"


# -- hints and solutions ---------------------------------------------------------------


def missing(of) -> list[str]:
    return sorted(e.number for e in EXERCISES.values() if not of(e))


def test_every_exercise_has_two_hints_and_a_solution():
    assert missing(lambda e: len(e.hints) == 2 and all(e.hints)) == []
    assert missing(lambda e: exercise.load_solution(e.number)) == []


@functools.cache
def imports(path: Path) -> dict[str, str]:
    """Name -> the statement of a notebook's cells that imports it."""
    found = {}
    for cell in nbformat.read(path, 4).cells:
        if cell.cell_type != "code" or cell.source.startswith("%%"):
            continue
        python = re.sub(r"^( *)[%!].*", r"\1pass", cell.source, flags=re.M)
        for node in ast.parse(python).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    bound = (alias.asname or alias.name).partition(".")[0]
                    found[bound] = ast.unparse(node)
    return found


SOLVED = [e.name for e in EXERCISES.values() if exercise.load_solution(e.number)]


@pytest.mark.parametrize("name", SOLVED)
def test_the_solution_that_is_shown_is_right_in_its_notebook(name, tmp_path):
    solution = exercise.load_solution(EXERCISES[name].number)
    cell, path = solution.cell(name), exercise_cells()[name][1]
    assert solution.function.__doc__, "it explains nothing"
    given = {what: make() for what, make in solution.given.items()}
    namespace = {"__name__": "__main__", **given}
    used = {n.id for n in ast.walk(ast.parse(cell)) if isinstance(n, ast.Name)}
    for bound in sorted(used & {*imports(path)}):
        exec(imports(path)[bound], namespace)
    *_, last = ast.parse(cell).body
    file = tmp_path / "ipykernel_0.py"
    file.write_text(cell)
    body = cell.splitlines()[: last.lineno - 1]
    exec(compile("\n".join(body), file, "exec"), namespace)
    said = eval(ast.get_source_segment(cell, last), namespace)
    assert said.state == "right", said


def test_hints_come_one_at_a_time():
    asked = exercise.Exercise("04.1", lambda answer: None, ("look", "count"))
    assert repr(asked.hint()) == "exercise 04.1, hint 1 of 2: look"
    assert repr(asked.hint()) == "exercise 04.1, hint 2 of 2: count"
    for _ in range(2):
        assert 'no more hints; after a try, check.solution("04.1")' in asked.hint()


def test_a_solution_is_shown_after_a_try(monkeypatch):
    monkeypatch.setattr(EXERCISES["peak_of_step"], "tried", False)
    assert "try it first" in check.solution("04.1")
    check.peak_of_step(...)
    assert "try it first" in check.solution("04.1")
    check.peak_of_step(17)
    shown = check.solution("04.1")
    assert shown.startswith("exercise 04.1, solved:\n\nFive tensors of the same size")
    assert shown.endswith("check.peak_of_step(peak_of_step)")


def test_a_function_that_is_not_written_is_no_try(monkeypatch):
    monkeypatch.setattr(EXERCISES["spread"], "tried", False)
    check.spread(lambda x, n: None)
    assert "try it first" in check.solution("00.2")


@pytest.mark.parametrize("ask", [check.hint, check.solution])
def test_an_exercise_that_is_not_there(ask):
    with pytest.raises(ValueError, match=r"'99\.9'; there are those from 00\.1 to 30"):
        ask("99.9")
    with pytest.raises(ValueError, match=r"'16\.7'; there are 16\.1, 16\.2, 16\.3"):
        ask("16.7")
    with pytest.raises(TypeError, match=r'such as "13\.2", not 13\.2'):
        ask(13.2)
    with pytest.raises(AttributeError, match="no attribute 'spreads'"):
        check.spreads(1)


def test_only_the_lessons_own_file_is_loaded():
    code = (
        "import sys; from helpers import check; check.place(...); check.hint('02.1');"
        "print(sorted(m[-2:] for m in sys.modules if '.lesson_' in m))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=SHORT
    )
    assert done.stdout == "['01', '02']\n", done.stderr


# -- whose failure it is ---------------------------------------------------------------


def judged(checker, *answers) -> Verdict:
    return exercise.Exercise("04.2", checker, ())(*answers)


def of_the_course(text: str):
    """A function whose lines are in a file of the course."""
    namespace = {"call": call}
    exec(compile(text, exercise.FOLDER / "lesson_99.py", "exec"), namespace)
    return namespace["checker"]


def test_a_failure_of_the_check_is_not_the_learners():
    checker = of_the_course("def checker(answer):\n    {}['x']\n")
    assert repr(judged(checker, 1)) == (
        "exercise 04.2: not checked: the check itself failed (KeyError: 'x'); this is "
        "no fault of your answer"
    )


def test_a_failure_of_the_learners_is_not_the_checks():
    def broken(x=0):
        raise KeyError("oops")

    class Broken:
        def __len__(self):
            raise KeyError("oops")

    checker = of_the_course("def checker(answer):\n    call(answer, 1)\n")
    for answer in (broken, functools.partial(broken, 1), {}.pop, Broken):
        verdict = judged(checker, answer)
        assert verdict.state == "wrong" and "your code raised" in verdict.why
    checker = of_the_course("def checker(answer):\n    len(answer)\n")
    assert judged(checker, Broken()).why == "your code raised KeyError: 'oops'"


def test_a_failure_of_a_check_in_its_ranks_is_not_the_learners(monkeypatch):
    in_a_rank = of_the_course("def checker(function, most):\n    return {}['x']\n")
    monkeypatch.setattr(LESSONS["18"], "_clip", in_a_rank)
    verdict = check.clip(ANSWERS["18"].clipped)
    assert verdict.state == "not checked" and "KeyError: 'x'" in verdict.why


@pytest.mark.parametrize("kind", [Wrong, NotYet])
def test_what_a_check_says_through_the_learners_code_is_kept(kind):
    def passes_on(part):
        part()

    def part():
        raise kind("a reason")

    with pytest.raises(kind, match="^a reason$"):
        call(passes_on, part)


def test_an_unwritten_function_is_not_yet_an_answer():
    assert check.spread(lambda x, n: None).state == "not yet"


def test_a_raising_answer_is_wrong_and_says_so():
    def broken(x, n):
        raise KeyError("oops")

    verdict = check.spread(broken)
    assert repr(verdict) == "exercise 00.2: wrong: your code raised KeyError: 'oops'"


# -- oracles ---------------------------------------------------------------------------


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
