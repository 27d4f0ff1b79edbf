"""What the stages of a split model do when: counted, and drawn."""

import pytest
import torch
from torch import nn

import simgpu
from helpers import draw, time_stages
from helpers.stages import StageTimes, Task


@pytest.fixture(scope="module")
def run():
    """Two micro-batches through two stages, backward after both."""
    simgpu.start(2, "T4", "1GB")
    first = nn.Linear(512, 512).to("cuda:0")
    second = nn.Linear(512, 512).to("cuda:1")
    x = torch.ones(512, 512, device="cuda:0")

    def step():
        results = [second(first(part).to("cuda:1")) for part in x.chunk(2)]
        sum(result.sum() for result in results).backward()

    yield time_stages(step, first, second)
    simgpu.stop()


def test_each_stage_has_its_passes_in_the_order_of_gpipe(run):
    wanted = [("F", 0), ("F", 1), ("B", 1), ("B", 0)]
    for row in run.tasks:
        assert [task[:2] for task in row] == wanted
        for earlier, later in zip(row, row[1:], strict=False):
            assert earlier.end <= later.start


def test_a_pass_waits_for_the_stage_before_it(run):
    up, low = ({task[:2]: task for task in row} for row in run.tasks)
    for part in (0, 1):
        assert low["F", part].start >= up["F", part].end
        assert up["B", part].start >= low["B", part].start


def test_every_second_is_computing_copying_or_idle(run):
    assert run.counted and len(run.copies) == 4
    copying = sum(end - start for start, end in run.copies)
    assert run.copying == pytest.approx(copying)  # each takes both of two GPUs
    parts = run.computing + run.copying + run.idle * run.seconds
    assert 0 < run.idle < 1 and parts == pytest.approx(run.seconds)


def test_hooks_are_removed(run):
    layer = nn.Linear(8, 8).to("cuda:0")
    x = torch.ones(4, 8, device="cuda:0")
    time_stages(lambda: layer(x).sum().backward(), layer)
    assert not layer._forward_hooks and not layer._forward_pre_hooks


def picture(seconds: float) -> str:
    task = Task("F", 7, 0.0, 1e-3)
    run = StageTimes(seconds, [[task]], [(1e-3, 1.1e-3)], 1e-3, 1e-4)
    return draw.stages({"a run": run})._repr_svg_()


def test_a_gap_without_room_has_no_word():
    assert ">idle<" not in picture(1.12e-3)


def test_a_step_on_real_gpus_says_how_long_it_took():
    run = StageTimes(2e-3, [[], []], [], float("nan"), float("nan"))
    assert "a run: 2.0 ms, measured" in draw.stages({"a run": run})._repr_svg_()
