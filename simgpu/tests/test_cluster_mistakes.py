"""Ranks that do not agree: every mistake ends within seconds, and says who did what.

What one rank alone does wrong is in `test_nccl.py`.
"""

import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from simgpu._ranks.run_ranks import RanksFailed
from support.limits import MOMENT, SHORT
from support.waiting import wait

GONE = "waits for rank 1, which has ended"
CIRCLE = "these ranks wait for each other, and NCCL would wait here"


def join(**options) -> int:
    """What every program begins with, and a first collective; returns the rank."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", **options)
    dist.all_reduce(ones())
    return dist.get_rank()


def ones(elements: int = 4, dtype=torch.float32) -> torch.Tensor:
    return torch.ones(elements, dtype=dtype, device="cuda")


def failures(simulated_ranks, *args, ranks: int = 3) -> dict[int, str]:
    """What each rank that has failed says."""
    with pytest.raises(RanksFailed) as caught:
        simulated_ranks(*args[:1], ranks, *args[1:], seconds=SHORT)
    assert "has not ended" not in str(caught.value)
    return caught.value.failures


# -- ranks that end --------------------------------------------------------------------


def end(how: str) -> None:
    if join() == 1:
        if how == "returns":
            return
        if how == "raises":
            raise ValueError("rank 1 has had enough")
        if how == "exits":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(ones())
    torch.cuda.synchronize()


ENDS = {
    "returns": None,
    "raises": "ValueError: rank 1 has had enough",
    "exits": "has called sys.exit(3)",
    "is killed": "was killed by SIGKILL",
}


@pytest.mark.skipif(os.name != "posix", reason="has no SIGKILL")
@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_ends_is_named_by_those_who_wait_for_it(simulated_ranks, how):
    found = failures(simulated_ranks, end, how)
    own = found.pop(1, None)
    assert own == ENDS[how] or ENDS[how] in own
    assert found.keys() == {0, 2}
    for rank, text in found.items():
        call = rf"rank {rank}: all_reduce of 4 float32, SUM \(\w+.py:\d+\) on all ranks"
        assert re.search(f"{call} {GONE}", text)


def end_before_the_first_collective() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    if dist.get_rank() != 1:
        dist.broadcast(ones(), 0)


def end_too_late(given_up: Path) -> None:
    """Rank 1 comes when rank 0 has given up."""
    rank = join(timeout=timedelta(seconds=MOMENT))
    if rank == 1:
        wait(given_up.exists, "the end of rank 0's patience")
    try:
        dist.all_reduce(ones())
        torch.cuda.synchronize()
    except dist.DistBackendError:
        given_up.touch()
        raise


def test_the_time_limit_of_a_group_is_kept(simulated_ranks, tmp_path):
    found = failures(simulated_ranks, end_too_late, tmp_path / "given up", ranks=2)
    assert found.keys() == {0}
    assert "caught collective operation timeout: rank 0: all_reduce" in found[0]
    assert f"has waited {MOMENT:.1f} s for rank 1: its time limit." in found[0]


# -- ranks that wait for each other ----------------------------------------------------


def wait_in_another_call() -> None:
    if join() == 1:
        dist.recv(ones(), 0)
    else:
        dist.all_reduce(ones())
    torch.cuda.synchronize()


def receive_in_a_ring() -> None:
    rank = join()
    dist.recv(ones(), (rank + 1) % 3)
    torch.cuda.synchronize()
    dist.send(ones(), (rank - 1) % 3)


def use_groups_in_another_order(connected: bool) -> None:
    rank = join()
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    if connected:
        dist.barrier(first) if rank < 2 else None
        dist.barrier(second)
    for group in (second, first) if rank == 1 else (first, second):
        if rank < 2 or group is second:
            dist.all_reduce(ones(), group=group)
    torch.cuda.synchronize()


def skip_a_message_of_a_batch() -> None:
    rank = join()
    ring = [
        dist.P2POp(dist.isend, ones(), (rank + 1) % 3),
        dist.P2POp(dist.irecv, ones(), (rank - 1) % 3),
    ]
    for work in dist.batch_isend_irecv(ring[: 1 if rank == 1 else 2]):
        work.wait()
    dist.barrier()


def send_in_a_ring() -> None:
    """All have been called, and each stands behind another one on its stream."""
    rank = join()
    given, taken = ones(), ones()
    dist.send(given, (rank + 1) % 3)
    dist.recv(taken, (rank - 1) % 3)
    torch.cuda.synchronize()


# -- groups that the ranks make in different ways --------------------------------------


def make_groups(how: str, bound: bool = False) -> list[float]:
    """Each of four ranks makes groups, and sums in the one that it is in."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    rank = join(**({"device_id": device} if bound else {}))
    mine, other = ([0, 1], [2, 3]) if rank < 2 else ([2, 3], [0, 1])
    x = ones() * rank
    if how == "members only":
        group = dist.new_group(mine)
    elif how == "another order":
        group, _ = dist.new_group(mine), dist.new_group(other)
    elif how == "another number":  # rank 0 is not in the first one, and leaves it out
        _ = dist.new_group([1, 2]) if rank else None
        group = dist.new_group([0, 1, 2, 3])
    elif how == "too few split":
        group = dist.new_group([0, 1]) if rank < 2 else dist.group.WORLD
    elif how == "local":
        group = dist.new_group(mine, use_local_synchronization=True)
    elif how == "some only":  # nobody else counts groups
        group = dist.new_group([0, 1]) if rank < 2 else None
    elif how == "alone":
        group = dist.new_group([rank])
    elif how == "subgroups":
        group, _ = dist.new_subgroups(2)
    elif how == "mesh":
        mesh = dist.init_device_mesh("cuda", (2, 2), mesh_dim_names=("a", "b"))
        group = mesh.get_group("b")
    elif how == "split":
        group = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    if group is not None:
        dist.all_reduce(x, group=group)
    return x.tolist()[:1]


