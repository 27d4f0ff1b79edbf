"""The exercises of lesson 29: five claims, a careful verdict, and a test of tests."""

import contextlib

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from helpers import need_gpus
from helpers.exercises.counted import listed
from helpers.exercises.exercise import NotYet, Wrong, call, exercise, run, solution

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


def _kind(answer) -> str | None:
    """Which of the three verdicts it is: a word, a letter, or one of the lesson's."""
    said = str(answer).strip(" .…").lower()
    kind = "true when" if said.startswith("true when ") else _LETTERS.get(said, said)
    return kind if kind in _LETTERS.values() else None


@exercise(
    "29.1",
    hints=(
        "Take the first claim's cell as a pattern: a dictionary of cases, and one "
        "line that says whether the claim holds in a case. Which cases has the author "
        "of each claim not thought of?",
        "Vary the device on which `x` already is, the GPU that has work to do, and "
        "the loss function. For claim 4 record an event behind the work, and ask it "
        "after `synchronize()`; for claim 5 compare `memory_allocated()`.",
    ),
)
def five_claims(*answers) -> None:
    """Five claims of earlier lessons: true, false or true when."""
    if len(answers) == 1 and isinstance(answers[0], (list, tuple)):
        raise Wrong("write five_claims(*answers), with a star")
    say = 'say "true", "false" or "true when"'
    listed(answers, _CLAIMS, what="verdicts", read=_kind, say=say)


@solution("29.1", verdict=lambda: as_in_the_lesson)
def solution_1(verdict):
    """Each claim gets cases that its author did not mention, and `verdict` judges them.

    2: `module.to()` goes through parameters and buffers. A plain attribute is neither,
    so it stays where it was, on whichever device that is. (`register_buffer` makes it
    move.)

    3: `x.to()` copies only if it has something to change. An `x` that is on cuda:1
    already is returned as it is, so a change to the result changes `x`.

    4: `synchronize()` without an argument waits for the current GPU, here cuda:0. The
    work of the others goes on. An event that is recorded behind the work says so.

    5: `detach()` keeps the storage of the loss. With `cross_entropy` the storage has
    one number, and the smallest allocation is 512 bytes. `mse_loss` makes its result as
    large as its input first, and the mean stays in this storage.
    """
    need_gpus(4)

    class WithTensor(nn.Module):
        def __init__(self, device):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, device=device))
            self.plain = torch.ones(2, device=device)

    def moves_attribute(device):
        module = WithTensor(device).to("cuda:1")
        return module.plain.device == torch.device("cuda:1")

    def makes_a_copy(device):
        x = torch.ones(2, device=device)
        return x.to("cuda:1").data_ptr() != x.data_ptr()

    def waits_for(gpu):
        x = torch.zeros(2**24, device=gpu)
        done = torch.cuda.Event()
        for _ in range(20):
            x.add_(1)
        done.record(torch.cuda.current_stream(gpu))
        torch.cuda.synchronize()
        return done.query()

    def kept_is_small(loss_function, targets):
        scores = torch.rand(1000, 10, device="cuda:0", requires_grad=True)
        scores.grad = torch.zeros_like(scores)
        before = torch.cuda.memory_allocated("cuda:0")
        loss = loss_function(scores, targets)
        loss.backward()
        loss = loss.detach()
        return torch.cuda.memory_allocated("cuda:0") - before <= 512

    moved = {}
    for device in ("cpu", "cuda:0"):
        moved[f"it is on {device}"] = moves_attribute(device)

    copied = {}
    for device in ("cpu", "cuda:0", "cuda:1"):
        copied[f"x is on {device}"] = makes_a_copy(device)

    waited = {}
    for gpu in ("cuda:1", "cuda:2", "cuda:3"):
        waited[f"{gpu} has work"] = waits_for(gpu)

    kept = {}
    words = torch.zeros(1000, dtype=torch.int64, device="cuda:0")
    kept["cross_entropy"] = kept_is_small(cross_entropy, words)
    numbers = torch.zeros(1000, 10, device="cuda:0")
    kept["mse_loss"] = kept_is_small(nn.functional.mse_loss, numbers)

    answers = ["true"]
    for cases in (moved, copied, waited, kept):
        found = verdict(cases)
        print(found)
        answers.append(found)
    return (*answers,)


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


