"""`mesh_costs.py`: what the tables that lesson 23 stores do not show."""

from types import SimpleNamespace

import pytest

from scripts.mesh_costs import mesh_times
from scripts.small_gpt import GPT
from simgpu import Event


def test_a_time_out_of_its_bounds_is_an_error():
    slow = Event(
        "collective", "all_reduce", "cuda:0", 0.0, 1.0, 8, 0, group="all ranks"
    )
    log = SimpleNamespace(ranks=range(8), events=lambda rank: [slow])
    with pytest.raises(AssertionError, match="HSDP"):
        mesh_times({"HSDP": log}, GPT, lambda model, first: model.blocks[1])
