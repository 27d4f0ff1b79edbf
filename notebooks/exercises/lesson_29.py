"""The exercises of lesson 29: a repaired loss, a careful verdict, a test of tests."""

import contextlib

import torch

from exercises.counted import counted, number
from exercises.exercise import NotYet, Wrong, call, exercise, run, solution

# -- 29.1 ------------------------------------------------------------------------------


@exercise(
    "29.1",
    hints=(
        "What does DDP do with the gradients of the ranks, and by which number is the "
        "result smaller than the sum that you want?",
        "Gradients are linear: a loss that is three times as large has gradients that "
        "are three times as large.",
    ),
)
def repaired_sum(function) -> None:
    """Gradients after DDP's average are those of the sum over all ranks."""
    for ranks in (4, 3):
        weight = torch.tensor(1.0, requires_grad=True)
        loss = call(function, 6.0 * weight, ranks)
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            kind = type(loss).__name__
            raise Wrong(
                f"return a tensor on which `backward()` can be called, not a {kind} "
                "without a gradient"
            )
        loss.backward()
        found = number(weight.grad, "the gradient") / 6
        mistakes = {
            1.0: "DDP divides by the number of ranks, and nothing undoes that",
            1 / ranks: "DDP divides already; now it is divided twice",
            4.0: "the number of ranks is not always 4",
        }
        why = f"the gradients are {found / ranks:.4g} times those of one process"
        counted(found, ranks, mistakes, why, what=f"with {ranks} ranks", near=1e-4)


@solution("29.1")
def solution_1():
    """DDP averages: it divides the sum of the ranks' gradients by their number.

    The claim asks for the sum itself. A loss that is `ranks` times as large has
    gradients that are `ranks` times as large, and the division leaves the sum.
    """

    def repaired(loss, ranks):
        return loss * ranks

    return repaired


# -- 29.2 ------------------------------------------------------------------------------

OPEN = "cannot be judged without a card"
_CASES = (
    ({}, "not tested", "there is no case at all"),
    ({"a": True, "b": True}, "true", "all cases hold"),
    ({"a": False, "b": False}, "false", "all cases fail"),
    ({"a": False, "b": True}, "true when b", "one holds and one fails"),
    (
        {"a": True, "b": False, "c": True},
        "true when a, or c",
        'join the cases that hold with ", or ", as `verdict` does',
    ),
    ({"a": None}, f"{OPEN}: a", "a is open, and nothing else was tried"),
    ({"a": True, "b": None}, f"{OPEN}: b", "if b holds it is true, otherwise not"),
    ({"a": None, "b": False}, f"{OPEN}: a", "a may hold, so *false* says too much"),
    (
        {"a": None, "b": True, "c": None},
        f"{OPEN}: a, or c",
        "name all cases that are open",
    ),
    (
        {"a": True, "b": False, "c": None},
        "true when a",
        "a holds and b fails, so the claim needs a condition, whatever c is",
    ),
)


@exercise(
    "29.2",
    hints=(
        "Call `verdict` with each dictionary that the exercise describes, and write "
        "down where its words are not the ones that you want.",
        "Look for an empty dictionary first. Then let `verdict` do the work, and add "
        "the open cases where it says that the claim cannot be judged.",
    ),
)
def careful_judge(careful) -> None:
    """A verdict that knows of no cases, and names the open ones."""
    said = [run(careful, dict(cases), when=f"for {cases}") for cases, *_ in _CASES]
    if all(one is None for one in said):
        raise NotYet("your function returns nothing so far")
    for (cases, right, why), one in zip(_CASES, said, strict=True):
        if one is None:
            raise Wrong(f"for {cases} you return nothing: {why}")
        if not isinstance(one, str) or one != right:
            raise Wrong(f"for {cases} you say {one!r}, not {right!r}: {why}")


@solution("29.2", verdict=lambda: as_in_the_lesson)
def solution_2(verdict):
    """`verdict` finds no case that holds in `{}`, and none that is open: "false".

    So ask for an empty dictionary first. All other words are those of `verdict`. Where
    it cannot judge, the reader wants to know what to run on a card: the open cases.
    """

    def careful(cases):
        if not cases:
            return "not tested"
        said = verdict(cases)
        if said.startswith("cannot"):
            unknown = [name for name, holds in cases.items() if holds is None]
            said += ": " + ", or ".join(unknown)
        return said

    return careful


# -- 29.3 ------------------------------------------------------------------------------


def _mean(grads):
    mean = torch.stack([g.clone() for g in grads]).mean(0)
    return [mean.clone() for _ in grads]


def _in_place(grads):
    mean = torch.stack(grads).mean(0)
    for g in grads:
        g.copy_(mean)
    return grads


def _shared(grads):
    total = grads[-1].clone()
    for g in reversed(grads[:-1]):
        total = total + g
    return [total / len(grads)] * len(grads)


_RIGHT = (
    (_mean, "that is right"),
    (_in_place, "that is right and works in place: keep copies of what you give it"),
    (_shared, "that is right but for the last digit, since it adds in another order"),
)


