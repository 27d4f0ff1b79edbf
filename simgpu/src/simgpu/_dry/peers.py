"""The other ranks of a job of which one, or one of each kind, runs.

Models: a rank that does not run does what the one of its kind does: it is ready at the
same time, and gives the same. So a collective among ranks of one kind starts when the
rank that runs is ready; where several kinds meet, it starts when the last of them is.
No loop here is over the ranks of the job, but for small values that are known.
"""

import contextlib
import functools
import inspect
import os
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist

from simgpu._distributed import exchange as ex
from simgpu._distributed.cluster import MOST_UNDER_WAY, Cluster, Header
from simgpu._distributed.collective import Channel, Collective
from simgpu._distributed.communicator import Communicator
from simgpu._dry import values
from simgpu._dry.kinds import Kinds
from simgpu._frames import called_from

_ALONE = (
    "rank {0} {1} rank {2}, which does not run in this dry run ({3}). If ranks differ, "
    "as the stages of a pipeline do, let one of each kind run: --kinds pp=4 for four "
    "stages, or the ranks themselves, --kinds {0},{2}. If all do what this one does, "
    "as in a ring, say --kinds same."
)
_OBJECT = (
    "rank {} calls {} for what rank {} has, which does not run in this dry run ({}); "
    "let both run: --kinds {}"
)


class Peers:
    """How the ranks that run stand for all others.

    Args:
        kinds: which ranks run.
        store: where those that run meet, the host and its port; None for one alone.
    """

    def __init__(self, kinds: Kinds, store: tuple[str, int] | None = None):
        self.kinds, self._where = kinds, store

    def cluster(self, prefix: str, rank: int, size: int, topology) -> Cluster:
        """The job as a rank of it sees it."""
        if self._where is None:
            found: Cluster = LoneCluster(rank, size, topology)
        else:
            store = dist.TCPStore(*self._where, is_master=False)
            found = Cluster(dist.PrefixStore(prefix, store), rank, size, topology)
            found._keeps_store, found.board.present = False, self.kinds.ranks
        found.kinds = self.kinds
        return found

    def communicator(self, *args) -> Communicator:
        return PartialCommunicator(*args)

    def deliver(self, exchange: ex.Exchange, size: int, me: int) -> None:
        """See `deliver`: where all others give what this rank gives."""
        deliver(exchange, size, me, {})


@contextlib.contextmanager
def objects_of(kinds: Kinds) -> Iterator[None]:
    """Refuse objects that a rank would send which does not run: nobody knows them."""
    module = dist.distributed_c10d
    names = ("broadcast_object_list", "scatter_object_list", "recv_object_list")
    with contextlib.ExitStack() as stack:
        for name in names:
            refusing = _refusing(getattr(module, name), kinds)
            for where in (module, dist):
                stack.enter_context(mock.patch.object(where, name, refusing))
        yield


def _refusing(function, kinds: Kinds):
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        source = given.get("src", 0 if "recv" not in function.__name__ else None)
        if source is None and given.get("group_src") is not None:
            source = dist.get_global_rank(
                given.get("group") or dist.group.WORLD, given["group_src"]
            )
        if source is not None and source not in kinds.ranks:
            me = dist.get_rank()
            raise ValueError(_OBJECT.format(
                me, function.__name__, source, called_from(), f"{me},{source}"
            ))  # fmt: skip
        return function(*args, **kwargs)

    return checked


class _Board:
    """Nobody reads what this rank posts."""

    def __init__(self) -> None:
        self.size, self.store = 1, dist.HashStore()

    def is_first(self, what: str) -> bool:
        return True

    def say_ended(self, why: str = "") -> None:
        """Nobody waits for it."""

    def check_verdict(self) -> None:
        """No rank waits for another."""


class _Arena:
    def close(self) -> None:
        """There is none."""


class LoneCluster(Cluster):
    """The job, of which no other rank runs."""

    def __init__(self, rank: int, size: int, topology):
        self.rank, self.size, self.topology = rank, size, topology
        self.pid = os.getpid()
        self.board, self.arena = _Board(), _Arena()
        self.under_way, self.ends, self.streams = [], {}, 0
        self._titles: Counter[str] = Counter()
        self.how, self.connecting = "", set()

    def end(self) -> None:
        """Nobody needs anything of this rank."""

    def settle(self) -> None:
        while self.under_way:
            self.under_way[0].settle()

    settle_what_is_there = settle


class PartialChannel(Channel):
    """Collectives of ranks of which some run: only these take part."""

    def __init__(self, cluster: Cluster, name: str, ranks: list[int], member: int,
                 *more):  # fmt: skip
        run = [rank for rank in cluster.kinds.ranks if rank in ranks]
        run.sort(key=ranks.index)
        super().__init__(cluster, name, run, run.index(ranks[member]), *more)
        self.everyone, self.place = ranks, member


