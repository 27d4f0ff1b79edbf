"""Oracles, and exercises that check themselves.

An oracle compares two results that must agree and prints one line on how well they
do. An exercise is a function of the learner's answers that says not yet, wrong and
why, or right: `check.copied_bytes(answer)`. Its judge raises `Wrong` with a reason, or
returns; the judges of each lesson have a file in `helpers/judges`.
"""

import contextlib
import functools
import importlib
import math
from collections.abc import Callable
from numbers import Real

import torch

from helpers import simgpu

# -- oracles ---------------------------------------------------------------------------


def same(result, reference, tolerance: float = 0.0) -> None:
    """Assert that two tensors, or lists of them, hold the same values.

    Devices may differ: that is what most lessons are about. Prints the largest
    difference.

    Args:
        result: a tensor or a list of tensors.
        reference: what it must equal; same shapes and dtypes.
        tolerance: the largest absolute difference that counts as equal.

    Raises:
        AssertionError: naming the first tensor that differs, and by how much.

    Taught in 00-start-here.
    """
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    references = [reference] if isinstance(reference, torch.Tensor) else list(reference)
    if not results:
        raise AssertionError("there is nothing to compare")
    if len(results) != len(references):
        raise AssertionError(f"{len(results)} tensors against {len(references)}")
    worst = 0.0
    for i, (a, b) in enumerate(zip(results, references, strict=True)):
        a, b = a.detach().cpu(), b.detach().cpu()
        if a.shape != b.shape or a.dtype != b.dtype:
            raise AssertionError(
                f"tensor {i}: {tuple(a.shape)} {a.dtype} against "
                f"{tuple(b.shape)} {b.dtype}"
            )
        if torch.equal(a, b):
            continue
        wide = torch.complex128 if a.is_complex() else torch.float64
        gap = (a.to(wide) - b.to(wide)).abs().max().item()
        if not 0 < gap <= tolerance:  # refuses nan, and what float64 cannot tell apart
            raise AssertionError(
                f"tensor {i} differs by {gap:.1e}, more than {tolerance:.1e}"
            )
        worst = max(worst, gap)
    count = "1 tensor" if len(results) == 1 else f"{len(results)} tensors"
    how = "exactly" if worst == 0 else f"within {tolerance:.0e}"
    print(f"same: {count} equal {how}")


def predicted(
    prediction: float,
    actual: float,
    unit: str,
    tolerance: float = 0.0,
    how: str | None = None,
) -> None:
    """Print a prediction beside what was counted or measured, and the error.

    Args:
        prediction: the number that the lesson's arithmetic gives.
        actual: the number that the machine gives.
        unit: of both, for the printed line.
        tolerance: the largest relative error that passes; 0.01 is 1 %.
        how: the machine came to its number: "counted" or "measured"; None says counted
            on simulated GPUs and measured elsewhere.

    Raises:
        AssertionError: if the error is larger.

    Taught in 00-start-here.
    """
    error = abs(prediction - actual) / abs(actual) if actual else abs(prediction)
    if not error <= tolerance:
        raise AssertionError(
            f"predicted {prediction:,.6g} {unit}, but it is {actual:,.6g}: "
            f"{error:.1%} off"
        )
    a, b = (
        f"{x:,}" if isinstance(x, int) else f"{x:,.3f}" for x in (prediction, actual)
    )
    how = how or ("counted" if simgpu.count() else "measured")
    print(f"predicted {a} {unit}, {how} {b} {unit}: error {error:.1%}")


# -- exercises -------------------------------------------------------------------------


class NotYet(Exception):
    """The answer is still missing."""


class Wrong(Exception):
    """The answer is wrong; the message says why."""


class Verdict:
    """What an exercise says of an answer."""

    def __init__(self, exercise: str, state: str, why: str = ""):
        self.exercise, self.state, self.why = exercise, state, why

    def __repr__(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"exercise {self.exercise}: {self.state}{why}"


EXERCISES: dict[str, Callable] = {}  # name of the check -> the check


def exercise(number: str):
    """Make a judge of answers into exercise `number`, such as "01.2"."""

    def register(judge: Callable) -> Callable:
        @functools.wraps(judge)
        def check(*answers) -> Verdict:
            try:
                if any(answer is ... for answer in answers):
                    raise NotYet("replace the ... with your answer")
                judge(*answers)
            except NotYet as reason:
                return Verdict(number, "not yet", str(reason))
            except Wrong as reason:
                return Verdict(number, "wrong", str(reason))
            except Exception as error:  # the learner's own code
                why = f"your code raised {type(error).__name__}: {error}"
                return Verdict(number, "wrong", why)
            return Verdict(number, "right")

        check.number = number
        EXERCISES[judge.__name__] = check
        return check

    return register


def call(function: Callable, *args, when: str = ""):
    """The result of the learner's function; None means that it is not written yet.

    Args:
        function: the learner's.
        args: for it.
        when: said in front of the error that it raises.
    """
    try:
        result = function(*args)
    except Exception as error:
        what = f"{when} your code raised {type(error).__name__}: {error}"
        raise Wrong(what.strip()) from error
    if result is None:
        raise NotYet("your function returns nothing so far")
    return result


def number(answer, what: str):
    """The learner's number: Python's, NumPy's or PyTorch's.

    Args:
        answer: the learner's.
        what: it is, for the error.

    Raises:
        Wrong: for anything else, and for what is not finite.
    """
    found = answer
    if hasattr(answer, "item"):
        with contextlib.suppress(ValueError, RuntimeError):  # more than one
            found = answer.item()
    if isinstance(found, Real) and not isinstance(found, bool) and math.isfinite(found):
        return found
    kind = f"a {type(answer).__name__}"
    said = f"{answer!r}, {kind}" if isinstance(answer, (str, float)) else kind
    raise Wrong(f"{what}: give a number, not {said}")


def name_mistake(answer: float, mistakes: dict[float, str], near: float, when: str):
    """Say what is wrong with a number, if it is one of those that come of a mistake.

    Args:
        answer: the learner's.
        mistakes: number -> the mistake that leads to it.
        near: the largest relative difference that counts as equal.
        when: said in front.

    Raises:
        Wrong: with the first mistake that fits.
    """
    for wrong, why in mistakes.items():
        if abs(answer - wrong) <= near * abs(wrong):
            raise Wrong(f"{when} {why}")


def __getattr__(name: str) -> Callable:
    """The exercises, by the names of their judges."""
    importlib.import_module("helpers.judges")
    if name in EXERCISES:
        return EXERCISES[name]
    raise AttributeError(f"module 'helpers.check' has no attribute {name!r}")
