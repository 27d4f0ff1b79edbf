"""The job as one of its ranks sees it: who takes part, and what is under way.

Times travel with the values. A rank posts when it is ready for a collective as far as
it knows: a time, and the collectives that must end before. So nobody waits to launch
one; who needs its values, or the time of its end, reads what the members have posted.
"""

import atexit
import contextlib
import os
import threading
from collections import Counter, OrderedDict
from typing import NamedTuple

import torch.distributed as dist

from simgpu._distributed.arena import Arena, Parcel
from simgpu._distributed.board import Board

MOST_UNDER_WAY = 256  # collectives that a rank launches before it waits for the first
_KEPT = 1024  # of a channel's messages; older ones nobody can ask for any more
_ENDS_KEPT = 8192

_CIRCLE = (
    "a circle of ranks, each of which waits for the next: {}. NCCL would hang. Let one "
    "of them receive first, or use batch_isend_irecv."
)
# of a collective: (channel, number in it, ranks of the members in the job)
Name = tuple[str, int, tuple[int, ...]]


class Header(NamedTuple):
    """What a rank posts of its part in a collective."""

    name: str  # "all_reduce"
    dtype: str
    root: int
    reduction: str
    gives: list[int]  # elements for each member
    takes: list[int]  # elements from each member
    parcel: Parcel
    parts: list[tuple[int, int]]  # of the parcel, in elements, for each member
    ready: float  # simulated seconds, without what is in `after`
    after: list[Name]  # collectives that must end before
    seconds: float  # that it takes once all are ready
    settled: int  # this rank has all of this channel's collectives before this number
    where: str  # the line that called it


class Cluster:
    """This process as a rank of a job whose GPUs are simulated.

    Args:
        store: of the job's first process group.
        rank: of this process.
        size: how many ranks there are.
        topology: where they are.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, topology):
        self.rank, self.size, self.topology = rank, size, topology
        self.pid = os.getpid()
        self.arena = Arena()
        self.board = Board(store, rank, size, self.arena.place)
        # (thread, collective whose end it is about to find)
        self._sought: set[tuple[int, Name]] = set()
        self._readable: set[int] = {rank}  # whose arenas this process has opened
        self.under_way: list = []  # collectives that are not settled, as launched
        self.ends: OrderedDict[Name, float] = OrderedDict()  # of settled ones
        self.streams = 0  # of NCCL, so far
        self._titles: Counter[str] = Counter()
        self.calls_of_gloo: Counter[str] = Counter()  # of each group, so far
        self.how = ""  # this process ends: " with an error"
        self.connecting: set[str] = set()  # groups that have begun to, and have not yet
        self._keeps_store = rank == 0 and (
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        )
        atexit.register(self.end)

    def end(self) -> None:
        """This process ends: what others still need of it, they get."""
        if self.pid != os.getpid():
            return  # a child that was forked, such as a worker of a DataLoader
        atexit.unregister(self.end)
        for collective in self.under_way:
            with contextlib.suppress(RuntimeError):
                if not self._is_opened(collective):
                    collective.leave_values()
        self.board.say_ended(self.how)
        if self._keeps_store:
            self.board.wait_for_others()

    def _is_opened(self, collective) -> bool:
        """Whether the others have called it, too: then they have this rank's memory."""
        channel, number, ranks = collective.name
        me = collective.channel.member
        others = [f"{channel}/{number}/{i}" for i in range(len(ranks)) if i != me]
        return self.board.has(others)

    def title(self, ranks: str) -> str:
        """How errors and pictures name a new group: "ranks 0, 2 (group 2)"."""
        self._titles[ranks] += 1
        number = self._titles[ranks]
        return ranks if number == 1 else f"{ranks} (group {number})"

    def look_at_arenas(self, ranks: list[int], doing: str, limit: float) -> None:
        """See to it that what these ranks give can be read even if they end first.

        Waits until they have joined the job.
        """
        __tracebackhide__ = True
        new = [rank for rank in ranks if rank not in self._readable]
        if new:
            for pid, file in self.board.arenas(new, doing, limit).values():
                if file >= 0:
                    with contextlib.suppress(ProcessLookupError):  # it has ended
                        self.arena.look_at(pid, file)
            self._readable.update(new)

    def settle(self) -> None:
        """Wait for all collectives of this rank that are under way.

        Raises:
            torch.distributed.DistBackendError: if one of them never ends, or if its
                group could not be connected.
        """
        self.board.check_verdict()
        if self.connecting:
            raise dist.DistBackendError(f"not connected: {min(self.connecting)}")
        while self.under_way:
            for collective in list(self.under_way):
                collective.settle()

    def settle_what_is_there(self) -> None:
        """Settle the collectives that all members have launched: nobody is late."""
        for collective in list(self.under_way):
            with contextlib.suppress(dist.DistBackendError):
                if self._is_opened(collective):
                    collective.settle(1.0)

    def post(self, name: Name, member: int, header: Header) -> None:
        channel, number = name[:2]
        self.board.post(f"{channel}/{number}/{member}", header)
        if number >= _KEPT:
            self.board.forget(f"{channel}/{number - _KEPT}/{member}")

    def headers(self, name: Name, ranks: list[int], doing, limit,
                is_over=None) -> list[Header]:  # fmt: skip
        """What the members have posted, in their order.

        Args:
            name: of the collective.
            ranks: the members' ranks in the job.
            doing: what this rank does, for an error, or a function that says so.
            limit: seconds.
            is_over: asked while it waits: whether nobody needs them any more.
        """
        __tracebackhide__ = True
        channel, number = name[:2]
        keys = {f"{channel}/{number}/{i}": rank for i, rank in enumerate(ranks)}
        return self.board.read(keys, doing, limit, is_over)

    def note_end(self, name: Name, end: float) -> None:
        self.ends[name] = end
        if len(self.ends) > _ENDS_KEPT:
            self.ends.popitem(last=False)

    def start_of(self, name: Name, headers: list[Header], doing,
                 limit) -> tuple[float, int]:  # fmt: skip
        """When all members are ready, and the last of them, by number.

        Raises:
            torch.distributed.DistBackendError: if it waits for its own end.
        """
        times = []
        self._sought.add((threading.get_ident(), name))
        try:
            for header, rank in zip(headers, name[2], strict=True):
                ends = [self._end_of(one, rank, doing, limit) for one in header.after]
                times.append(max([header.ready, *ends]))
        finally:
            self._sought.discard((threading.get_ident(), name))
        return max(times), times.index(max(times))

    def _end_of(self, name: Name, rank: int, doing, limit: float) -> float:
        """When a collective of `rank` ends, be this rank a member of it or not."""
        if name not in self.ends:
            channel, number, ranks = name

            def behind() -> str:
                own = f"{channel}/{number}/{ranks.index(rank)}"
                (its,) = self.board.read({own: rank}, "", limit)
                words = doing if isinstance(doing, str) else doing()
                return f"{words}, behind {its.name} of rank {rank} ({its.where})"

            if (threading.get_ident(), name) in self._sought:
                raise dist.DistBackendError(_CIRCLE.format(behind()))
            headers = self.headers(name, list(ranks), behind, limit)
            start, _ = self.start_of(name, headers, behind, limit)
            self.note_end(name, start + max(header.seconds for header in headers))
        return self.ends[name]
