"""Judges of the exercises of lesson 19."""

import contextlib

import torch

from helpers.check import NotYet, Wrong, call, exercise

# -- 19.1 ------------------------------------------------------------------------------

_CLAIMS = (
    ("true", "it takes the device from x, and whoever wants another one must say so"),
    (
        "false",
        "only parameters and buffers move; look at the attribute's device afterwards",
    ),
    ("true when", "try an x on cuda:0, and an x that is on cuda:1 already"),
    (
        "false",
        "it waits for the current GPU; give another one work, and ask an event of its "
        "stream whether the work is done",
    ),
    (
        "true when",
        "count with memory_allocated(), once for cross_entropy and once for mse_loss",
    ),
)


_LETTERS = {"t": "true", "f": "false", "w": "true when"}


def _kind(answer) -> str:
    """Which of the three verdicts it is: a word, a letter, or one of the lesson's."""
    said = str(answer).strip(" .…").lower()
    return "true when" if said.startswith("true when ") else _LETTERS.get(said, said)


@exercise("19.1")
def five_claims(*answers) -> None:
    """Five claims of earlier lessons: true, false or true when."""
    if len(answers) == 1 and isinstance(answers[0], (list, tuple)):
        raise Wrong("write five_claims(*answers), with a star")
    if len(answers) != len(_CLAIMS):
        raise Wrong(f"five verdicts are asked for, not {len(answers)}")
    for number, (answer, (right, hint)) in enumerate(
        zip(answers, _CLAIMS, strict=True), 1
    ):
        said = _kind(answer)
        if said not in _LETTERS.values():
            raise Wrong(f'number {number}: say "true", "false" or "true when"')
        if said != right:
            raise Wrong(f"number {number} is not {said}: {hint}")


# -- 19.2 ------------------------------------------------------------------------------

_CASES = (
    ({}, "not tested", "without any case nothing was tested"),
    ({"a": None}, "not tested", "a case that could not be run is no test"),
    ({"a": True, "b": True}, "true", "all were run and held"),
    ({"a": False, "b": False}, "false", "none held"),
    ({"a": False, "b": True}, "true when b", "one held"),
    (
        {"a": True, "b": False, "c": True},
        "true when a, or c",
        'join the cases that held with ", or ", as `verdict` does',
    ),
    ({"a": True, "b": None}, "true when a", "b was not run, so nobody knows of b"),
    ({"a": False, "b": None}, "false", "no case held, and one was run"),
    ({"a": None, "b": True, "c": False}, "true when b", "only b held"),
)


@exercise("19.2")
def careful_judge(careful) -> None:
    """A verdict that knows of no cases, and of cases that could not be run."""
    for cases, right, why in _CASES:
        try:
            said = call(careful, dict(cases), when=f"for {cases}")
        except NotYet:
            if all(careful(dict(others)) is None for others, *_ in _CASES):
                raise
            raise Wrong(f"for {cases} you return nothing: {why}") from None
        if said != right:
            raise Wrong(f"for {cases} you say {said!r}, not {right!r}: {why}")


# -- 19.3 ------------------------------------------------------------------------------


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


@exercise("19.3")
def finds_the_liars(test) -> None:
    """A test of averaging that passes the right functions and no other."""
    calls = 0

    def counted(grads):
        nonlocal calls
        calls += 1
        return _mean(grads)

    _yes_or_no(call(test, counted))
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