def _sum_in_place(grads):
    total = sum(grads)
    for g in grads:
        g.copy_(total)
    return grads


def _of_rank_0_in_place(grads):
    for g in grads[1:]:
        g.copy_(grads[0])
    return grads


def _in_ranks(what):
    """Every rank gets `what(grads)`."""
    return lambda grads: [what(torch.stack(grads)).clone() for _ in grads]


def _only_rank_0(grads):
    return [_mean(grads)[0], *(g.clone() for g in grads[1:])]


def _all_but_the_last(grads):
    return [*_mean(grads)[:-1], grads[-1].clone()]


_LIARS = (
    (lambda grads: [g.clone() for g in grads], "averages nothing"),
    (_in_ranks(lambda g: g.sum(0)), "adds up and does not divide"),
    (_sum_in_place, "adds up in place: compare with copies that you made before"),
    (_of_rank_0_in_place, "gives all ranks, in place, the gradient of rank 0"),
    (_in_ranks(lambda g: g[0]), "gives all ranks the gradient of rank 0"),
    (_in_ranks(lambda g: g[:2].mean(0)), "leaves out all ranks but two"),
    (_in_ranks(lambda g: g.sum(0) / 2), "divides by 2, however many ranks there are"),
    (_in_ranks(lambda g: g.sum(0) / 4), "divides by 4, however many ranks there are"),
    (_in_ranks(lambda g: g.abs().mean(0)), "loses the signs"),
    (_in_ranks(lambda g: g.mean(0).round()), "rounds to whole numbers"),
    (_in_ranks(lambda g: g.median(0).values), "takes the median, not the mean"),
    (
        _in_ranks(lambda g: torch.full_like(g[0], g.mean())),
        "gives every place the same number",
    ),
    (_only_rank_0, "averages for rank 0 alone"),
    (_all_but_the_last, "forgets the last rank"),
    (lambda grads: _mean(grads)[:1], "returns one gradient, not one for each rank"),
)


def _yes_or_no(said) -> bool:
    """Python's, NumPy's or PyTorch's."""
    with contextlib.suppress(AttributeError, ValueError, RuntimeError):
        said = said.item()
    if not isinstance(said, bool):
        kind = type(said).__name__
        an = "an" if kind[0] in "aeiou" else "a"
        raise Wrong(f"return True or False, not {an} {kind}")
    return said


def _ask(test, average, what: str) -> bool:
    return _yes_or_no(call(test, average, when=f"given a function that {what},"))


@exercise(
    "29.3",
    hints=(
        "Write a list of the mistakes that you would make in such a function "
        "yourself, such as forgetting to divide. For each of them, with which "
        "gradients and how many ranks would the wrong result equal the right one by "
        "chance?",
        "A function may change the tensors that you give it, so think about when you "
        "compute the mean to compare with. Rounding may differ in the last digit, but "
        "the number of results, every rank's result, signs, fractions and the number "
        "of ranks all matter.",
    ),
)
def finds_the_liars(test) -> None:
    """A test of averaging that passes the right functions and no other."""
    calls = 0

    def noted(grads):
        nonlocal calls
        calls += 1
        return _mean(grads)

    _yes_or_no(call(test, noted))
    if not calls:
        raise Wrong("your test never calls the function")
    for average, why in _RIGHT:
        if not _ask(test, average, "is right"):
            raise Wrong(f"your test refuses a function; {why}")
    passed = [what for average, what in _LIARS if _ask(test, average, what)]
    if len(passed) == len(_LIARS):
        raise Wrong("your test passes every function, right or wrong")
    if passed:
        found = len(_LIARS) - len(passed)
        raise Wrong(
            f"you find {found} of {len(_LIARS)}; your test passes a function that "
            f"{passed[0]}"
        )


@solution("29.3")
def solution_3():
    """A test finds a mistake only with inputs for which the mistake changes the result.

    Random numbers from `torch.randn` have signs and fractions, and differ from rank to
    rank and from place to place. With them a median is not a mean, and neither is the
    gradient of rank 0.

    The number of ranks matters as well. With two of them, a function that divides by 2
    in any case would pass. With three and then five, no fixed divisor is right.

    The mean is computed first, and the function gets clones, because it may work in
    place. `allclose` allows for another order of adding up. The result must have one
    gradient for each rank, and each is compared, the last one too.
    """

    def test(average):
        for ranks in (3, 5):
            grads = [torch.randn(4, 3) for _ in range(ranks)]
            wanted = torch.stack(grads).mean(0)
            found = average([grad.clone() for grad in grads])
            if len(found) != ranks:
                return False
            for one in found:
                if not torch.allclose(one, wanted, atol=1e-6):
                    return False
        return True

    return test


def as_in_the_lesson(cases):
    held = [name for name, holds in cases.items() if holds]
    if held and False in cases.values():
        return "true when " + ", or ".join(held)
    if None in cases.values():
        return OPEN
    return "true" if held else "false"
