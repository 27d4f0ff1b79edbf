"""What an exercise is: the check of an answer, its hints and its worked solution.

`exercise` makes a function of answers into an `Exercise`, `solution` makes a function
into its `Solution`. `index` and `load` find them in the files of the lessons; only the
file of the lesson that is asked for is imported.
"""

import ast
import functools
import importlib
import inspect
import re
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path

from simgpu import hide_frames, is_program_code

FOLDER = Path(__file__).parent
# the course's own files are not the learner's
for _own in (FOLDER, FOLDER.with_name("incidents"), FOLDER.parents[1] / "helpers"):
    hide_frames(_own)


class NotYet(Exception):
    """The answer is still missing."""


class Wrong(Exception):
    """The answer is wrong; the message says why."""


class Shown(str):
    """A text that a notebook shows as it is, without quotes."""

    __repr__ = str.__str__


class Verdict:
    """What an exercise says of an answer.

    Args:
        exercise: its number, "03.1".
        state: "right", "wrong", "not yet", or "not checked" if the check itself failed.
        why: the reason, empty for a right answer.
    """

    def __init__(self, exercise: str, state: str, why: str = ""):
        self.exercise, self.state, self.why = exercise, state, why

    def __repr__(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"exercise {self.exercise}: {self.state}{why}"


class Exercise:
    """An exercise; called with the learner's answers, it gives its verdict."""

    def __init__(self, number: str, checker: Callable, hints: tuple[str, ...]):
        self.number, self.checker, self.hints = number, checker, hints
        self.name = checker.__name__
        self.hints_given = 0
        self.tried = False  # whether a verdict was other than "not yet"

    def __call__(self, *answers) -> Verdict:
        verdict = Verdict(self.number, *self._judge(answers))
        self.tried = self.tried or verdict.state != "not yet"
        return verdict

    def _judge(self, answers: tuple) -> tuple[str, str]:
        """The state of the answers, and why."""
        if any(answer is ... for answer in answers):
            return "not yet", "replace the ... with your answer"
        try:
            self._must_take(answers)
            self.checker(*answers)
        except NotYet as reason:
            return "not yet", str(reason)
        except Wrong as reason:
            return "wrong", str(reason)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            if is_learners(error):
                return "wrong", f"your code raised {what}"
            fault = "this is no fault of your answer"
            return "not checked", f"the check itself failed ({what}); {fault}"
        return "right", ""

    def _must_take(self, answers: tuple) -> None:
        signature = inspect.signature(self.checker)
        try:
            signature.bind(*answers)
        except TypeError:
            names = ", ".join(signature.parameters)
            raise Wrong(f"give the check ({names}), not {len(answers)}") from None

    def hint(self) -> Shown:
        """The next hint, or that there is none."""
        if self.hints_given == len(self.hints):
            return Shown(
                f"exercise {self.number}: there are no more hints; after a try, "
                f'check.solution("{self.number}") shows a worked solution'
            )
        self.hints_given += 1
        which = f"hint {self.hints_given} of {len(self.hints)}"
        return Shown(
            f"exercise {self.number}, {which}: {self.hints[self.hints_given - 1]}"
        )


def is_learners(error: BaseException) -> bool:
    """Whether a line of the learner's had a part in an error."""
    steps = traceback.walk_tb(error.__traceback__)
    return any(is_program_code(frame.f_code.co_filename) for frame, _ in steps)


def exercise(number: str, hints: tuple[str, ...] = ()) -> Callable:
    """Make a function of answers into an exercise.

    Args:
        number: of the lesson and of the exercise, "03.1".
        hints: for the learner, the vaguest first.
    """
    return lambda checker: Exercise(number, checker, hints)


class Solution:
    """A worked solution: a function whose body makes the answers and returns them.

    Args:
        number: of the exercise.
        function: its docstring is the explanation.
        given: functions that make what the notebook has by then, by its names.
    """

    def __init__(self, number: str, function: Callable, given: dict[str, Callable]):
        self.number, self.function, self.given = number, function, given

    def cell(self, name: str) -> str:
        """The body as a notebook's cell that gives its answers to the check `name`."""
        source = textwrap.dedent(inspect.getsource(self.function))
        docstring, *_, last = ast.parse(source).body[0].body
        lines = source.splitlines()[docstring.end_lineno : last.lineno - 1]
        answers = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
        texts = [ast.get_source_segment(source, answer) for answer in answers]
        body = textwrap.dedent("\n".join(lines)).strip()
        return f"{body}\n\ncheck.{name}({', '.join(texts)})".strip()

    def shown(self, name: str) -> Shown:
        """The explanation and the cell."""
        why = inspect.cleandoc(self.function.__doc__)
        return Shown(f"exercise {self.number}, solved:\n\n{why}\n\n{self.cell(name)}")


def solution(number: str, **given: Callable) -> Callable:
    """Make a function into the worked solution of an exercise: see `Solution`."""
    return lambda function: Solution(number, function, given)


# -- the learner's code ----------------------------------------------------------------


def must_be_callable(function) -> None:
    """Raises `Wrong` for what is no function."""
    if not callable(function):
        raise Wrong(f"give a function or a class, not {function!r}")


def call(function: Callable, *args, when: str = ""):
    """The result of the learner's function; None means that it is not written yet.

    Args:
        function: the learner's.
        args: for it.
        when: said in front of the error that it raises.

    Raises:
        NotYet: if it returns nothing.
        Wrong: if it raises, or cannot be called.
    """
    result = run(function, *args, when=when)
    if result is None:
        raise NotYet("your function returns nothing so far")
    return result


def run(function: Callable, *args, when: str = ""):
    """The same for a function that need not return anything."""
    must_be_callable(function)
    try:
        return function(*args)
    except (NotYet, Wrong):  # of a part of the check that the function has called
        raise
    except Exception as error:
        what = f"{when} your code raised {type(error).__name__}: {error}"
        # with the learner's lines, which a rank tells the notebook
        raise Wrong(what.strip()).with_traceback(error.__traceback__) from error


# -- finding them ----------------------------------------------------------------------

_BEGINS = re.compile(
    r'^@exercise\(\s*"(\d\d\.\d)"(?:(?!^def ).)*^def (\w+)\(', re.M | re.S
)


@functools.cache
def index() -> dict[str, str]:
    """Name of each check -> number of its exercise, from the text of the files."""
    return {
        name: number
        for path in sorted(FOLDER.glob("lesson_[0-9][0-9].py"))
        for number, name in _BEGINS.findall(path.read_text(encoding="utf-8"))
    }


def load(number: str) -> Exercise:
    """The exercise of this number. Imports the file of its lesson.

    Raises:
        TypeError: if it is not a text.
        ValueError: if there is no such exercise; the message says which there are.
    """
    if not isinstance(number, str):
        raise TypeError(f'write the number as text, such as "13.2", not {number!r}')
    there = sorted(index().values())
    if number not in there:
        of_lesson = [other for other in there if other[:2] == number[:2]]
        which = ", ".join(of_lesson) or f"those from {there[0]} to {there[-1]}"
        raise ValueError(f"there is no exercise {number!r}; there are {which}")
    return _of(number, Exercise)


def load_solution(number: str) -> Solution | None:
    """The worked solution of this exercise, if it has one."""
    return _of(number, Solution)


def _of(number: str, kind: type):
    module = importlib.import_module(f"{__package__}.lesson_{number[:2]}")
    found = [thing for thing in vars(module).values() if isinstance(thing, kind)]
    return next((thing for thing in found if thing.number == number), None)
