"""Oracles, and exercises that check themselves.

An oracle compares two results that must agree and prints one line on how well they
do. An exercise is a function of the learner's answers that says not yet, wrong and
why, or right: `check.copied_bytes(answer)`. `check.hint("00.1")` helps, and
`check.solution("00.1")` shows a worked solution after a try. The exercises of each
lesson have a file in `notebooks/exercises`.
"""

import torch

import simgpu
from helpers import beside

exercise = beside.load("exercises.exercise")

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

    Taught in 01-choose-a-device.
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
    how = how or ("counted" if simgpu.is_running() else "measured")
    print(f"predicted {a} {unit}, {how} {b} {unit}: error {error:.1%}")


# -- exercises -------------------------------------------------------------------------


def hint(number: str) -> exercise.Shown:
    """The next hint for an exercise: one at a time.

    Args:
        number: of the exercise, such as "13.2".

    Raises:
        TypeError: if the number is not a text.
        ValueError: if there is no such exercise; the message says which there are.
    """
    return exercise.load(number).hint()


def solution(number: str) -> exercise.Shown:
    """A worked solution of an exercise, once there has been a try in this kernel.

    Args and errors as of `hint`.
    """
    asked = exercise.load(number)
    if not asked.tried:
        return exercise.Shown(
            f"exercise {number}: try it first; when check.{asked.name} has called an "
            "answer right or wrong, you may look"
        )
    return exercise.load_solution(number).shown(asked.name)


def __getattr__(name: str) -> exercise.Exercise:
    """The exercises, by the names of their checks."""
    if name in exercise.index():
        return exercise.load(exercise.index()[name])
    raise AttributeError(f"module 'helpers.check' has no attribute {name!r}")