UNLIKE = {
    "members only": (1, "ranks 0, 1", 2, "ranks 2, 3"),
    "another order": (1, "ranks 0, 1", 2, "ranks 2, 3"),
    "another number": (0, "ranks 0, 1, 2, 3", 1, "ranks 1, 2"),
}


@pytest.mark.parametrize("how", UNLIKE)
def test_groups_in_another_order_are_shown_with_both_calls(simulated_ranks, how):
    found = failures(simulated_ranks, make_groups, how, ranks=4)
    first, its, second, others = UNLIKE[how]
    line = r"of {} \(test_cluster_mistakes.py:\d+\)"
    text = next(t for t in found.values() if "do not make the same groups" in t)
    assert "Group number 1 is" in text
    assert re.search(rf"  rank [{'01' if first else 0}]: " + line.format(its), text)
    assert re.search(rf"  rank [{'23' if second == 2 else '123'}]: "
                     + line.format(others), text)  # fmt: skip


ALIKE = {
    ("local", False): [1, 1, 5, 5],
    ("members only", True): [1, 1, 5, 5],  # each half is a colour of one split
    ("some only", False): [1, 1, 2, 3],
    ("alone", False): [0, 1, 2, 3],
    ("subgroups", False): [1, 1, 5, 5],
    ("mesh", False): [1, 1, 5, 5],
    ("mesh", True): [1, 1, 5, 5],
    ("split", True): [1, 1, 5, 5],
}


@pytest.mark.parametrize(("how", "bound"), ALIKE)
def test_groups_that_ranks_may_make_alone(simulated_ranks, how, bound):
    found = simulated_ranks(make_groups, 4, how, bound, seconds=SHORT)
    assert [value for (value,) in found] == ALIKE[how, bound]


def summed(group, device: str = "cuda") -> float | None:
    """What the ranks of a group have together: the sum of their numbers."""
    if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
        return None
    x = torch.full((2,), float(dist.get_rank()), device=device)
    dist.all_reduce(x, group=group)
    return x[0].item()


def leave_some_out(how: str) -> None:
    """Groups of which some of four ranks are no members."""
    rank = dist.get_rank()
    if how in ("split", "again"):
        if how == "again":
            dist.destroy_process_group()
            join(device_id=torch.device("cuda", rank))
        parts = [[1, 0]], [[3]], [[1, 2]], [[0, 1], [2]]
        found = [summed(dist.split_group(split_ranks=part)) for part in parts]
        assert found == [[1, None, None, 1], [1, None, 3, 1], [None, None, 3, 2],
                         [None, 3, None, None]][rank]  # fmt: skip
    elif how == "subgroups":
        group, _ = dist.new_subgroups_by_enumeration([[0, 3], [1]])
        assert summed(group) == [3, 1, None, 3][rank]
    elif how == "sliced":
        mesh = dist.init_device_mesh("cuda", (2, 2), mesh_dim_names=("a", "b"))
        assert summed(mesh["a"].get_group()) == [2, 4, 2, 4][rank]
    elif how == "destroyed":
        group = dist.new_group([0, 1, 2, 3])
        if summed(group) and rank < 2:
            dist.destroy_process_group(group)
    else:
        for parts in ([], [[]], [[0, 0]], [[0, 1], [1, 2]]):
            with pytest.raises(ValueError, match="split"):
                dist.split_group(split_ranks=parts)


