"""The other ranks of a job of which one runs: each gives what this one gives.

Models: all members of a group are ready when this rank is, so that a collective ends
its own time later; what they give is what this rank gives, where its values are known.
No loop here is over the ranks of the job.
"""

from collections import Counter
import os

import torch
import torch.distributed as dist

from simgpu._device import overhead
from simgpu._distributed import exchange as ex
from simgpu._distributed.cluster import MOST_UNDER_WAY, Cluster
from simgpu._distributed.collective import Collective
from simgpu._distributed.communicator import Communicator
from simgpu._dry import values


class Board:
    """Nobody reads what this rank posts."""

    def is_first(self, what: str) -> bool:
        return True

    def say_ended(self, why: str = "") -> None:
        """Nobody waits for it."""

    def check_verdict(self) -> None:
        """No rank waits for another."""


class Arena:
    def close(self) -> None:
        """There is none."""


class LoneCluster(Cluster):
    """The job, whose other ranks are not there."""

    def __init__(self, store: dist.Store, rank: int, size: int, topology):
        self.rank, self.size, self.topology = rank, size, topology
        self.pid = os.getpid()
        self.board, self.arena = Board(), Arena()
        self.under_way, self.ends, self.streams = [], {}, 0
        self._titles: Counter[str] = Counter()
        self.how, self.connecting = "", set()

    def end(self) -> None:
        """Nobody needs anything of this rank."""

    def settle(self) -> None:
        while self.under_way:
            self.under_way[0].settle()

    settle_what_is_there = settle


class LoneCommunicator(Communicator):
    """A process group as this rank alone takes part in it."""

    def connect(self, gpu, clock, what: str, guess: bool = False) -> None:
        if gpu.ordinal in self._numbers:
            self.guessed = self.guessed and guess
            return
        self._numbers[gpu.ordinal] = len(self._numbers)
        self.ordinal, self.guessed = gpu.ordinal, guess
        share = gpu.memory.share
        if "context" in share.outside and len(self.ranks) > 1:
            share.take_outside(f"NCCL {self.name}", overhead.NCCL_BUFFERS)


class LoneCollective(Collective):
    """A collective that starts when this rank is ready."""

    def _post(self, exchange: ex.Exchange) -> None:
        cluster = self.channel.cluster
        while len(cluster.under_way) >= MOST_UNDER_WAY:
            cluster.under_way[0].settle()
        with ex.plain():
            deliver(exchange, len(self.channel.ranks), self.channel.member)
        cluster.under_way.append(self)

    def __str__(self) -> str:
        return self.meeting.name

    def _settle(self, limit: float) -> None:
        for earlier in list(self.meeting.after):
            earlier.settle()
        after = [m.end for m in self.meeting.after if m.end]
        start = max([self.meeting.ready, *after])
        self.channel.cluster.under_way.remove(self)
        self.given = []
        channel = self.channel
        end = start + self.meeting.seconds
        rank = channel.ranks[channel.member]
        self.clock.settled(self.meeting, start, end, channel.title, rank)


def deliver(exchange: ex.Exchange, size: int, me: int) -> None:
    """What this rank takes, if all the others give what it gives.

    Args:
        exchange: this rank's part.
        size: of the group.
        me: this rank's number in it.
    """
    takes = list({id(t): t for its in exchange.takes for t in its}.values())
    given = exchange.gives
    known = not any(values.is_unknown(tensor) for tensor in given)
    small = all(tensor.nbytes <= values.SMALL for tensor in (*given, *takes))
    known = known and not exchange.dtype.is_floating_point
    name = exchange.name
    if name in ("broadcast", "scatter") and not given:
        return  # what this rank has already
    if not (known and small) or (name == "send" and not given):
        for tensor in takes:
            values.forget(tensor)
        return
    if not takes:
        return
    if name == "all_to_all":
        given = given[me : me + 1]
    flat = torch.cat([tensor.reshape(-1) for tensor in given])
    if name in ("scatter", "reduce_scatter"):
        flat = flat.chunk(size)[me]
    if exchange.reduction is not None:
        if exchange.reduction.name == "PRODUCT":
            flat = flat**size
        elif exchange.reduction.name in ("SUM", "PREMUL_SUM"):
            flat = flat * size
        first = 0
        for tensor in takes:
            tensor.copy_(flat[first : first + tensor.numel()].view(tensor.shape))
            first += tensor.numel()
            values.know(tensor)
        return
    for tensor in takes:  # the same from each rank
        count = min(flat.numel(), tensor.numel())
        if count and tensor.numel() % count == 0:
            tensor.view(-1, count).copy_(flat[:count])
        values.know(tensor)


LoneCommunicator.collective = LoneCollective
