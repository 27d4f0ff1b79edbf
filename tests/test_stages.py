"""What the stages of a split model do when: what lesson 13's pictures do not show."""

import torch
from torch import nn

from helpers import draw, time_stages
from helpers.stages import StageTimes, Task
from tests.launching import simulated


def test_hooks_are_removed():
    with simulated(1):
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
