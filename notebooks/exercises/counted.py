"""Checks of numbers that the learner has counted, and of lists of words.

A number that comes of a known mistake is named as such: the reasons of an exercise are
a dictionary, number -> mistake. Bytes in another unit are recognized by themselves.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from numbers import Real

from exercises.exercise import Wrong

KB, MB, GB = 10**3, 10**6, 10**9
KIB, MIB, GIB = 2**10, 2**20, 2**30
_UNITS = {
    1: "bytes", KB: "kB, of 10**3 bytes", MB: "MB, of 10**6 bytes",
    GB: "GB, of 10**9 bytes", KIB: "KiB, of 2**10 bytes", MIB: "MiB, of 2**20 bytes",
    GIB: "GiB, of 2**30 bytes", 1 / 8: "bits",
}  # fmt: skip


def number(answer, what: str = "") -> Real:
    """The learner's number: Python's, NumPy's or PyTorch's.

    Args:
        answer: the learner's.
        what: it is, for the error.

    Raises:
        Wrong: for anything else, and for what is not finite.
    """
    found = answer
    if hasattr(answer, "item"):
        with contextlib.suppress(Exception):  # more than one, or not a tensor at all
            found = answer.item()
    if isinstance(found, Real) and not isinstance(found, bool):
        with contextlib.suppress(OverflowError):  # of an int beyond all floats
            if math.isfinite(found):
                return found
    kind = f"a {type(answer).__name__}"
    said = f"{answer!r}, {kind}" if isinstance(answer, (str, float)) else kind
    raise Wrong(f"{what + ': ' if what else ''}give a number, not {said}")


def counted(
    answer,
    right: float,
    mistakes: dict[float, str],
    otherwise: str,
    *,
    what: str = "",
    near: float = 1e-9,
    unit: float | None = None,
) -> None:
    """The answer must be the right number.

    Args:
        answer: the learner's.
        right: what it must be.
        mistakes: number -> the mistake that leads to it; the first that fits is told.
        otherwise: the reason if none fits.
        what: the answer is, said in front of every reason.
        near: the largest relative difference that counts as equal.
        unit: bytes of the unit that it is asked for in, such as `MIB`.

    Raises:
        Wrong: if it is another number.
    """
    found = number(answer, what)
    if not is_near(found, right, near):
        when = f"{what}: " if what else ""
        name_mistake(found, mistakes, near, when)
        for size, name in _UNITS.items() if unit else ():
            if size != unit and is_near(found * size, right * unit, near):
                raise Wrong(f"{when}these are {name}; give {_UNITS[unit]}")
        raise Wrong(f"{when}{otherwise}")


def is_near(found: float, wanted: float, near: float) -> bool:
    """Whether they differ by at most `near` of what is wanted."""
    return abs(found - wanted) <= near * abs(wanted)


def name_mistake(
    found: float, mistakes: dict[float, str], near: float = 1e-9, when: str = ""
) -> None:
    """Say what is wrong with a number, if it is one of those that come of a mistake.

    Raises:
        Wrong: with the first mistake that fits, and `when` in front.
    """
    for wrong, why in mistakes.items():
        if is_near(found, wrong, near):
            raise Wrong(f"{when}{why}")


def listed(
    answers: Sequence,
    expected: Sequence[tuple[str, str | Callable[[str], str]]],
    *,
    what: str,
    read: Callable[[object], str | None],
    say: str,
) -> None:
    """Each word in a list must be the right one.

    Args:
        answers: the learner's.
        expected: for each the right word, and what is said of a wrong one: a text, or
            a function of the wrong word.
        what: they are, in the plural.
        read: makes an answer into a word; None if it is not one of those asked for.
        say: what to write instead.

    Raises:
        Wrong: for the first that is wrong.
    """
    if len(answers) != len(expected):
        raise Wrong(f"{len(expected)} {what} are asked for, not {len(answers)}")
    for place, answer in enumerate(answers, 1):
        right, why = expected[place - 1]
        said = read(answer)
        if said is None:
            raise Wrong(f"number {place}: {say}")
        if said != right:
            because = why if isinstance(why, str) else why(said)
            raise Wrong(f"number {place} is not {said}: {because}")


def word(answer) -> str:
    """An answer as a word in small letters, without spaces around it."""
    return str(answer).strip().lower()
