"""The exercises of lesson 20: a schedule for a job, an order, and a shared weight.

The last one runs the learner's answer in four real ranks, which end the ranks that were
open before.
"""

import torch
import torch.distributed as dist
from torch import nn

from exercises.counted import number
from exercises.exercise import (
    NotYet,
    Wrong,
    call,
    exercise,
    must_be_callable,
    run,
    solution,
)
from exercises.in_ranks import device, in_ranks
from exercises.results import near, sequence

FOUR = 4  # ranks
FEWER = "fewer ranks"  # what 20.1 returns where no schedule will do
SECONDS = 20  # before ranks that hang are given up


@exercise(
    "20.1",
    hints=(
        "With the formula under *The bubble, predicted and counted*, try 1, 2, 3, … "
        "micro-batches. With interleaved stages, which numbers do you try?",
        "Two loops, one after the other: `for m in range(1, most + 1)` with v = 1, and "
        "`for m in range(ranks, most + 1, ranks)` with v = 2. The first m whose bubble "
        "is small enough is the answer.",
    ),
)
def schedule_for(function) -> None:
    """The plainest schedule that keeps the bubble small, and its micro-batches."""
    must_be_callable(function)
    for ranks, limit, most, right in (
        (4, 0.21, 64, ("1F1B", 12)),
        (4, 0.21, 12, ("1F1B", 12)),
        (8, 0.11, 48, ("interleaved", 32)),
        (8, 0.11, 32, ("interleaved", 32)),
        (8, 0.11, 31, FEWER),
        (16, 0.05, 64, FEWER),
    ):
        case = f"{ranks} ranks, a bubble of at most {limit:.0%}, m up to {most}"
        found = call(function, ranks, limit, most)
        if found == right == FEWER:
            continue
        if found == FEWER:
            raise Wrong(f"{case}: {right[0]} can do this")
        if not isinstance(found, str):
            found = sequence(found, f'return a pair like ("1F1B", 8), or "{FEWER}"')
        if len(found) != 2 or found[0] not in ("1F1B", "interleaved"):
            raise Wrong(f'return a pair like ("1F1B", 8), or "{FEWER}", not {found!r}')
        name, m = found[0], number(found[1], "micro-batches")
        v = 1 if name == "1F1B" else 2
        _must_be_possible(case, name, m, ranks, most)
        bubble = (ranks - 1) / (v * m + ranks - 1)
        if bubble > limit:
            raise Wrong(f"{case}: {name} with {m} has a bubble of {bubble:.1%}")
        if name != right[0]:
            raise Wrong(f"{case}: 1F1B is enough, and sends half as many bytes")
        if m != right[1]:
            raise Wrong(f"{case}: {right[1]} micro-batches are enough, not {m}")


def _must_be_possible(case: str, name: str, m, ranks: int, most: int) -> None:
    """Whole micro-batches, no more than there may be, in rounds if interleaved."""
    if m != int(m):
        raise Wrong(f"{case}: {m} is no number of micro-batches; round up")
    if m > most:
        raise Wrong(f"{case}: {m} are more than {most}")
    if name == "interleaved" and m % ranks:
        raise Wrong(f"{case}: {m} is not a multiple of {ranks} ranks")


@solution("20.1")
def solution_1():
    """More micro-batches make the bubble smaller, so the first that fits is the fewest.

    Interleaving comes second, since it sends twice as many bytes and holds more. If it
    is not enough, either: take fewer ranks, or a larger batch.
    """

    def schedule_for(ranks, limit, most):
        for name, v, step in (("1F1B", 1, 1), ("interleaved", 2, ranks)):
            for m in range(step, most + 1, step):
                bubble = (ranks - 1) / (v * m + ranks - 1)
                if bubble <= limit:
                    return name, m
        return "fewer ranks"

    return schedule_for


# -- 20.2: an order --------------------------------------------------------------------


@exercise(
    "20.2",
    hints=(
        "Which tasks can rank 0 do before anything has come back from the last rank? "
        "Let it do all of these first. In backward, which stage gets its gradient "
        "first, the rank's first or its second one?",
        "Write two loops, one inside the other. The outer one goes over the rank's "
        "stages, the inner one over the micro-batches. In backward, the outer loop "
        "goes the other way.",
    ),
)
def loops(function) -> None:
    """All forward, then all backward, two stages a rank; timed without messages."""
    must_be_callable(function)
    for ranks, parts in ((4, 8), (2, 2), (3, 7)):
        orders = [_order(function, r, ranks, parts) for r in range(ranks)]
        idle = _idle(orders, ranks)
        right = (ranks - 1) / (2 * parts + ranks - 1)
        if idle > right + 1e-6:
            raise Wrong(
                f"with {ranks} ranks and {parts} micro-batches, the bubble is "
                f"{idle:.1%}, not {right:.1%}: some rank waits although it has "
                "other tasks to do"
            )


def _order(function, rank: int, ranks: int, parts: int) -> list[tuple[str, int, int]]:
    """The learner's order of a rank, if it has every task once, forward first."""
    answer = call(function, rank, ranks, parts)
    found = sequence(answer, "return a list of (kind, stage, micro-batch)")
    stages = (rank, rank + ranks)
    tasks = {(k, s, m) for k in "FB" for s in stages for m in range(parts)}
    for task in found:
        if not isinstance(task, (tuple, list)) or len(task) != 3:
            raise Wrong(f'a task is like ("F", 0, 3), not {task!r}')
        if tuple(task) not in tasks:
            raise Wrong(f"rank {rank} of {ranks} has no task {tuple(task)!r}")
    found = [tuple(task) for task in found]
    if len(found) != len(set(found)):
        raise Wrong(f"rank {rank} does a task twice")
    if len(found) < len(tasks):
        missing = min(tasks - {*found}, key=lambda task: (task[0] == "B", task[1:]))
        raise Wrong(f"rank {rank} leaves out {missing!r}")
    kinds = "".join(kind for kind, _, _ in found)
    if kinds != "F" * (2 * parts) + "B" * (2 * parts):
        raise Wrong(
            f"rank {rank} begins backward before all its forward tasks are done"
        )
    return found


