"""Lesson 20's formula for zero-bubble schedules holds for PyTorch's order of tasks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS, STAGES, PARTS = 4, 8, 8


@pytest.fixture
def orders():
    """Of each rank: (task, stage, micro-batch) in PyTorch's order."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        device = torch.device("cpu")
        mine = [PipelineStage(nn.Linear(1, 1), i, STAGES, device) for i in (0, RANKS)]
        order = ScheduleInterleavedZeroBubble(mine, PARTS).pipeline_order
    finally:
        dist.destroy_process_group()
    return {
        rank: [
            (a.computation_type.name, a.stage_index, a.microbatch_index)
            for a in row
            if a
        ]
        for rank, row in order.items()
    }


def longest(orders, seconds):
    """When the last rank is done: a task waits for its input and for its rank."""
    done, clock, left = (
        {},
        dict.fromkeys(orders, 0.0),
        {r: [*o] for r, o in orders.items()},
    )
    while any(left.values()):
        before = len(done)
        for rank, tasks in left.items():
            while tasks and (begin := ready(done, *tasks[0])) is not None:
                task = tasks.pop(0)
                clock[rank] = max(clock[rank], begin) + seconds[task[0]]
                done[task] = clock[rank]
        assert len(done) > before, "the ranks wait for each other"
    return max(clock.values())


def ready(done, task, stage, part):
    """When the input of a task is there; None if it is not yet made."""
    if task == "FORWARD":
        return 0.0 if stage == 0 else done.get((task, stage - 1, part))
    if task == "BACKWARD_WEIGHT":
        return done.get(("BACKWARD_INPUT", stage, part))
    if stage == STAGES - 1:
        return done.get(("FORWARD", stage, part))
    return done.get((task, stage + 1, part))


@pytest.mark.parametrize("weights", [1.0, 0.75])
def test_pytorchs_order_is_idle_for_as_long_as_the_formula_says(orders, weights):
    seconds = {"FORWARD": 1.0, "BACKWARD_INPUT": 1.0, "BACKWARD_WEIGHT": weights}
    busy = 2 * PARTS * sum(seconds.values())
    idle = (RANKS - 1) * (1.0 + 1.0 - weights)
    assert longest(orders, seconds) == pytest.approx(busy + idle)