class PartialCommunicator(Communicator):
    """A process group as a rank takes part in it of whose members not all run."""

    channel_kind = PartialChannel

    @property
    def present(self) -> dict[int, int]:
        return {i: r for r in self.cluster.kinds.ranks
                if (i := self._place_of(r)) is not None}  # fmt: skip

    def _place_of(self, rank: int) -> int | None:
        return self.ranks.index(rank) if rank in self.ranks else None

    def connect(self, gpu, clock, what: str, guess: bool = False) -> None:
        if len(self.present) > 1:
            super().connect(gpu, clock, what, guess)
            return
        if gpu.ordinal in self._numbers:
            self.guessed = self.guessed and guess
            return
        self._numbers[gpu.ordinal] = len(self._numbers)
        self.ordinal, self.guessed = gpu.ordinal, guess
        self.take_buffers(gpu)

    def collective(self, channel, exchange, *more) -> Collective:
        if len(channel.ranks) > 1:
            return MetCollective(channel, *more)
        if exchange.name == "send" and not self.cluster.kinds.same:
            if self.batch is None:
                raise _is_alone(channel, exchange)
        return LoneCollective(channel, *more)

    def bytes_of(self, exchange: ex.Exchange) -> int:
        """As its root has them, of which the others see a part."""
        rooted = exchange.name in ("gather", "scatter") and exchange.root != self.member
        return exchange.nbytes * (len(self.ranks) if rooted else 1)

    def end_batch(self, batch: list) -> None:
        """Of a ring each gives and takes as much: then one rank stands for all."""
        alone = [one for one in batch if isinstance(one, LoneCollective)]
        sent = sum(one.nbytes for one in alone if one.sends)
        if 2 * sent != sum(one.nbytes for one in alone) and not self.cluster.kinds.same:
            raise _is_alone(alone[0].channel, alone[0])


def _is_alone(channel: PartialChannel, message) -> ValueError:
    source, target = channel.everyone
    sends = channel.place == 0
    me, other = (source, target) if sends else (target, source)
    does = "sends to" if sends else "receives from"
    return ValueError(_ALONE.format(me, does, other, called_from()))


class LoneCollective(Collective):
    """A collective of which no other member runs: it starts when this rank is ready."""

    def _post(self, exchange: ex.Exchange) -> None:
        channel = self.channel
        cluster = channel.cluster
        self.nbytes, self.sends = exchange.nbytes, bool(exchange.gives)
        while len(cluster.under_way) >= MOST_UNDER_WAY:
            cluster.under_way[0].settle()
        with ex.plain():
            deliver(exchange, len(channel.everyone), channel.place, {})
        cluster.under_way.append(self)

    def __str__(self) -> str:
        return self.meeting.name

    def is_agreed(self) -> bool:
        return True

    def leave_values(self) -> None:
        """Nobody comes for them."""

    def _settle(self, limit: float) -> None:
        for earlier in list(self.meeting.after):
            earlier.settle()
        if self.is_settled:
            return
        ends = [m.end for m in self.meeting.after if m.end]
        start = max([self.meeting.ready, *ends])
        channel = self.channel
        channel.cluster.under_way.remove(self)
        rank = channel.cluster.rank
        end = start + self.meeting.seconds
        self.clock.settled(self.meeting, start, end, channel.title, rank)


class MetCollective(Collective):
    """A collective in which several ranks that run meet."""

    def _post(self, exchange: ex.Exchange) -> None:
        channel = self.channel
        cluster = channel.cluster
        while len(cluster.under_way) >= MOST_UNDER_WAY:
            cluster.under_way[0].settle()
        for meeting in self.meeting.after:  # of which the others hear nothing
            if isinstance(meeting.settle.__self__, LoneCollective):
                meeting.settle()
        after = [m.settle.__self__.name for m in self.meeting.after if m.end is None]
        ends = [m.end for m in self.meeting.after if m.end is not None]
        self._exchange = exchange
        self.dtype = exchange.dtype
        with ex.plain():
            known = is_known(exchange)
            parcel = cluster.arena.put(exchange.gives if known else [])
        channel.leave(self.number, parcel)
        counts = [0] * len(channel.ranks)
        self.header = Header(
            exchange.name, str(self.dtype).removeprefix("torch."), exchange.root,
            exchange.reduction.name if exchange.reduction else "", counts, counts,
            parcel, exchange.parts if known else [],
            max([self.meeting.ready, *ends]), after, self.meeting.seconds,
            channel.settled, self.where,
        )  # fmt: skip
        cluster.look_at_arenas(channel.ranks, self._doing, channel.limit)
        cluster.post(self.name, channel.member, self.header)
        cluster.under_way.append(self)

    def _leave(self) -> None:
        self.channel.cluster.under_way.remove(self)
        self._exchange = None

    def _deliver(self, headers: list[Header]) -> None:
        channel, exchange = self.channel, self._exchange
        given: dict[int, tuple | None] = {}
        for member, header in enumerate(headers):
            if member == channel.member:
                continue
            place = channel.everyone.index(channel.ranks[member])
            if not header.parcel.nbytes:
                given[place] = None if header.name != "barrier" else ()
                continue
            its = channel.cluster.arena.read(header.parcel).view(self.dtype).clone()
            given[place] = (its, header.parts)
        deliver(exchange, len(channel.everyone), channel.place, given)


