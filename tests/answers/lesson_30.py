"""Answers to the exercises of lesson 30: right ones, and planted wrong ones."""

import numpy as np
import torch

# -- 30.1 ------------------------------------------------------------------------------


def by_share(kind, rank, counts):
    weight = counts[rank] / sum(counts) if kind == "mean" else 1
    return torch.tensor(weight * len(counts))


def shared_needs_nothing(kind, rank, counts):
    return 1 if kind == "shared" else by_share(kind, rank, counts)


def of_the_inverse_share(kind, rank, counts):
    if kind == "mean":
        return sum(counts) / counts[rank] / len(counts)
    return len(counts)


# -- 30.2 ------------------------------------------------------------------------------


def diagnosed(machine, alike=0.85, low=0.45, gbits=8, step=1.8):
    slow, fast = min(machine["bfloat16"]), max(machine["bfloat16"])
    if slow / fast < alike:
        return "One GPU"
    if fast / machine["datasheet"] < low:
        return "all GPUs"
    if machine["nvlink"] and machine["pairs"] / machine["nvlink"] < low:
        return "links"
    if gbits * machine["nodes"] / machine["promised"] < low:
        return "network"
    return "plan" if machine["step"] > step else "nothing"


def blind_to_ranks(machine):
    return diagnosed(machine | {"bfloat16": [max(machine["bfloat16"])]})


# -- 30.3 ------------------------------------------------------------------------------


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


def as_a_tensor(average):
    grads = [torch.tensor([0.5, -7.0, 2.0 * i**2]) for i in range(3)]
    found = average([g.clone() for g in grads])
    near = (torch.stack(list(found)) - torch.stack(grads).mean(0)).abs() < 1e-5
    return torch.tensor(len(found) == 3) and near.all()


def one_by_one(average):
    one, two, three = average([torch.ones(2)] * 3)
    return bool((one == two).all())


RIGHT = {
    "repaired": [by_share],
    "suspected": [diagnosed],
    "finds_the_liars": [
        by_hand,
        as_a_tensor,
        lambda average: np.bool_(mutation_test(average)),
    ],
}

WRONG = {
    "repaired": [
        (lambda *_: 1, "DDP divides by the ranks"),
        (lambda kind, rank, counts: len(counts), "is 4 times that of one GPU"),
        (
            lambda kind, rank, counts: by_share("mean", rank, counts),
            "kind 'sum', samples [3, 3, 3, 3]: the gradient is too small",
        ),
        (
            lambda kind, rank, counts: 1 if kind == "mean" else len(counts),
            "kind 'mean', samples [5, 2, 1]: the gradient points",
        ),
        (shared_needs_nothing, "kind 'shared'"),
        (
            lambda kind, rank, counts: by_share(kind, rank, counts) / len(counts),
            "is too small",
        ),
        (of_the_inverse_share, "points elsewhere"),
        (lambda *_: "4", "give a number, not '4'"),
    ],
    "suspected": [
        (
            lambda machine: "plan" if machine["step"] > 2 else diagnosed(machine),
            "not 'plan': they are alike",
        ),
        (
            lambda machine: diagnosed(machine, gbits=1),
            "not 'network': all is as in the lesson",
        ),
        (
            lambda machine: diagnosed(machine, step=1.1),
            "not 'plan': all is as in the lesson",
        ),
        (lambda machine: diagnosed(machine, alike=0.97), "GPUs of a kind vary"),
        (lambda machine: diagnosed(machine, low=0.6), "the matmuls reach 54 %"),
        (
            lambda machine: diagnosed(
                machine | {"datasheet": max(machine["bfloat16"])}
            ),
            "36 % of the datasheet",
        ),
        (
            lambda machine: "links" if machine["pairs"] < 60 else diagnosed(machine),
            "a pair shares what the host moves",
        ),
        (blind_to_ranks, "31 % slower"),
        (lambda machine: "rank 3", "return one of one GPU"),
        (lambda machine: machine["matmul"], "KeyError"),
        (lambda machine: "nothing", "all ranks wait for it"),
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
        (lambda average: True, "never calls"),
        (lambda average: len(average([torch.ones(2), torch.zeros(2)])), "not an int"),
        (one_by_one, "your code raised ValueError"),
    ],
}