@exercise(
    "29.2",
    hints=(
        "Go through the sentences of the exercise one by one, and write down what "
        "`verdict` says in each of these cases. For which dictionaries does it say "
        "something else than it should?",
        "A value of `None` forbids the verdict *true*, and it is no reason for the "
        "verdict *false*. Test your function also with an empty dictionary, with "
        "nothing but `None`, and with one `True` beside a `None`.",
    ),
)
def careful_judge(careful) -> None:
    """A verdict that knows of no cases, and of cases that could not be run."""
    said = [run(careful, dict(cases), when=f"for {cases}") for cases, *_ in _CASES]
    if all(one is None for one in said):
        raise NotYet("your function returns nothing so far")
    for (cases, right, why), one in zip(_CASES, said, strict=True):
        if one is None:
            raise Wrong(f"for {cases} you return nothing: {why}")
        if not isinstance(one, str) or one != right:
            raise Wrong(f"for {cases} you say {one!r}, not {right!r}: {why}")


@solution("29.2")
def solution_2():
    """A verdict needs at least one case that was run, and "true" needs all of them.

    First look whether anything was run. `{}` and a dictionary of nothing but `None` are
    alike in this: nobody has tried the claim. `all` of no values is True, and here that
    is what we want.

    For "true" the number of cases that held is compared with the number of all cases. A
    case that was not run has not held, so it prevents "true". What is left is the
    verdict of the lesson: `None` counts as little as `False` when cases that held are
    named.
    """

    def careful(cases):
        if all(held is None for held in cases.values()):
            return "not tested"
        holds = [case for case, held in cases.items() if held]
        if len(holds) == len(cases):
            return "true"
        if holds:
            return f"true when {', or '.join(holds)}"
        return "false"

    return careful


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


# -- answers ---------------------------------------------------------------------------

RIGHT_CLAIMS = ("true", "false", "true when", "false", "true when")


def claims(place, answer):
    """The right answers, but for one."""
    return (*RIGHT_CLAIMS[: place - 1], answer, *RIGHT_CLAIMS[place:])


# -- 19.2 ------------------------------------------------------------------------------


def careful(cases):
    if all(held is None for held in cases.values()):
        return "not tested"
    holds = [case for case, held in cases.items() if held]
    if len(holds) == len(cases):
        return "true"
    return f"true when {', or '.join(holds)}" if holds else "false"


def by_counting(cases):
    run = {case: held for case, held in cases.items() if held is not None}
    if not run:
        return "not tested"
    if all(run.values()) and len(run) == len(cases):
        return "true"
    names = ", or ".join(case for case in run if run[case])
    return "true when " + names if names else "false"


def as_in_the_lesson(cases):
    holds = [case for case, held in cases.items() if held]
    if len(holds) == len(cases):
        return "true"
    return f"true when {', or '.join(holds)}" if holds else "false"


def forgets_none(cases):
    return as_in_the_lesson(cases) if cases else "not tested"


def drops_what_was_not_run(cases):
    run = {case: held for case, held in cases.items() if held is not None}
    return as_in_the_lesson(run) if run else "not tested"


def one_missing_is_enough(cases):
    if not cases or None in cases.values():
        return "not tested"
    return as_in_the_lesson(cases)


def forgets_a_branch(cases):
    if cases:
        return careful(cases)


def with_commas(cases):
    return careful(cases).replace(", or ", ", ")


# -- 19.3 ------------------------------------------------------------------------------


def mutation_test(average):
    generator = torch.Generator().manual_seed(0)
    for ranks in (3, 5):
        grads = [torch.randn(4, 3, generator=generator) for _ in range(ranks)]
        wanted = torch.stack(grads).mean(0)
        found = average([g.clone() for g in grads])
        if len(found) != ranks:
            return False
        if not all(torch.allclose(f, wanted, atol=1e-6) for f in found):
            return False
    return True


def by_hand(average):
    grads = [[0.5, -7.0], [1.5, 2.0], [-1.0, 0.25]]
    wanted = torch.tensor([1 / 3, -19 / 12])
    found = average([torch.tensor(g) for g in grads])
    return len(found) == 3 and all((f - wanted).abs().max() < 1e-4 for f in found)


def compares_afterwards(average):
    grads = [torch.randn(4, 3) for _ in range(3)]
    found = average(grads)
    wanted = torch.stack(grads).mean(0)
    return len(found) == 3 and all(torch.allclose(f, wanted, atol=1e-6) for f in found)


