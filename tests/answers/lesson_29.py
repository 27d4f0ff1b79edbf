"""Answers to the exercises of lesson 29: right ones, and planted wrong ones."""

import numpy as np
import torch

from exercises.lesson_29 import OPEN, as_in_the_lesson


def careful(cases):
    said = as_in_the_lesson(cases) if cases else "not tested"
    if said == OPEN:
        said += ": " + ", or ".join(case for case in cases if cases[case] is None)
    return said


def forgets_none(cases):
    return as_in_the_lesson(cases) if cases else "not tested"


def open_is_not_tested(cases):
    return "not tested" if None in cases.values() else careful(cases)


def drops_what_is_open(cases):
    return careful({case: holds for case, holds in cases.items() if holds is not None})


def open_comes_first(cases):
    unknown = [case for case in cases if cases[case] is None]
    return f"{OPEN}: {', or '.join(unknown)}" if unknown else careful(cases)


def forgets_a_branch(cases):
    if cases:
        return careful(cases)


def with_commas(cases):
    return careful(cases).replace(", or ", ", ")


# -- 29.3 ------------------------------------------------------------------------------


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


def compared(grads, near=torch.allclose):
    """Compares what every rank gets with the mean of these gradients."""

    def test(average):
        wanted = torch.stack(grads).mean(0)
        found = average([g.clone() for g in grads])
        return len(found) == len(grads) and all(near(f, wanted) for f in found)

    return test


def same_everywhere(average):
    return all(torch.equal(f, torch.ones(3)) for f in average([torch.ones(3)] * 3))


def only_equal(average):
    found = average([torch.randn(3) for _ in range(3)])
    return all(torch.equal(found[0], f) for f in found)


def only_rank_0(average):
    grads = [torch.randn(3) for _ in range(3)]
    wanted = torch.stack(grads).mean(0)
    return torch.allclose(average([g.clone() for g in grads])[0], wanted, atol=1e-6)


many_numbers = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
to_the_last_bit = compared([*many_numbers], near=torch.equal)
with_two_ranks = compared([torch.tensor([0.5, -7.0]), torch.tensor([1.0, 2.0])])
positive_and_whole = compared([*torch.tensor([[1.0, 5.0], [4.0, 1.0], [1.0, 3.0]])])


def says(answer):
    def test(average):
        average([torch.ones(2), torch.zeros(2)])
        return answer

    return test


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
    "repaired_sum": [lambda loss, ranks: sum([loss] * ranks)],
    "careful_judge": [careful],
    "finds_the_liars": [by_hand, as_a_tensor, as_numpy],
}

WRONG = {
    "repaired_sum": [
        (lambda loss, ranks: loss, "nothing undoes that"),
        (lambda loss, ranks: loss / ranks, "divided twice"),
        (lambda loss, ranks: 4 * loss, "not always 4"),
        (lambda loss, ranks: loss * ranks**2, "4 times those of one process"),
        (lambda loss, ranks: loss.item() * ranks, "not a float"),
        (lambda loss, ranks: loss.detach() * ranks, "without a gradient"),
    ],
    "careful_judge": [
        (as_in_the_lesson, "no case at all"),
        (forgets_none, "nothing else was tried"),
        (open_is_not_tested, "nothing else was tried"),
        (drops_what_is_open, "nothing else was tried"),
        (open_comes_first, "whatever c is"),
        (forgets_a_branch, "for {} you return nothing"),
        (with_commas, "join the cases"),
        (lambda cases: "true", "no case at all"),
    ],
    "finds_the_liars": [
        (compares_afterwards, "copies that you made before"),
        (to_the_last_bit, "adds in another order"),
        (with_two_ranks, "leaves out all ranks but two"),
        (same_everywhere, "passes a function that"),
        (only_equal, "adds up and does not divide"),
        (only_rank_0, "averages for rank 0 alone"),
        (positive_and_whole, "loses the signs"),
        (says(True), "passes every function"),
        (says(False), "refuses a function"),
        (never_asks, "never calls"),
        (as_a_number, "not an int"),
        (one_by_one, "your code raised ValueError"),
    ],
}