def make_later_groups() -> list[list[float | None]]:
    """After each way to leave ranks out: sums of groups of every other kind."""
    join(device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    found = []
    for how in ("split", "subgroups", "sliced", "destroyed", "no parts", "again"):
        leave_some_out(how)
        found.append([
            summed(dist.new_group([0, 1, 2, 3])), summed(dist.new_group([0, 3])),
            summed(dist.new_group([0, 1, 3], backend="gloo"), "cpu"),
            summed(dist.split_group(split_ranks=[[0, 3], [1]])),
        ])  # fmt: skip
    return found


def test_groups_after_one_that_leaves_ranks_out(simulated_ranks):
    found = simulated_ranks(make_later_groups, 4)
    expected = [[6, 3, 4, 3], [6, None, 4, 1], [6, None, None, None], [6, 3, 4, 3]]
    assert found == [[one] * 6 for one in expected]


def leave_one_waiting(how: str) -> None:
    """Three ranks: the last one, or the second one, never comes."""
    rank = join(device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    if how == "split":
        if rank < 2:
            dist.split_group(split_ranks=[[0, 1]])
    elif how == "other parts":
        dist.split_group(split_ranks=[[0, 1] if rank else [0, 1, 2]])
    elif how == "gloo":
        if rank != 1:
            dist.new_group([0, 1], backend="gloo")
    elif rank != 1:
        dist.new_group([0, 1], backend="gloo", use_local_synchronization=True)
    if rank == 2:
        dist.all_reduce(ones())
        torch.cuda.synchronize()


# -- ranks that call different things --------------------------------------------------


def call_another(what: str) -> None:
    rank = join()
    odd = rank == 1
    x = ones(5 if what == "shape" and odd else 4, DTYPES[what == "dtype" and odd])
    if what == "reduction":
        dist.all_reduce(x, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
    elif what == "root":
        dist.broadcast(x, int(odd))
    elif what == "collective" and odd:
        dist.broadcast(x, 0)
    elif what == "barrier" and odd:
        dist.barrier()
    elif what == "gathered":
        part = ones(3 if odd else 4)
        dist.all_gather_into_tensor(ones(len(part) * 3), part)
    elif what == "split":
        give = [1, 1, 2] if odd else [2, 1, 1]  # and all take 2, 1, 1
        dist.all_to_all_single(ones(4), ones(4), [2, 1, 1], give)
    else:
        dist.all_reduce(x)
    torch.cuda.synchronize()


DTYPES = (torch.float32, torch.bfloat16)
USUAL = "all_reduce of 4 float32, SUM"
OTHERS = {  # what differs -> the calls of ranks 0 and 1
    "shape": (USUAL, "all_reduce of 5 float32, SUM"),
    "dtype": (USUAL, "all_reduce of 4 bfloat16, SUM"),
    "reduction": (USUAL, "all_reduce of 4 float32, MAX"),
    "root": ("broadcast of 4 float32, root 0", "broadcast of 4 float32, root 1"),
    "collective": (USUAL, "broadcast of 4 float32, root 0"),
    "barrier": (USUAL, "barrier"),
    "gathered": ("all_gather of 4 float32", "all_gather of 3 float32"),
    "split": (
        "all_to_all, 1 float32 to rank 1, 1 from it",
        "all_to_all, 1 float32 to rank 0, 2 from it",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_ranks_that_call_different_things_are_shown_with_both(simulated_ranks, what):
    found = failures(simulated_ranks, call_another, what)
    first, second = OTHERS[what]
    texts = "\n".join(found.values())
    do_not = "do not agree about" if what == "split" else "do not call the same"
    assert f"rank 0 and rank 1 {do_not} collective, number 2 of all ranks:" in texts
    assert re.search(rf"  rank 0: {first} \(\S+.py:\d+\)\n", texts)
    assert re.search(rf"  rank 1: {second} \(\S+.py:\d+\)\n", texts)


def receive_another_size() -> None:
    rank = join()
    if rank == 0:
        dist.send(ones(4), 1)
    elif rank == 1:
        dist.recv(ones(6), 0)
    torch.cuda.synchronize()


# -- tensors that are elsewhere --------------------------------------------------------


def give_a_tensor_of(where: str) -> None:
    odd = join() == 1
    if where == "two GPUs" and odd:
        dist.all_gather([torch.ones(4, device=f"cuda:{i}") for i in range(2)], ones())
    else:
        dist.all_reduce(torch.ones(4, device=where) if odd else ones())
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("cpu", "No backend type associated with device type cpu"),
        ("two GPUs", "Tensors found on multiple devices"),
    ],
)
def test_one_rank_with_a_tensor_elsewhere_ends_the_others(simulated_ranks, where, said):
    found = failures(simulated_ranks, give_a_tensor_of, where, ranks=2)
    assert said in found[1] and GONE in found[0]


def share_a_gpu() -> None:
    dist.init_process_group("nccl")
    dist.all_reduce(ones())


# -- what is said of each --------------------------------------------------------------

SAID = {  # a program and its arguments -> those who say it, or all that fail; what
    (end_before_the_first_collective,): (
        (0, 2), rf"rank {{rank}}: broadcast \(\w+.py:\d+\) on all ranks for the first "
        f"time {GONE}",
    ),
    (wait_in_another_call,): (
        (), CIRCLE,
        r"rank 0: all_reduce of 4 float32, SUM \(\S+\) on all ranks, waits for rank 1",
        r"rank 1: recv from rank 0 of 4 float32 \(\S+\), waits for rank 0",
    ),
    (receive_in_a_ring,): (
        (), CIRCLE,
        r"rank 0: recv from rank 1 of 4 float32 \(\S+\), waits for rank 1",
        r"rank 1: recv from rank 2 of 4 float32 \(\S+\), waits for rank 2",
        r"rank 2: recv from rank 0 of 4 float32 \(\S+\), waits for rank 0",
    ),
    (use_groups_in_another_order, False): (
        (), CIRCLE,
        r"rank 0: all_reduce \(\S+\) on ranks 0, 1 for the first time, waits for rank",
        r"rank 1: all_reduce \(\S+\) on all ranks \(group 2\) for the first time",
    ),
    (use_groups_in_another_order, True): (  # on one stream, as a blocking call has it
        (), CIRCLE, r"rank 0: all_reduce .* on ranks 0, 1, waits for rank 1",
        r"rank 1: all_reduce .* on all ranks \(group 2\), waits",
    ),
    (skip_a_message_of_a_batch,): (
        (), CIRCLE,
        r"rank 1: barrier \(\S+\) on all ranks, behind send of rank 0 \(\S+\), waits "
        "for rank 1 itself",
    ),
    (send_in_a_ring,): (
        (), "a circle of ranks, each of which waits for the next",
        r"rank {rank}: send to rank {after} of 4 float32 \(\S+\), behind send of rank "
        r"{after} \(\S+\), behind send of rank ",
    ),
    (make_groups, "too few split", True): (  # NCCL splits it from that of all ranks
        (0,), r"rank 0: a process group with device_id \(\S+\) on ranks 0, 1 for the "
        "first time: new_group, waits for ranks 2, 3",
    ),
    (leave_one_waiting, "split"): (
        (0,), r"rank 0: split_group \(\S+\) of all ranks,? waits for rank 2",
    ),
    (leave_one_waiting, "other parts"): (
        (0,), r"do not split a group in the same way:\n  rank \d: into a part of ",
    ),
    (leave_one_waiting, "gloo"): (
        (0,), r"rank 0: a group of gloo \(\S+\) of ranks 0, 1: new_group.* for rank 1",
    ),
    (leave_one_waiting, "local"): (
        (0,), r"rank 0: a group of gloo \(\S+\) of ranks 0, 1,? waits for rank 1",
    ),
    (receive_another_size,): (
        (), "do not call the same message, number 1 from rank 0 to rank 1",
        "rank 0: send to rank 1 of 4 float32", "rank 1: recv from rank 0 of 6 float32",
    ),
    (give_a_tensor_of, "cuda:0"): (
        (0, 1), "on cuda:0, after cuda:1, where NCCL waits until all have come",
        r"is torch.cuda.set_device\(rank\) missing\?",
    ),
    (share_a_gpu,): (
        (0, 1, 2), "Duplicate GPU detected : rank {rank} and rank {other} both",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "call", SAID, ids=lambda call: " ".join([call[0].__name__, *map(str, call[1:])])
)
def test_ranks_that_wait_in_vain_are_shown_with_their_calls(simulated_ranks, call):
    who, *lines = SAID[call]
    ranks = 4 if call[0] is make_groups else 3
    found = failures(simulated_ranks, *call, ranks=ranks)
    for rank in who or found:
        for line in lines:
            its = {"rank": rank, "after": (rank + 1) % 3, "other": int(rank == 0)}
            assert re.search(line.format(**its), found[rank])


# -- what is no mistake ----------------------------------------------------------------


def leave_early(elements: int, message: bool) -> float | None:
    """Rank 0 ends at once, and rank 1 looks at what it has given later."""
    rank = join()
    x = torch.full((elements,), rank + 1.0, device="cuda")
    if message:
        (dist.send if rank == 0 else dist.recv)(x, 1 - rank)
    else:
        dist.broadcast(x, 0)
    if rank == 0:
        return None
    time.sleep(0.3)
    return x.sum().item() / elements


@pytest.mark.parametrize("message", [False, True])
@pytest.mark.parametrize("elements", [10, 10**6, 5 * 10**6])
def test_what_a_rank_has_given_outlives_it(simulated_ranks, elements, message):
    """Without `destroy_process_group`, and without a wait."""
    assert simulated_ranks(leave_early, 2, elements, message)[1] == 1


def exchange_under(limit: str, spare: int, elements: int) -> list[float]:
    """All kinds of exchanges, with so many bytes that a limit of the system leaves."""
    import resource  # not on Windows

    used = 0
    if limit == "RLIMIT_AS":
        with open("/proc/self/statm", encoding="utf-8") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(getattr(resource, limit))[1]
    resource.setrlimit(getattr(resource, limit), (used + spare, hard))
    rank = join()
    x = torch.full((elements,), rank + 1.0, device="cuda")
    dist.all_reduce(x)
    y = torch.empty(2 * elements, device="cuda")
    dist.all_gather_into_tensor(y, x * (rank + 1))
    z = torch.empty_like(x)
    ends = [
        dist.P2POp(dist.isend, x * rank, 1 - rank),
        dist.P2POp(dist.irecv, z, 1 - rank),
    ]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    return [one.double().mean().item() for one in (x, y, z)]


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_large_values_need_few_addresses(simulated_ranks):
    """`ulimit -v`, as a container or a cluster's scheduler sets it."""
    found = simulated_ranks(exchange_under, 2, "RLIMIT_AS", 2**30, 5 * 10**6)
    assert found == [[3.0, 4.5, 3.0], [3.0, 4.5, 0.0]]


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_too_little_shared_memory_is_said(simulated_ranks):
    args = (exchange_under, "RLIMIT_FSIZE", 2**24, 10**7)
    texts = "\n".join(failures(simulated_ranks, *args, ranks=2).values())
    assert re.search(
        r"[\d,]+ bytes of shared memory .* be had here: File too lar", texts
    )
    assert "raise the limit (ulimit -v, ulimit -f)" in texts


def work_in_threads() -> list[float]:
    """Each thread has a group and a stream of its own."""
    join()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        dist.barrier(group)
    device = torch.cuda.current_device()

    def work(number: int) -> float:
        torch.cuda.set_device(device)
        with torch.cuda.stream(torch.cuda.Stream()):
            x = ones() * (number + 1)
            for _ in range(10):
                dist.all_reduce(x, dist.ReduceOp.AVG, groups[number])
            return x[0].item()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, range(2)))


def test_threads_have_groups_of_their_own(simulated_ranks):
    assert simulated_ranks(work_in_threads, 2, seconds=SHORT) == [[1.0, 2.0]] * 2


def pin_in_a_thread() -> None:
    join()
    x, stop = ones(), threading.Event()

    def pin():
        while not stop.is_set():
            torch.ones(8).pin_memory()

    with ThreadPoolExecutor(1) as pool:
        pinning = pool.submit(pin)
        for _ in range(200):
            dist.all_reduce(x, dist.ReduceOp.AVG)
        stop.set()
        pinning.result()  # raises its error


def test_another_thread_waits_for_a_collective_that_is_being_launched(simulated_ranks):
    simulated_ranks(pin_in_a_thread, 2, seconds=SHORT)
