"""Answers to the exercises of lesson 19."""

import numpy as np
import torch

RIGHT_CLAIMS = ["true", "false", "true when", "false", "true when"]


def claims(number, answer):
    """The right answers, but for one."""
    return [*RIGHT_CLAIMS[: number - 1], answer, *RIGHT_CLAIMS[number:]]


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
        lambda: RIGHT_CLAIMS,
        lambda: ["True", "False", "true when …", "FALSE", "true when"],
        lambda: ["t", "f", "w", "f", "W"],
        lambda: claims(3, "true when x is on cuda:0, or on the CPU"),
    ],
    "careful_judge": [lambda: (careful,), lambda: (by_counting,)],
    "finds_the_liars": [
        lambda: (mutation_test,),
        lambda: (by_hand,),
        lambda: (as_a_tensor,),
        lambda: (as_numpy,),
    ],
}

WRONG = {
    "five_claims": [
        (lambda: claims(1, "true when"), "takes the device from x"),
        (lambda: claims(2, "true"), "only parameters and buffers"),
        (lambda: claims(3, "true"), "on cuda:1 already"),
        (lambda: claims(4, "true when"), "waits for the current GPU"),
        (lambda: claims(5, "true"), "mse_loss"),
        (lambda: claims(5, "false"), "cross_entropy"),
        (lambda: claims(2, "perhaps"), 'number 2: say "true"'),
        (lambda: claims(2, "true when it moves"), "only parameters and buffers"),
        (lambda: RIGHT_CLAIMS[:4], "not 4"),
        (lambda: [RIGHT_CLAIMS], "with a star"),
    ],
    "careful_judge": [
        (lambda: (as_in_the_lesson,), "nothing was tested"),
        (lambda: (forgets_none,), "is no test"),
        (lambda: (drops_what_was_not_run,), "nobody knows of b"),
        (lambda: (one_missing_is_enough,), "nobody knows of b"),
        (lambda: (forgets_a_branch,), "for {} you return nothing"),
        (lambda: (with_commas,), "join the cases"),
        (lambda: (lambda cases: "true",), "nothing was tested"),
    ],
    "finds_the_liars": [
        (lambda: (compares_afterwards,), "copies that you made before"),
        (lambda: (to_the_last_bit,), "adds in another order"),
        (lambda: (with_two_ranks,), "leaves out all ranks but two"),
        (lambda: (same_everywhere,), "passes a function that"),
        (lambda: (only_equal,), "adds up and does not divide"),
        (lambda: (only_rank_0,), "averages for rank 0 alone"),
        (lambda: (positive_and_whole,), "loses the signs"),
        (lambda: (says_yes,), "passes every function"),
        (lambda: (says_no,), "refuses a function"),
        (lambda: (never_asks,), "never calls"),
        (lambda: (as_a_number,), "not an int"),
        (lambda: (one_by_one,), "your code raised ValueError"),
    ],
}
