"""What is measured between GPUs: collectives by size, under torchrun.

Of groups in the first machine (2, 4, ... of its ranks), then of all ranks where there
are several machines. A message's bytes are counted as nccl-tests does. Rank 0 takes the
times, of several collectives in a row, so that no wait for a late rank is inside.
"""

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from simgpu._measure import facts
from simgpu._measure.figures import Recorded
from simgpu._measure.timing import LONG, Budget, Run, Stopwatch, Times, once

KIB = 1024
# First what says how long the larger ones take; then what constants are fitted to
SIZES = [4**power * KIB for power in (8, 0, 9, 10, 2, 4, 6, 7, 1, 3, 5)]
COUNT, TIMES = 10, 5  # how often a collective runs, and how often that is done
WHAT = {
    "nccl_tests": "NCCL inside one machine, in a row, no launch inside: "
    "[card, collective, ranks, bytes as nccl-tests counts them, us]",
    "nccl_nodes": "NCCL between machines, in a row: "
    "[card, collective, nodes, ranks, network, bytes as nccl-tests counts them, us]",
}
_WAIT = timedelta(minutes=10)  # for a rank that does not come


class Links(NamedTuple):
    """What was measured between GPUs."""

    recordings: dict[str, Recorded]
    ranks: int
    nodes: int
    nccl_buffers: int  # bytes that NCCL took for the communicator of all ranks
    left_out: int  # collectives for which there was no time


class _Group(NamedTuple):
    ranks: list[int]
    members: dist.ProcessGroup | None
    nodes: int


def measure(card: str, budget: Budget, network: str) -> Links:
    """Measure, on every rank; what comes of it is rank 0's.

    Args:
        card: what the rows call it.
        budget: the time that is left.
        network: what the rows call the network between machines.
    """
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=_WAIT)
    try:
        return _measure(card, budget, network)
    finally:
        dist.destroy_process_group()


def _measure(card: str, budget: Budget, network: str) -> Links:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = ranks // here
    watch = Stopwatch()
    torch.cuda.synchronize()
    before = facts.taken()
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    buffers = facts.taken() - before
    found = {kind: Recorded([], []) for kind in WHAT}
    left_out = 0
    for group in _groups(here, nodes):
        for collective, make in _COLLECTIVES.items():
            if collective == "send" and len(group.ranks) > 2:
                continue
            if not _told(int(budget.left > 0), None):
                left_out += 1
                continue
            if rank in group.ranks:
                measured = _sizes(watch, budget, group, make)
                left_out += len(SIZES) - len(measured)
                _keep(found, measured, card, network, group, collective)
            _meet()  # the others have waited here
    recordings = {kind: recorded for kind, recorded in found.items() if recorded.rows}
    return Links(recordings, ranks, nodes, buffers, left_out)


def _groups(here: int, nodes: int) -> Iterator[_Group]:
    """All ranks, and some of those of the first machine; every rank makes each."""
    if nodes > 1:
        yield _Group(list(range(here * nodes)), None, nodes)
    size = here
    while size > 1:
        ranks = list(range(size))
        alone = nodes == 1 and size == here
        yield _Group(ranks, None if alone else dist.new_group(ranks), 1)
        size = 1 << (size - 1).bit_length() - 1  # the next smaller power of two


def _sizes(
    watch: Stopwatch, budget: Budget, group: _Group, make: Callable[..., Run]
) -> dict[int, Times]:
    """Bytes -> what a collective takes, of the sizes for which there is time."""
    size, a_byte = len(group.ranks), 0.0
    found = {}
    for nbytes in SIZES:
        elements = nbytes // 2 // size * size
        # what must be run of it, were it as long as the largest one so far
        least = 4 * a_byte * nbytes
        fits = 4 * nbytes < torch.cuda.mem_get_info()[0]
        if not _told(int(fits and least < budget.left), group.members):
            continue
        run = make(elements, size, group.members)
        run()
        took = once(run)
        a_byte = took / nbytes if nbytes >= SIZES[0] else a_byte
        often = _told(
            max(1, min(COUNT, int(LONG / max(took, 1e-6) / 4))), group.members
        )
        found[2 * elements] = watch.in_a_row(run, often, min(TIMES, 1 + often))
    return found


def _keep(found, measured, card, network, group, collective) -> None:
    """Write the rows of one collective."""
    for nbytes, times in measured.items():
        us, size = round(1e6 * times.seconds, 3), len(group.ranks)
        if group.nodes == 1:
            kind, row = "nccl_tests", [card, collective, size, nbytes, us]
        else:
            kind = "nccl_nodes"
            row = [card, collective, group.nodes, size, network, nbytes, us]
        found[kind].rows.append(row)
        found[kind].spread.append(round(times.spread, 3))


def _told(number: int, group: dist.ProcessGroup | None) -> int:
    """What rank 0 says: all ranks of a group must do the same."""
    said = torch.tensor(number, device="cuda")
    dist.broadcast(said, src=0, group=group)
    return int(said.item())


def _meet() -> None:
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()


# -- collectives -----------------------------------------------------------------------


def _half(elements: int) -> torch.Tensor:
    return torch.zeros(elements, dtype=torch.float16, device="cuda")


def _all_reduce(elements: int, size: int, group) -> Run:
    x = _half(elements)
    return lambda: dist.all_reduce(x, group=group)


def _all_gather(elements: int, size: int, group) -> Run:
    whole, part = _half(elements), _half(elements // size)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return lambda: gather(whole, part, group=group)


def _reduce_scatter(elements: int, size: int, group) -> Run:
    whole, part = _half(elements), _half(elements // size)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return lambda: scatter(part, whole, group=group)


def _all_to_all(elements: int, size: int, group) -> Run:
    mine, theirs = _half(elements), _half(elements)
    return lambda: dist.all_to_all_single(theirs, mine, group=group)


def _send(elements: int, size: int, group) -> Run:
    """From rank 0 to rank 1, which are all of the group."""
    x = _half(elements)
    if dist.get_rank() == 0:
        return lambda: dist.send(x, 1, group=group)
    return lambda: dist.recv(x, 0, group=group)


_COLLECTIVES: dict[str, Callable[..., Run]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send": _send,
}