def _idle(orders: list[list[tuple[str, int, int]]], ranks: int) -> float:
    """The idle share, if a forward task takes 1, backward 2, and messages nothing."""
    last, done = 2 * ranks - 1, {}
    places, free = [0] * ranks, [0.0] * ranks
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = len(done)
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                kind, stage, m = task = order[places[rank]]
                needs = [("F", stage, m)] if kind == "B" else []
                if stage != (0 if kind == "F" else last):
                    needs.append((kind, stage + (-1 if kind == "F" else 1), m))
                if not all(need in done for need in needs):
                    break
                start = max([free[rank], *(done[need] for need in needs)])
                free[rank] = done[task] = start + (1 if kind == "F" else 2)
                places[rank] += 1
        if len(done) == before:
            raise Wrong(
                "the ranks wait for each other for ever: rank 0 waits with "
                f"{orders[0][min(places[0], len(orders[0]) - 1)]!r}"
            )
    busy = 3 * len(orders[0]) / 2
    return 1 - busy / max(free)


@solution("20.2")
def solution_2():
    """Every rank first takes all micro-batches through its first stage.

    Rank 0 can do this without waiting. Meanwhile micro-batch 0 goes through all ranks
    and comes back to rank 0, for its second stage. If there are at least as many
    micro-batches as ranks, it is there when rank 0 has finished its first stage.

    Backward begins at the last stage of the model, so every rank's second stage comes
    first. Each task is half as long as without interleaving, and so is the idle time.
    """

    def loops(rank, ranks, parts):
        stages = [rank, rank + ranks]
        order = []
        for stage in stages:
            for m in range(parts):
                order.append(("F", stage, m))
        for stage in reversed(stages):
            for m in range(parts):
                order.append(("B", stage, m))
        return order

    return loops


# -- 20.3: a weight that two ranks share -----------------------------------------------


def _gradients() -> list[torch.Tensor]:
    """Of the first and of the last use of the weight."""
    generator = torch.Generator().manual_seed(20)
    return [torch.randn(6, 4, generator=generator) for _ in range(2)]


def _tied(function) -> tuple:
    """This rank's gradient after the learner's function, and its messages."""
    from helpers import Messages

    rank, last = dist.get_rank(), dist.get_world_size() - 1
    weight = None
    if rank in (0, last):
        weight = nn.Parameter(torch.zeros(6, 4, device=device()))
        weight.grad = _gradients()[rank == last].to(device())
    with Messages() as messages:
        run(function, weight)
    gradient = None if weight is None or weight.grad is None else weight.grad.cpu()
    return gradient, messages.by_name(), dist.distributed_c10d._world.group_count


@exercise(
    "20.3",
    hints=(
        "One process would add up the gradients of both uses of the weight. Which "
        "collective adds a tensor of two ranks, and leaves the sum on both? The other "
        "ranks must not take part in it.",
        "`dist.new_group([0, last])` makes a process group of two ranks. All ranks of "
        "the job must call `new_group`, also those that are not in the group. Only the "
        "two ranks in it call the all-reduce, with `group=...`.",
    ),
)
def tie(function) -> None:
    """Gradients of a weight that the first and the last of four ranks share."""
    must_be_callable(function)
    first, second = _gradients()
    wanted = first + second
    results = in_ranks(FOUR, _tied, function, seconds=SECONDS)
    (low, sent, _), *middle, (high, _, _) = results
    if low is None or high is None:
        raise Wrong("rank 0 or rank 3 has no gradient any more")
    if torch.equal(low, first) and torch.equal(high, second):
        if not sent:
            raise NotYet("your function leaves both gradients as they were so far")
        raise Wrong("both gradients are as they were: change weight.grad in place")
    for rank, found in ((0, low), (FOUR - 1, high)):
        if near(found, wanted / 2) or near(found, wanted / FOUR):
            raise Wrong("one process adds up the gradients of both uses; no average")
        if not near(found, wanted, atol=1e-6):
            raise Wrong(
                f"rank {rank} does not have the gradient of one process, which is the "
                "sum of both"
            )
    if len({groups for _, _, groups in results}) > 1:
        raise Wrong(
            "the gradients are right, but not all ranks have called `new_group`: the "
            "next process group of the job would hang"
        )
    for rank, (_, messages, _) in enumerate(middle, 1):
        if messages:
            raise Wrong(
                f"the gradients are right, but rank {rank}, which has no copy of the "
                f"weight, takes part in {', '.join(messages)}"
            )


@solution("20.3")
def solution_3():
    """One process uses the weight twice, and autograd adds up both gradients.

    In the pipeline, each of two ranks has computed one of them. An all-reduce over a
    group of these two ranks adds them and leaves the sum on both. As both optimizers
    then make the same step, the two copies stay equal.

    All ranks must call `new_group`, since it is itself a collective call. The two ranks
    alone call the all-reduce. A real program makes the group once, before training.
    """

    def tie(weight):
        last = dist.get_world_size() - 1
        group = dist.new_group([0, last])
        if weight is not None:
            dist.all_reduce(weight.grad, group=group)

    return tie