# -- values ----------------------------------------------------------------------------


def is_known(exchange: ex.Exchange) -> bool:
    """Whether what a rank gives is small, and has values that a job may depend on."""
    if exchange.dtype.is_floating_point or exchange.dtype.is_complex:
        return False
    return bool(exchange.gives) and not any(
        tensor.nbytes > values.SMALL or values.is_unknown(tensor)
        for tensor in exchange.gives
    )


def deliver(exchange: ex.Exchange, size: int, me: int, others: dict) -> None:
    """What this rank takes, if who does not run gives what it gives.

    Args:
        exchange: this rank's part.
        size: of the group.
        me: this rank's number in it.
        others: number of another one that runs -> what it gives, flat, and which part
            goes to whom; None if that is not known.
    """
    takes = list({id(t): t for its in exchange.takes for t in its}.values())
    if not takes:
        return
    name, root = exchange.name, exchange.root
    givers = {me: None, **others}
    if name in ("broadcast", "scatter"):
        if root not in givers:
            return  # what this rank has already
        givers = {root: givers[root]}
    elif name == "send":
        if 0 not in others:
            _forget(takes)
            return
        givers = {0: others[0]}
    given = {}
    for place, its in givers.items():
        if place == me:
            if not is_known(exchange):
                break
            flat = torch.cat([tensor.reshape(-1) for tensor in exchange.gives])
            given[me] = (flat, exchange.parts)
        elif its is None or its == ():
            break
        else:
            given[place] = its
    small = all(tensor.nbytes <= values.SMALL for tensor in takes)
    if len(given) < len(givers) or not small:
        _forget(takes, _answer(exchange))
        return
    if exchange.reduction is not None:
        _lay(_reduced(exchange, size, me, given), takes)
    elif name in ("broadcast", "send"):
        _lay(next(iter(given.values()))[0], takes)
    elif name in ("scatter", "all_to_all"):
        pieces = []
        for place in range(size) if name == "all_to_all" else [root]:
            flat, parts = given.get(place) or given[me]
            first, last = parts[me]
            pieces.append(flat[first:last])
        _lay(torch.cat(pieces), takes)
    else:  # all_gather, gather
        pieces = [(given.get(place) or given[me])[0] for place in range(size)]
        _lay(torch.cat(pieces), takes)


def _reduced(exchange: ex.Exchange, size: int, me: int, given: dict) -> torch.Tensor:
    """The values of all ranks as one; of this rank's part, in a reduce-scatter."""
    total = given[me][0].clone()
    name = exchange.reduction.name
    if name in ("SUM", "AVG", "PREMUL_SUM"):
        total *= size - len(given) + 1
    elif name == "PRODUCT":
        total = total ** (size - len(given) + 1)
    for place, (flat, _) in given.items():
        if place != me:
            combine = {"PRODUCT": torch.mul, "MIN": torch.minimum,
                       "MAX": torch.maximum}.get(name, torch.add)  # fmt: skip
            total = combine(total, flat)
    if name == "AVG":
        total = total.div(size, rounding_mode="trunc")
    return total.chunk(size)[me] if exchange.name == "reduce_scatter" else total


def _lay(flat: torch.Tensor, takes: list[torch.Tensor]) -> None:
    first = 0
    for tensor in takes:
        piece = flat[first : first + tensor.numel()]
        first += tensor.numel()
        if piece.numel() == tensor.numel():
            tensor.copy_(piece.view(tensor.shape))
        values.know(tensor)


def _answer(exchange: ex.Exchange) -> object:
    """What all ranks have been told alike: that nothing is infinite, for example."""
    answers = {values.assumed_of(tensor) for tensor in exchange.gives}
    answer = answers.pop() if len(answers) == 1 else None
    sums = exchange.reduction is not None and exchange.reduction.name not in (
        "MIN", "MAX", "AVG"
    )  # fmt: skip
    return None if sums and answer else answer


def _forget(tensors: list[torch.Tensor], answer: object = None) -> None:
    for tensor in tensors:
        values.forget(tensor, answer)
