"""Ranks that wait for each other in collectives of gloo, beside those of NCCL."""

import os

import pytest
import torch
import torch.distributed as dist

from simgpu._ranks.run_ranks import RanksFailed
from support.limits import SHORT

CIRCLE = "these ranks wait for each other, and NCCL would wait here"
WAITS = {  # the call of gloo, and how errors name it
    "all_reduce": "all_reduce",
    "barrier": "barrier",
    "recv": "recv",
    "send": "send",
    "broadcast_object_list": "broadcast",
    "monitored_barrier": "monitored_barrier",
    "async": "all_gather",
}


def join() -> tuple[int, dist.ProcessGroup]:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    dist.all_reduce(torch.ones(1, device="cuda"))
    return dist.get_rank(), dist.new_group(backend="gloo")


def call(name: str, group) -> None:
    x = torch.ones(2)
    if name == "all_reduce":
        dist.all_reduce(x, group=group)
    elif name in ("recv", "send"):
        getattr(dist, name)(x, 0, group=group)
    elif name == "broadcast_object_list":
        dist.broadcast_object_list([None], 0, group=group)
    elif name == "async":
        parts = [torch.ones(2), torch.ones(2)]
        dist.all_gather(parts, x, group=group, async_op=True).wait()
    else:
        getattr(dist, name)(group)


def wait_in_both(name: str) -> None:
    """Rank 0 is in a collective of NCCL, and rank 1 in one of gloo."""
    rank, group = join()
    call("all_reduce", group)
    if rank == 1:
        call(name, group)
    dist.all_reduce(torch.ones(4, device="cuda"))
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", WAITS)
def test_a_circle_of_waits_through_gloo_is_named(simulated_ranks, name):
    with pytest.raises(RanksFailed) as caught:
        simulated_ranks(wait_in_both, 2, name, seconds=SHORT)
    found = caught.value.failures[0]
    assert (
        CIRCLE in found and "rank 0: all_reduce of 4 float32, SUM (test_gloo" in found
    )
    assert f"rank 1: {WAITS[name]} over gloo (test_gloo_waits.py:" in found
    assert "on all ranks, waits for rank 0" in found


def wait_in_two_groups() -> None:
    """Both wait in gloo, each in a group that the other enters later."""
    rank, first = join()
    second = dist.new_group([0, 1], backend="gloo")
    for group in (first, second) if rank == 0 else (second, first):
        dist.barrier(group)


def test_a_circle_of_groups_of_gloo_is_named(simulated_ranks):
    with pytest.raises(RanksFailed) as caught:
        simulated_ranks(wait_in_two_groups, 2, seconds=SHORT)
    for text in caught.value.failures.values():
        assert CIRCLE in text
        assert all(f"rank {i}: barrier over gloo (test_gloo" in text for i in range(2))


def end_without_the_others() -> None:
    rank, group = join()
    if rank == 0:
        dist.barrier(group)


def test_who_waits_in_gloo_for_a_rank_that_has_ended_says_so(simulated_ranks):
    with pytest.raises(RanksFailed) as caught:
        simulated_ranks(end_without_the_others, 2, seconds=SHORT)
    assert "barrier over gloo (test_gloo_waits.py:" in caught.value.failures[0]
    assert "waits for rank 1, which has ended" in caught.value.failures[0]


def call_all_of_gloo() -> list:
    """Calls that need not wait for each other go on as without names."""
    rank, group = join()
    x, other = torch.full((2,), float(rank)), 1 - rank
    sent = dist.isend(x, other, group=group)
    got = [torch.zeros(2), torch.zeros(2)]
    talk = [  # gloo's send waits for the recv
        lambda: dist.send(x, other, group=group, tag=3),
        lambda: dist.recv(got[1], other, group=group, tag=3),
    ]
    for say in talk if rank == 0 else reversed(talk):
        say()
    dist.irecv(got[0], other, group=group).wait()
    sent.wait()
    summed = [torch.ones(2) for _ in range(3)]
    works = [dist.all_reduce(t, group=group, async_op=True) for t in summed]
    dist.monitored_barrier(group)
    for work in reversed(works):
        work.wait()
    named = [None, None]
    dist.all_gather_object(named, f"rank {rank}", group)
    parts = [torch.zeros(2)] * 2 if rank == 0 else None
    dist.gather(x, parts, 0, group)
    dist.barrier(group)
    return [t.tolist() for t in (*got, *summed)] + named


def test_calls_of_gloo_go_on(simulated_ranks):
    found = simulated_ranks(call_all_of_gloo, 2, seconds=SHORT)
    for rank, values in enumerate(found):
        assert values[:2] == [[1.0 - rank] * 2] * 2
        assert values[2:] == [[2, 2]] * 3 + ["rank 0", "rank 1"]
