"""Answers to the exercises of lesson 20: right ones, and planted wrong ones."""

import math

import torch
import torch.distributed as dist


def by_algebra(ranks, limit, most):
    fewest = (ranks - 1) * (1 - limit) / limit
    if math.ceil(fewest) <= most:
        return ["1F1B", math.ceil(fewest)]
    rounds = math.ceil(fewest / 2 / ranks)
    return ["interleaved", rounds * ranks] if rounds * ranks <= most else "fewer ranks"


def searched(bubble, rounds=True, order=("1F1B", "interleaved"), fewest=True):
    """An answer with another formula, `bubble(ranks, v, m)`, or another order."""

    def schedule_for(ranks, limit, most):
        for name in order:
            v = 1 + (name == "interleaved")
            step = ranks if rounds and v == 2 else 1
            right = [
                m for m in range(step, most + 1, step) if bubble(ranks, v, m) <= limit
            ]
            if right:
                return name, right[0 if fewest else -1]
        return "fewer ranks"

    return schedule_for


def share(ranks, v, m):
    return (ranks - 1) / (v * m + ranks - 1)


def reversed_parts(rank, ranks, parts):
    """Backward may begin with the last micro-batch, as autograd's own order does."""
    forward = [("F", s, m) for s in (rank, rank + ranks) for m in range(parts)]
    return forward + [("B", s, m) for _, s, m in reversed(forward)]


def by_micro_batch(rank, ranks, parts):
    stages = (rank, rank + ranks)
    forward = [("F", s, m) for m in range(parts) for s in stages]
    return forward + [("B", s, m) for m in range(parts) for s in reversed(stages)]


def backward_in_the_order_of_forward(rank, ranks, parts):
    stages = (rank, rank + ranks)
    return [(kind, s, m) for kind in "FB" for s in stages for m in range(parts)]


def neighbours(rank, ranks, parts):
    stages = (2 * rank, 2 * rank + 1)
    forward = [("F", s, m) for s in stages for m in range(parts)]
    return forward + [("B", s, m) for s in reversed(stages) for m in range(parts)]


def one_stage(rank, ranks, parts):
    return [(kind, rank, m) for kind in "FB" for m in range(parts)]


def one_f_one_b(rank, ranks, parts):
    order = []
    for stage in (rank, rank + ranks):
        for m in range(parts):
            order += [("F", stage, m), ("B", stage, m)]
    return order


def pairs(rank, ranks, parts):
    return [(kind, m) for kind in "FB" for m in range(2 * parts)]


def by_messages(weight):
    if weight is None:
        return
    other = dist.get_world_size() - 1 - dist.get_rank()
    box = torch.empty_like(weight.grad)
    if dist.get_rank() == 0:
        dist.send(weight.grad, other)
        dist.recv(box, other)
    else:
        dist.recv(box, other)
        dist.send(weight.grad, other)
    weight.grad += box


def group_of_two_alone(weight):
    last = dist.get_world_size() - 1
    if weight is not None:
        dist.all_reduce(weight.grad, group=dist.new_group([0, last]))


def over_all_ranks(weight):
    gradient = torch.zeros(6, 4) if weight is None else weight.grad
    dist.all_reduce(gradient)


def alone(weight):
    if weight is not None:
        dist.all_reduce(weight.grad)


def in_a_group(change):
    """`change(weight, group)`, in a group of the first and the last rank."""

    def tie(weight):
        group = dist.new_group([0, dist.get_world_size() - 1])
        if weight is not None:
            change(weight, group)

    return tie


def averaged(weight, group):
    dist.all_reduce(weight.grad, group=group)
    weight.grad /= 2


def one_way(weight, group):
    dist.reduce(weight.grad, 0, group=group)


def to_a_copy(weight, group):
    dist.all_reduce(weight.grad.clone(), group=group)


def of_rank_0(weight, group):
    dist.broadcast(weight.grad, 0, group=group)


RIGHT = {
    "schedule_for": [by_algebra, searched(share)],
    "loops": [reversed_parts],
    "tie": [by_messages],
}

WRONG = {
    "schedule_for": [
        (searched(lambda p, v, m: (p - 1) / (v * m)), "12 micro-batches are enough"),
        (searched(lambda p, v, m: p / (v * m + p)), "12 micro-batches are enough"),
        (searched(lambda p, v, m: share(p, 1, m)), "interleaved can do this"),
        (searched(lambda p, v, m: (p - 2) / (v * m + p - 2)), "has a bubble of"),
        (searched(share, rounds=False), "multiple of 8 ranks"),
        (searched(share, order=("1F1B",)), "interleaved can do this"),
        (searched(share, order=("interleaved", "1F1B")), "1F1B is enough"),
        (searched(share, fewest=False), "12 micro-batches are enough"),
        (
            lambda ranks, limit, most: ("1F1B", (ranks - 1) * (1 - limit) / limit),
            "round up",
        ),
        (lambda ranks, limit, most: by_algebra(ranks, limit, 10**6), "more than 48"),
        (lambda ranks, limit, most: most, "return a pair"),
        (lambda ranks, limit, most: ("gpipe", most), "return a pair"),
        (lambda ranks, limit, most: "fewer ranks", "1F1B can do this"),
    ],
    "loops": [
        (by_micro_batch, "some rank waits"),
        (backward_in_the_order_of_forward, "wait for each other for ever"),
        (neighbours, "has no task"),
        (one_stage, "leaves out"),
        (one_f_one_b, "before all its forward tasks"),
        (pairs, "a task is like"),
        (lambda rank, ranks, parts: 3, "return a list"),
    ],
    "tie": [
        (over_all_ranks, "takes part in all_reduce"),
        (group_of_two_alone, "not all ranks have called"),
        (in_a_group(averaged), "no average"),
        (in_a_group(one_way), "the sum of both"),
        (in_a_group(to_a_copy), "in place"),
        (in_a_group(of_rank_0), "the sum of both"),
        (alone, "in 4 ranks"),
    ],
}
