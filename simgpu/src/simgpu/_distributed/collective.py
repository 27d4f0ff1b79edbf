"""One collective as a rank runs it: launch it now, settle it when it is needed."""

import functools
import threading

import torch
import torch.distributed as dist

from simgpu._dispatch.own_work import unseen
from simgpu._distributed import exchange as ex
from simgpu._distributed import watchdog
from simgpu._distributed.cluster import MOST_UNDER_WAY, Cluster, Header
from simgpu._timing.collective_cost import Group, group_of
from simgpu._timing.meeting import Meeting

_DIFFERENT = (
    "rank {0} and rank {1} do not call the same {2}:\n"
    "  rank {0}: {3}\n  rank {1}: {4}\n"
    "NCCL would hang, or give wrong values."
)
_UNEQUAL = (
    "rank {0} and rank {1} do not agree about {2}:\n"
    "  rank {0}: {3}\n  rank {1}: {4}\n"
    "NCCL would hang, or give wrong values."
)
_GONE = (
    "{}: rank {} has ended, and what it gave is lost. Let it wait for the others: call "
    "dist.barrier() or dist.destroy_process_group() at the end."
)


class Channel:
    """Collectives of the same ranks, one after the other: a group's, or a pair's.

    Args:
        cluster: the job.
        name: the same on all members, and no other channel's.
        ranks: of the members in the job.
        member: this rank's number among them.
        title: how errors and pictures name it: "all ranks".
        limit: seconds that a wait may take.
        is_pair: whether it is for messages from the first to the second of two.
    """

    def __init__(self, cluster: Cluster, name: str, ranks: list[int], member: int,
                 title: str, limit: float, is_pair: bool = False):  # fmt: skip
        self.is_pair = is_pair
        self.cluster, self.name, self.ranks, self.member = cluster, name, ranks, member
        self.everyone, self.place = ranks, member  # also those that do not run
        self.title, self.limit = title, limit
        self._lock = threading.RLock()  # one thread launches, another one settles
        self.launched = 0  # collectives so far
        self.settled = 0  # all before this number are settled
        self._settled_later: set[int] = set()  # numbers of others that are settled
        self._left: dict[int, object] = {}  # number -> parcel that others may read
        self._readers = {i: 0 for i in range(len(ranks)) if i != member}

    @functools.cached_property
    def group(self) -> Group:
        """All that take part, as their time depends on them."""
        return group_of(dict.fromkeys(self.everyone), self.cluster.topology)

    def note_settled(self, number: int, headers: list[Header]) -> None:
        """One of them is settled; what all members have read is thrown away."""
        with self._lock:
            self._settled_later.add(number)
            while self.settled in self._settled_later:
                self._settled_later.remove(self.settled)
                self.settled += 1
            for member in self._readers:
                seen = max(self._readers[member], headers[member].settled)
                self._readers[member] = seen
            read_by_all = min(self._readers.values(), default=self.settled)
            for old in [n for n in self._left if n < read_by_all]:
                self.cluster.arena.free(self._left.pop(old))

    def leave(self, number: int, parcel) -> None:
        with self._lock:
            self._left[number] = parcel


