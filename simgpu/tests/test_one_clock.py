"""One simulated time for all ranks: who waits for whom, and what runs meanwhile."""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel as DDP

import simgpu

MILLION = 10**6
LATE = 0.01  # seconds


def join(backend: str = "nccl", **options) -> int:
    """What every program begins with; returns the rank."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, **options)
    return dist.get_rank()


def join_at_zero(backend: str = "nccl") -> int:
    """The same with a communicator that is made, and all clocks at zero."""
    rank = join(backend)
    dist.barrier(device_ids=[torch.cuda.current_device()])
    simgpu.timeline().clear()
    return rank


def ones(elements: int = MILLION) -> torch.Tensor:
    return torch.ones(elements, device="cuda")


def collectives() -> list:
    return [e for e in simgpu.timeline().events if e.kind == "collective"]


def pass_on(sent: torch.Tensor, received: torch.Tensor) -> None:
    """To the next rank, and from the one before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ring = [
        dist.P2POp(dist.isend, sent, (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()


# -- who waits for whom ----------------------------------------------------------------


def reduce_with_one_late() -> list:
    rank = join()
    found = []
    for late in (0, LATE):
        dist.barrier(device_ids=[rank])
        simgpu.timeline().clear()
        if rank == 2:
            simgpu.host_busy(late, "loading")
        dist.all_reduce(ones())
        found += collectives()
    return found


def test_a_late_rank_delays_its_peers_by_what_it_is_late(simulated_ranks):
    for rank, (before, after) in enumerate(simulated_ranks(reduce_with_one_late, 4)):
        assert (before.waited, before.waited_for) == (0, -1)
        assert after.end - before.end == pytest.approx(LATE, abs=1e-12)
        assert after.waited == pytest.approx(0 if rank == 2 else LATE, abs=1e-12)
        assert after.waited_for == (-1 if rank == 2 else 2)


def events_of_several() -> list:
    rank = join_at_zero()
    pair = dist.new_group([1, 3])
    if rank in (1, 3):
        dist.all_reduce(ones(), group=pair)
    if rank == 1:
        simgpu.host_busy(LATE)
    dist.broadcast(ones(), 0)
    if rank == 0:
        simgpu.host_busy(3 * LATE)
        dist.send(ones(), 2)
    elif rank == 2:
        dist.recv(ones(), 0)
    return [(e.name, e.group, e.nbytes, e.waited_for) for e in collectives()]


def test_events_name_the_collective_its_group_and_who_was_late(simulated_ranks):
    ends = "rank 0 to rank 2"
    size = 4 * MILLION
    first, second, third, fourth = simulated_ranks(events_of_several, 4)
    broadcast = ("broadcast", "all ranks", size, 1)
    assert first == [broadcast, ("send to 2", ends, size, -1)]
    assert [event[:3] for event in second] == [
        ("all_reduce", "ranks 1, 3", size),
        ("broadcast", "all ranks", size),
    ]
    assert second[-1][-1] == -1  # itself
    assert third == [broadcast, ("recv from 0", ends, size, 0)]
    assert fourth[-1] == broadcast


def wait_for_an_event_behind_a_collective() -> list[float]:
    if join_at_zero() == 1:
        simgpu.host_busy(LATE)
    x, y = ones(), ones()
    dist.all_reduce(x, async_op=True).wait()
    side, event = torch.cuda.Stream(), torch.cuda.current_stream().record_event()
    side.wait_event(event)  # when nobody knows yet how late rank 1 is
    with torch.cuda.stream(side):
        y.neg_()
    events = simgpu.timeline().events
    return [e.start for e in events if e.name == "neg_"] + [collectives()[0].end]


def test_an_event_behind_a_collective_is_as_late_as_its_end(simulated_ranks):
    for start, end in simulated_ranks(wait_for_an_event_behind_a_collective, 2):
        assert start >= end > LATE


def barrier_after_work() -> list[float]:
    rank = join_at_zero()
    found = []
    for step in range(3):
        simgpu.host_busy(LATE * (rank + step) % 3)
        dist.barrier(device_ids=[rank])
        found.append(simgpu.timeline().host)
    return found


def test_a_barrier_makes_the_clocks_of_all_hosts_equal(simulated_ranks):
    first, *others = simulated_ranks(barrier_after_work, 4)
    assert others == [first] * 3 and sorted(set(first)) == first


# -- NCCL's streams --------------------------------------------------------------------


def multiply_and_reduce() -> dict[str, tuple]:
    """Each alone, and both; they take about the same time."""
    rank = join()
    a, b, found = ones(1024 * 1024).view(1024, 1024), ones(8 * MILLION), {}
    for how in ("multiply", "reduce", "both", "async_op"):
        dist.barrier(device_ids=[rank])
        simgpu.timeline().clear()
        work = dist.all_reduce(b, async_op=True) if how == "async_op" else None
        if how != "reduce":
            torch.mm(a, a)
            torch.mm(a, a)
        if how in ("reduce", "both"):
            dist.all_reduce(b)
        if work is not None:
            work.wait()
        torch.cuda.synchronize()
        found[how] = simgpu.timeline().host, {e.stream for e in collectives()}
    return found


def test_an_asynchronous_collective_overlaps_with_computing(simulated_ranks):
    found, other = simulated_ranks(multiply_and_reduce, 2)
    assert found == other
    multiply, reduce, both, overlapped = (seconds for seconds, _ in found.values())
    assert both == pytest.approx(multiply + reduce, rel=0.05)
    assert max(multiply, reduce) < overlapped < 0.75 * both
    assert found["both"][1] == {0}  # the current stream
    assert 0 not in found["async_op"][1]


def go_on_before_the_others_come() -> float:
    """Rank 1 launches the collective only after rank 0 has gone on from its wait."""
    rank = join_at_zero("cpu:gloo,cuda:nccl")
    x, word = ones(), torch.zeros(1)
    if rank == 1:
        dist.recv(word, 0)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    after = simgpu.timeline().host
    if rank == 0:
        dist.send(word, 1)
    torch.cuda.synchronize()
    (event,) = collectives()
    assert after < event.end <= simgpu.timeline().host
    return x[0].item()


def test_wait_does_not_block_the_host(simulated_ranks):
    assert simulated_ranks(go_on_before_the_others_come, 2) == [2, 2]


def ask_until_it_is_done() -> tuple[int, float]:
    rank = join_at_zero()
    x = ones()
    simgpu.host_busy(rank * LATE)
    work, asked = dist.all_reduce(x, async_op=True), 1
    while not work.is_completed():
        asked += 1
    return asked, x[0].item()


def test_is_completed_says_so_in_the_end(simulated_ranks):
    (often, total), (seldom, _) = simulated_ranks(ask_until_it_is_done, 2)
    assert often > 1000 > seldom and total == 2


# -- nobody waits who would not wait on GPUs -------------------------------------------


def reduce_around_a_message(connected: bool, look: bool) -> list:
    rank = join_at_zero() if connected else join()
    x, message = ones(), torch.full((MILLION,), 7.0, device="cuda") * (rank == 0)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        dist.send(message, 1)
        work.wait()
    else:
        dist.recv(message, 0)
        assert not look or message[0].item() == 7  # the host waits for the message
        dist.all_reduce(x)
    assert x[0].item() == 2 and message[0].item() == 7
    return sorted((event.name.split()[0], event.end) for event in collectives())


@pytest.mark.parametrize("look", [False, True])
def test_a_message_passes_a_collective_that_is_not_complete(simulated_ranks, look):
    """It does once there is a communicator, for which all do wait."""
    first, second = simulated_ranks(reduce_around_a_message, 2, True, look)
    assert [name for name, _ in first] == ["all_reduce", "send"]
    assert [end for _, end in first] == [end for _, end in second]


def backward_beside_messages() -> list[float]:
    """Rank 1 needs the first of two messages; the second one comes late."""
    rank = join_at_zero()
    if rank == 0:
        works = [dist.isend(ones(), 1)]
        simgpu.host_busy(LATE)
        works.append(dist.isend(ones(), 1))
    else:
        boxes = [torch.empty(MILLION, device="cuda") for _ in range(2)]
        works = [dist.irecv(box, 0) for box in boxes]
        works[0].wait()
        leaf = ones().requires_grad_()
        (2 * leaf).backward(boxes[0])
    for work in works:
        work.wait()
    torch.cuda.synchronize()
    return [e.end for e in simgpu.timeline().events if e.kind == "kernel"]


def test_backward_waits_for_no_message_but_its_own(simulated_ranks):
    """A pipeline receives ahead: its backward must not wait for what comes later."""
    _, ends = simulated_ranks(backward_beside_messages, 2)
    assert ends and max(ends) < LATE


def test_a_communicator_that_all_wait_for_holds_the_message_up(simulated_ranks):
    with pytest.raises(RuntimeError) as caught:
        simulated_ranks(reduce_around_a_message, 2, False, True)
    for line in ("rank 0: all_reduce (", "rank 1: recv from rank 0 of 1,000,000"):
        assert line in str(caught.value)


# -- the same times in every run, and on all members -----------------------------------


def many_things(sleeps: bool) -> list:
    """A program that does a bit of everything, with hosts that are late at random."""
    rank = join()
    size, late = dist.get_world_size(), random.Random()

    def hesitate() -> None:
        if sleeps:
            time.sleep(late.random() / 50)

    groups = [dist.new_group([r for r in range(size) if r % 2 == i]) for i in (0, 1)]
    mine = groups[rank % 2]
    x, out = ones(1000), torch.empty(size * 1000, device="cuda")
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
    ddp = DDP(model, device_ids=[rank], bucket_cap_mb=0.01)
    for step in range(3):
        hesitate()
        work = dist.all_gather_into_tensor(out, x, async_op=True)
        y = x * 2
        hesitate()
        dist.all_reduce(y, group=mine)
        work.wait()
        hesitate()
        pass_on(y, x)
        simgpu.host_busy(1e-4 * ((rank + step) % size))
        ddp(torch.ones(2, 64, device="cuda")).sum().backward()
        hesitate()
        x.copy_(out[1000 * rank : 1000 * (rank + 1)])
        if step == 1:
            dist.barrier(device_ids=[rank])
    torch.cuda.synchronize()
    return [tuple(event) for event in simgpu.timeline().events]


def test_a_program_has_the_same_times_in_every_run(simulated_ranks):
    """To the last bit, however late the processes are."""
    once = simulated_ranks(many_things, 4, False)
    assert simulated_ranks(many_things, 4, True) == once


def nested_groups() -> list[tuple]:
    """Collectives in rows, columns, all ranks, pairs and rings, some at once."""
    rank = join_at_zero()
    mesh = dist.device_mesh.init_device_mesh("cuda", (2, 2), mesh_dim_names=("a", "b"))
    a, b = mesh.get_group("a"), mesh.get_group("b")
    for step in range(4):
        simgpu.host_busy(1e-4 * ((rank * 7 + step) % 4))
        column = dist.all_reduce(ones(1000), group=a, async_op=True)
        row = dist.all_reduce(ones(1000 * (1 + rank // 2)), group=b, async_op=True)
        dist.all_reduce(ones(10), group=b)
        (row if step % 2 else column).wait()
        whole = dist.all_reduce(ones(1000), async_op=True)
        torch.mm(*[ones(256 * 256).view(256, 256)] * 2)
        x = ones(1000)
        pass_on(x, ones(1000))
        whole.wait()
        if rank in (0, 3):
            (dist.send if (rank == 0) == (step % 2 == 0) else dist.recv)(x, 3 - rank)
    return [(e.group, e.end - e.waited, e.end) for e in collectives()]


def test_all_members_of_a_group_have_the_same_times(simulated_ranks):
    found = simulated_ranks(nested_groups, 4)
    ends: dict[str, dict[int, list[float]]] = {}
    for rank, events in enumerate(found):
        for group, _, end in events:
            ends.setdefault(group, {}).setdefault(rank, []).append(end)
    assert len(ends) == 1 + 4 + 4 + 1  # all; rows, columns; ring; and 0 to 3
    for group, its in ends.items():
        first, *others = map(sorted, its.values())
        assert others == [first] * len(others), group
        assert len(its) == (4 if group == "all ranks" else 2), group


# -- topology --------------------------------------------------------------------------


def reduce_far_and_near() -> dict[str, float]:
    rank = join_at_zero()
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    assert torch.cuda.device_count() == here
    assert rank == int(os.environ["GROUP_RANK"]) * here + torch.cuda.current_device()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    near, far = ones(), ones()
    dist.all_reduce(near, group=pairs[rank // 2])
    dist.all_reduce(far)
    assert (near[0].item(), far[0].item()) == (2, 4)
    near, far = collectives()
    return near.end - near.start - near.waited, far.end - far.start - far.waited


def test_nodes_and_their_network_decide_what_a_collective_costs(simulated_ranks):
    one = simulated_ranks(reduce_far_and_near, 4)
    fast = simulated_ranks(reduce_far_and_near, 4, nodes=2, network="400 Gbit/s")
    slow = simulated_ranks(reduce_far_and_near, 4, nodes=2, network="10 Gbit/s")
    nears, fars = zip(one[0], fast[0], slow[0], strict=True)
    assert nears == pytest.approx([nears[0]] * 3)  # NVLink in each node
    assert fars[0] < fars[1] < fars[2]
    assert fars[2] > 4 * MILLION / (10e9 / 8)  # all bytes leave the node once


# -- races -----------------------------------------------------------------------------


def race(kind: str) -> None:
    rank = join_at_zero()
    x, gathered, side = ones(1000), ones(2000), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    if kind == "gather":
        work = dist.all_gather_into_tensor(gathered, x, async_op=True)  # first
        x.zero_()  # second
    elif kind == "send":
        work = (dist.isend if rank == 0 else dist.irecv)(x, 1 - rank)  # first
        x.zero_()  # second
    else:
        work = dist.all_reduce(x, async_op=True)  # first
    if kind == "another stream waits":
        with torch.cuda.stream(side):
            work.wait()
    if kind == "a hook":
        work.get_future().then(lambda future: future.value()[0].add_(1))  # first
    x + 1  # second
    work.wait()


@pytest.mark.parametrize(
    "kind", ["reduce", "gather", "send", "another stream waits", "a hook"]
)
def test_a_race_with_a_collective_is_found_with_both_lines(simulated_ranks, kind):
    with pytest.raises(RuntimeError) as caught:
        simulated_ranks(race, 2, kind)
    for text in caught.value.failures.values():
        assert "possible data race" in text
        assert "# first" in text and "# second" in text


def no_race() -> float:
    """Every way to wait for a collective."""
    rank = join_at_zero()
    x, gathered = ones(1000), ones(2000)
    work = dist.all_gather_into_tensor(gathered, x, async_op=True)
    x + 1  # it may be read meanwhile
    work.wait()
    x.zero_()
    gathered.add_(1)
    dist.all_reduce(x, async_op=True)
    torch.cuda.synchronize()
    x.add_(1)
    dist.all_reduce(x, async_op=True)
    dist.all_reduce(x, async_op=True).wait()  # the same stream of NCCL
    x.add_(1)
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    x.add_(1)
    (dist.isend if rank == 0 else dist.irecv)(x, 1 - rank).wait()
    x.add_(1)
    pass_on(x, gathered[:1000])
    x += gathered[:1000]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_reduce(x, async_op=True).wait()
        x.mul_(2)
    torch.cuda.current_stream().wait_stream(side)
    dist.all_gather_object([None, None], rank)
    work = dist.all_gather_into_tensor(gathered, x * 2, async_op=True)
    torch.ones_like(x)  # not in the memory of x * 2, which `work` keeps
    work.wait()
    gathered = functional.all_gather_tensor(x * 2, 0, dist.group.WORLD)
    torch.ones_like(x)
    gathered.add_(1)
    return x.add_(1)[0].item()


def test_programs_that_wait_have_no_race(simulated_ranks):
    first, second = simulated_ranks(no_race, 2)
    assert first == second
