"""`mesh_costs.py`: the two tables of lesson 23."""

from types import SimpleNamespace

import pytest

from scripts.mesh_costs import PREDICTED, mesh_bytes, mesh_times
from simgpu import Event


def message(name: str, group: str, nbytes: int) -> Event:
    return Event("collective", name, "cuda:0", 0.0, 1e-3, nbytes, 0, group=group)


def log(*events: Event) -> SimpleNamespace:
    """Every rank sends the same, in a group whose first rank it is."""
    return SimpleNamespace(ranks=range(8), events=lambda rank: events)


def table_row(*events: Event) -> list[str]:
    table = mesh_bytes({"DDP": 0}, {"DDP": log(*events)})
    return table.splitlines()[-1].split()


def test_a_ring_of_all_ranks_leaves_the_node_once():
    everyone = message("all_reduce", "all ranks", 8_000_000)
    _, _, _, _, near, _, far = table_row(everyone)
    assert (near, far) == ("42.00", "14.00")  # 3 and 1 times 2 * 7 / 8 of 8 MB


def test_what_is_received_is_not_sent():
    recv = message("recv", "rank 4 to rank 0", 8_000_000)
    assert table_row(recv)[4::2] == ["0.00", "0.00"]


def test_a_time_out_of_its_bounds_is_an_error():
    from scripts.small_gpt import GPT

    def stage(model, first):
        return model.blocks[1]

    slow = log(message("all_reduce", "all ranks", 8)._replace(end=1.0))
    with pytest.raises(AssertionError, match="HSDP"):
        mesh_times({"HSDP": slow}, GPT, stage)


def test_swapped_axes_move_bytes_of_slices_to_the_network():
    assert PREDICTED["swapped"][2] == PREDICTED["FSDP x TP"][1] / 2