def to_the_last_bit(average):
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(100, generator=generator) for _ in range(3)]
    wanted = torch.stack(grads).mean(0)
    found = average([g.clone() for g in grads])
    return len(found) == 3 and all(torch.equal(f, wanted) for f in found)


def with_two_ranks(average):
    grads = [torch.tensor([0.5, -7.0]), torch.tensor([1.0, 2.0])]
    wanted = torch.stack(grads).mean(0)
    found = average([g.clone() for g in grads])
    return len(found) == 2 and all(torch.allclose(f, wanted) for f in found)


def same_everywhere(average):
    return all(torch.equal(f, torch.ones(3)) for f in average([torch.ones(3)] * 3))


def only_equal(average):
    found = average([torch.randn(3) for _ in range(3)])
    return all(torch.equal(found[0], f) for f in found)


def only_rank_0(average):
    grads = [torch.randn(3) for _ in range(3)]
    wanted = torch.stack(grads).mean(0)
    return torch.allclose(average([g.clone() for g in grads])[0], wanted, atol=1e-6)


def positive_and_whole(average):
    grads = [
        torch.tensor([1.0, 5.0]),
        torch.tensor([4.0, 1.0]),
        torch.tensor([1.0, 3.0]),
    ]
    wanted = torch.tensor([2.0, 3.0])
    found = average([g.clone() for g in grads])
    return len(found) == 3 and all(torch.allclose(f, wanted) for f in found)


def says_yes(average):
    average([torch.ones(2), torch.zeros(2)])
    return True


def says_no(average):
    average([torch.ones(2), torch.zeros(2)])
    return False


def never_asks(average):
    return True


def as_a_number(average):
    return len(average([torch.ones(2), torch.zeros(2)]))


def as_a_tensor(average):
    grads = [torch.tensor([0.5, -7.0, 2.0 * i**2]) for i in range(3)]
    found = average([g.clone() for g in grads])
    near = (torch.stack(list(found)) - torch.stack(grads).mean(0)).abs() < 1e-5
    return torch.tensor(len(found) == 3) and near.all()


def as_numpy(average):
    return np.bool_(mutation_test(average))


def one_by_one(average):
    one, two, three = average([torch.ones(2)] * 3)
    return bool((one == two).all())


RIGHT = {
    "five_claims": [
        RIGHT_CLAIMS,
        ("True", "False", "true when …", "FALSE", "true when"),
        ("t", "f", "w", "f", "W"),
        claims(3, "true when x is on cuda:0, or on the CPU"),
    ],
    "careful_judge": [by_counting],
    "finds_the_liars": [
        by_hand,
        as_a_tensor,
        as_numpy,
    ],
}

WRONG = {
    "five_claims": [
        (claims(1, "true when"), "takes the device from x"),
        (claims(2, "true"), "only parameters and buffers"),
        (claims(3, "true"), "on cuda:1 already"),
        (claims(4, "true when"), "waits for the current GPU"),
        (claims(5, "true"), "mse_loss"),
        (claims(5, "false"), "cross_entropy"),
        (claims(2, "perhaps"), 'number 2: say "true"'),
        (claims(2, "true when it moves"), "only parameters and buffers"),
        (RIGHT_CLAIMS[:4], "not 4"),
        (([*RIGHT_CLAIMS],), "with a star"),
    ],
    "careful_judge": [
        (as_in_the_lesson, "nothing was tested"),
        (forgets_none, "is no test"),
        (drops_what_was_not_run, "nobody knows of b"),
        (one_missing_is_enough, "nobody knows of b"),
        (forgets_a_branch, "for {} you return nothing"),
        (with_commas, "join the cases"),
        (lambda cases: "true", "nothing was tested"),
    ],
    "finds_the_liars": [
        (compares_afterwards, "copies that you made before"),
        (to_the_last_bit, "adds in another order"),
        (with_two_ranks, "leaves out all ranks but two"),
        (same_everywhere, "passes a function that"),
        (only_equal, "adds up and does not divide"),
        (only_rank_0, "averages for rank 0 alone"),
        (positive_and_whole, "loses the signs"),
        (says_yes, "passes every function"),
        (says_no, "refuses a function"),
        (never_asks, "never calls"),
        (as_a_number, "not an int"),
        (one_by_one, "your code raised ValueError"),
    ],
}