class Collective:
    """A collective that this rank launches; other threads wait until it is posted.

    Args:
        channel: of its members.
        meeting: its place in the schedule.
        clock: whose schedule that is.
        where: the line of the program.
    """

    entry = None  # of the flight recorder

    def __init__(self, channel: Channel, meeting: Meeting, clock, where: str):
        self.channel, self.meeting = channel, meeting
        self.clock, self.where = clock, where
        self._lock = threading.RLock()  # a handler of a signal may come back here
        self.number = channel.launched
        channel.launched += 1
        self.name = (channel.name, self.number, tuple(channel.ranks))
        self.given: list[torch.Tensor] = []  # what must not be freed yet
        self.begun = None  # before it in its stream, if its time is taken
        self.position = None  # after it in its stream, for streams that wait for it
        meeting.settle = self.settle
        self._lock.acquire()  # `post` releases it

    def post(self, exchange: ex.Exchange) -> None:
        """Tell the others what this rank gives and takes; by its maker's thread."""
        try:
            with unseen():
                self._post(exchange)
        finally:
            self._lock.release()

    def _post(self, exchange: ex.Exchange) -> None:
        channel = self.channel
        cluster = channel.cluster
        while len(cluster.under_way) >= MOST_UNDER_WAY:
            cluster.under_way[0].settle()
        self.dtype = exchange.dtype
        parcel = cluster.arena.put(exchange.gives)
        channel.leave(self.number, parcel)
        self.header = Header(
            exchange.name, str(self.dtype).removeprefix("torch."), exchange.root,
            exchange.reduction.name if exchange.reduction else "",
            [last - first for first, last in exchange.parts], exchange.counts, parcel,
            exchange.parts, self.meeting.ready,
            [m.settle.__self__.name for m in self.meeting.after], self.meeting.seconds,
            channel.settled, self.where,
        )  # fmt: skip
        cluster.look_at_arenas(channel.ranks, self._doing, channel.limit)
        # what it gives has been copied: `given` has what a GPU would still use
        with ex.plain():
            self._takes = ex.destinations(exchange.takes)
        self._reduction = exchange.reduction
        cluster.post(self.name, channel.member, self.header)
        cluster.under_way.append(self)

    def leave_values(self) -> None:
        """This process ends: leave what it gives to a rank that has not come yet."""
        if self.header.name == "send" and not self.header.parcel.data:
            parcel = self.channel.cluster.arena.inline(self.header.parcel)
            header = self.header._replace(parcel=parcel)
            self.channel.cluster.post(self.name, self.channel.member, header)

    def __str__(self) -> str:
        return f"rank {self.channel.cluster.rank}: {self._call(self.header)}"

    def _doing(self) -> str:
        """The same with its group, of which a message names the ends already."""
        return f"{self}" if self.channel.is_pair else f"{self} on {self.channel.title}"

    def _call(self, header: Header, member: int | None = None) -> str:
        """A member's call in words: "all_reduce of 10 float32, SUM (train.py:12)"."""
        ranks = self.channel.ranks
        member = self.channel.member if member is None else member
        count = max([0, *header.gives, *header.takes])
        words, size = header.name, f" of {count:,} {header.dtype}"
        if self.channel.is_pair:
            end = f"recv from rank {ranks[0]}" if member else f"send to rank {ranks[1]}"
            return f"{end}{size} ({header.where})"
        words += "" if header.name == "barrier" else size
        if header.reduction:
            words += f", {header.reduction}"
        if header.root >= 0:
            words += f", root {header.root}"
        return f"{words} ({header.where})"

    def _pieces(self, header: Header, other: int) -> str:
        """An all-to-all between two members: "all_to_all, 5 float32 to rank 1, …"."""
        rank = self.channel.ranks[other]
        to, come = header.gives[other], header.takes[other]
        size = f"{to:,} {header.dtype} to rank {rank}, {come:,} from it"
        return f"{header.name}, {size} ({header.where})"

    def is_agreed(self) -> bool:
        """Whether all members have launched it, and mean the same: it can end."""
        channel, number, ranks = self.name
        keys = {f"{channel}/{number}/{i}": rank for i, rank in enumerate(ranks)}
        board = self.channel.cluster.board
        try:
            if not board.has(list(keys)):
                return False
            self._compare(board.read(keys, "", 1.0))
        except RuntimeError:  # they do not, or the store is gone
            return False
        return True

    @property
    def is_settled(self) -> bool:
        return self.meeting.end is not None

    def settle(self, limit: float | None = None) -> None:
        """Wait until all members have launched it; then its values and times are known.

        Args:
            limit: seconds that this may take; None: those of its group.

        Raises:
            torch.distributed.DistBackendError: if they have not launched the same one,
                or if one never will.
        """
        __tracebackhide__ = True
        with self._lock:  # another thread may need it, too
            if not self.is_settled:
                limit = self.channel.limit if limit is None else limit
                try:
                    with unseen():
                        self._settle(limit)
                except dist.DistBackendError as error:
                    watchdog.has_seen(self, error, limit)
                    raise

    def give_up(self) -> None:
        """It never ends, and nobody waits for it: what it writes is not defined."""
        self._leave()
        self.clock.settled(self.meeting, self.meeting.ready, self.meeting.ready)

    def _leave(self) -> None:
        self.channel.cluster.under_way.remove(self)
        self._takes = []

    def release(self) -> None:
        """Nobody need keep what it uses."""
        self.given = []

    def release_if_ended(self) -> bool:
        """The same once the host sees that it has ended; whether it has been done."""
        if self.given and self.is_settled and self.clock.reached(self.position):
            self.given = []
        return not self.given

    def _settle(self, limit: float) -> None:
        __tracebackhide__ = True
        for earlier in list(self.meeting.after):
            earlier.settle()
        channel, cluster = self.channel, self.channel.cluster
        doing = self._doing
        headers = cluster.headers(
            self.name, channel.ranks, doing, limit, lambda: self.is_settled
        )
        if self.is_settled:  # by whoever interrupted the wait, or given up
            return
        self._compare(headers)
        with ex.plain():
            self._deliver(headers)
        start, last = cluster.start_of(self.name, headers, doing, limit)
        if self.is_settled:
            return
        end = start + max(header.seconds for header in headers)
        cluster.note_end(self.name, end)
        self._leave()
        channel.note_settled(self.number, headers)
        self.clock.settled(self.meeting, start, end, channel.title, channel.ranks[last])

    def _compare(self, headers: list[Header]) -> None:
        """Raise if two members do not mean the same."""
        __tracebackhide__ = True
        mine, me = self.header, self.channel.member
        for member, its in enumerate(headers):
            same = mine.name == its.name and mine.root == its.root
            same = same and mine.reduction == its.reduction
            same = same and mine.dtype == its.dtype
            fits = mine.gives[member] == its.takes[me]
            fits = fits and mine.takes[member] == its.gives[me]
            if not (same and fits):
                ranks = self.channel.ranks
                first, second = sorted((me, member))
                channel, number = self.channel, self.number + 1
                which = f"collective, number {number} of {channel.title}"
                if channel.is_pair:
                    which = f"message, number {number} from {channel.title}"
                ends = ((first, second), (second, first))
                if same and mine.name == "all_to_all":
                    calls = (self._pieces(headers[i], other) for i, other in ends)
                    text = _UNEQUAL
                else:
                    calls = (self._call(headers[i], i) for i in (first, second))
                    text = _DIFFERENT
                text = text.format(ranks[first], ranks[second], which, *calls)
                raise dist.DistBackendError(text)

    def _deliver(self, headers: list[Header]) -> None:
        """Put what the members give to where this rank takes it."""
        me, arena = self.channel.member, self.channel.cluster.arena
        takes = [[place.tensor() for place in its] for its in self._takes]
        if not any(piece is not None for its in takes for piece in its):
            return  # or to nowhere: nobody can read it any more
        given = {}
        for member, header in enumerate(headers):
            if takes[member]:
                size = self.dtype.itemsize
                first, last = header.parts[me]
                try:
                    values = arena.read(header.parcel)[first * size : last * size]
                except ProcessLookupError:
                    rank = self.channel.ranks[member]
                    raise dist.DistBackendError(_GONE.format(self, rank)) from None
                given[member] = values.view(self.dtype)
        if self._reduction is not None:
            values = list(given.values())
            values[0] = values[0].clone()
            given = {next(iter(given)): ex.reduce(values, self._reduction)}
        for member, values in given.items():
            _lay(values, self._takes[member], takes[member])


def _lay(values: torch.Tensor, places: list[ex.Destination], pieces: list) -> None:
    """Copy one flat tensor to pieces, one after the other; None is skipped."""
    first = 0
    for place, piece in zip(places, pieces, strict=True):
        last = first + place.numel
        if piece is not None:
            piece.copy_(values[first:last].view(piece.shape))
        first = last
