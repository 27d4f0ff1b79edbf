"""What NCCL would keep for a process group on one rank: members, GPU, streams."""

import os
import socket

import torch
import torch.distributed as dist

from simgpu._device import overhead
from simgpu._device.out_of_memory import FULL
from simgpu._distributed.cluster import Cluster
from simgpu._distributed.collective import Channel, Collective
from simgpu._distributed.flight_entries import Group
from simgpu._distributed.group_calls import GroupCall
from simgpu._distributed.subjects import Buckets
from simgpu._timing.events import FIRST_OF_NCCL

_DUPLICATE = (
    "NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\nDuplicate GPU detected : rank {} and rank {} both on CUDA device {}"
)
_NO_ROOM = (
    "NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nCuda failure 2 'out of memory'"
)
_SECOND = (
    "rank {}: {} on {} for the first time on cuda:{}, after cuda:{}, where NCCL waits "
    "until all have come with another GPU (is torch.cuda.set_device(rank) missing?)"
)


_MOST_NAMED = 64  # ranks of a group
_TIMING = ("TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_DESYNC_DEBUG")


def _named(ranks: list[int]) -> str:
    """A group's members: "ranks 0, 8"; of many, the first ones and the last."""
    if len(ranks) <= _MOST_NAMED:
        return f"ranks {', '.join(map(str, ranks))}"
    first = ", ".join(map(str, ranks[:3]))
    return f"{len(ranks):,} ranks {first}, ..., {ranks[-1]}"


class Communicator:
    """A process group over NCCL, as this rank takes part in it.

    Args:
        cluster: the job.
        name: of the group; no other has it, nor had it before.
        ranks: of its members in the job, in the order of the group.
        member: this rank's number among them.
        bound: the GPU that was given as `device_id`.
        options: of NCCL, such as how long a collective may wait for the others.
    """

    channel_kind = Channel  # of its collectives

    def __init__(self, cluster: Cluster, name: str, ranks: list[int], member: int,
                 bound: torch.device | None, options):  # fmt: skip
        self.cluster, self.name, self.ranks, self.member = cluster, name, ranks, member
        self.bound, self.options = bound, options
        self.engine = "nccl"  # or another name that PyTorch has for it
        self.call: GroupCall | None = None  # of `new_group`, if ranks count such calls
        self.is_split = False  # from the group of all ranks, which is connected
        self.record: Group | None = None  # of the flight recorder, if that is on
        self.backend = None  # as `torch.distributed` shows it
        self.limit = options._timeout.total_seconds()
        together = len(ranks) == cluster.size
        self.title = cluster.title("all ranks" if together else _named(ranks))
        # NCCL connects once for each GPU of a rank: in what order, all ranks agree
        self._channels: list[Channel] = []
        self._numbers: dict[int, int] = {}  # GPU's ordinal -> number of its channel
        self._pairs: dict[tuple[int, int, str], Channel] = {}
        self._streams: dict[object, int] = {}
        self.ordinal: int | None = None  # of the GPU that came last
        self.guessed = False  # nothing but a barrier has used it, on a likely GPU
        self.attempts = 0  # to be connected
        self.splits = 0  # groups that have been split from it
        self.made = 0  # groups that `new_group` has made of it
        self.buckets = Buckets()  # of DDP
        self.fingerprints = None  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        self.stashed: list = []  # collectives that nobody may have waited for
        self.is_timed = any(os.environ.get(name, "0") == "1" for name in _TIMING)
        self.batch: list | None = None  # messages of `batch_isend_irecv`, being told

    def stream(self, of: object = None) -> int:
        """The number of NCCL's stream for the group, or for messages with one rank."""
        if of not in self._streams:
            self._streams[of] = FIRST_OF_NCCL + self.cluster.streams
            self.cluster.streams += 1
        return self._streams[of]

    @property
    def launched(self) -> int:
        """Collectives so far."""
        return sum(channel.launched for channel in self._channels)

    def channel(self, gpu) -> Channel:
        """The channel of its collectives over a GPU of this rank, which is connected.

        The first GPU that each rank has used belong together, the second ones, and
        so on.
        """
        number = self._numbers[gpu.ordinal]
        while len(self._channels) <= number:
            which = len(self._channels)
            self._channels.append(self.channel_kind(
                self.cluster, f"{self.name}/{which}" if which else self.name,
                self.ranks, self.member, self.title, self.limit,
            ))  # fmt: skip
        return self._channels[number]

    def pair(self, source: int, target: int, sends: bool) -> Channel:
        """The channel of messages from one member to another."""
        key = (source, target, "send" if sends else "receive")
        if key not in self._pairs:
            ranks = [self.ranks[source], self.ranks[target]]
            title = f"rank {ranks[0]} to rank {ranks[1]}"
            name = f"{self.name}/{source}>{target}"
            self._pairs[key] = self.channel_kind(
                self.cluster, name, ranks, 0 if sends else 1, title, self.limit, True
            )
        return self._pairs[key]

    @property
    def present(self) -> dict[int, int]:
        """Number in the group -> rank in the job, of the members that run."""
        return dict(enumerate(self.ranks))

    def collective(self, channel: Channel, exchange, *more) -> Collective:
        """What it launches for an exchange; takes what `Collective` takes, too."""
        return Collective(channel, *more)

    def bytes_of(self, exchange) -> int:
        """Of an exchange, as this rank counts them."""
        return exchange.nbytes

    def end_batch(self, batch: list) -> None:
        """All messages of a batch have been told."""

    def gpu_of_barrier(self, devices: list[int], gpus: list):
        """Which GPU a barrier takes, which has no tensor to tell.

        As PyTorch documents it: the one that was asked for, else the one that the group
        is bound to, else one that it has used, else the rank says which.
        """
        if devices:
            return gpus[devices[0]]
        if self.bound is not None:
            return gpus[self.bound.index]
        used = [gpu for gpu in gpus if gpu.ordinal in self._numbers]
        return used[0] if used else gpus[self.cluster.rank % len(gpus)]

    def connect(self, gpu, clock, what: str, guess: bool = False) -> None:
        """Be connected over `gpu`; the first time, all members wait for each other.

        Args:
            gpu: of this rank.
            clock: of this process.
            what: the call that needs it, and its line: "all_reduce (train.py:12)".
            guess: whether another GPU may follow, for which all connect once more.

        Raises:
            torch.distributed.DistBackendError: for two ranks on one GPU, in NCCL's
                words; if a member never comes.
        """
        __tracebackhide__ = True
        if gpu.ordinal in self._numbers:
            self.guessed = self.guessed and guess
            return
        node = self.cluster.topology.node_of(self.cluster.rank)
        machine = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', 0)} {node}"
        board, me = self.cluster.board, self.member
        doing = f"rank {self.cluster.rank}: {what} on {self.title} for the first time"
        if self.ordinal is not None and not self.guessed:
            doing = _SECOND.format(
                self.cluster.rank, what, self.title, gpu.ordinal, self.ordinal
            )
        self.cluster.look_at_arenas([*self.present.values()], doing, self.limit)
        if self.call is not None and self.attempts == 0:
            self.call.compare(self.is_split, doing, self.limit)
        here = f"{self.name}/here {self.attempts}"
        self.attempts += 1  # one that fails may be followed by a better one
        self.cluster.connecting.add(self.name)
        board.post(f"{here}/{me}", (machine, gpu.ordinal, clock.host))
        keys = {f"{here}/{i}": rank for i, rank in self.present.items()}
        found = board.read(keys, doing, self.limit)
        all_here = dict(zip(self.present, found, strict=True))
        seen: dict[tuple, int] = {}
        for member, (its_machine, ordinal, _) in all_here.items():
            first = seen.setdefault((its_machine, ordinal), member)
            if first != member and me in (first, member):
                both = _DUPLICATE.format(me, first + member - me, gpu.ordinal)
                raise dist.DistBackendError(both)
        self.take_buffers(gpu)
        self._numbers[gpu.ordinal] = len(self._numbers)
        self.ordinal, self.guessed = gpu.ordinal, guess
        self.cluster.connecting.remove(self.name)
        last = max(all_here, key=lambda i: (all_here[i][2], -i))
        clock.host_waits(
            all_here[last][2], f"connect, wait for rank {self.ranks[last]}"
        )

    def take_buffers(self, gpu) -> None:
        """NCCL has buffers on each card that is connected.

        Raises:
            torch.distributed.DistBackendError: if there is no room for them.
        """
        share = gpu.memory.share
        if "context" in share.outside and len(self.ranks) > 1:
            if not share.take_outside(f"NCCL {self.name}", overhead.NCCL_BUFFERS):
                error = dist.DistBackendError(_NO_ROOM)
                setattr(error, FULL, True)
                raise error

    def set_limit(self, seconds: float) -> None:
        """From now on a collective may wait so long for the others."""
        self.limit = seconds
        for channel in (*self._channels, *self._pairs.values()):
            channel.limit = seconds

    def give_up(self) -> None:
        """The group is aborted: nobody will wait for what is under way."""
        self.cluster.connecting.discard(self.name)
        own = {*self._channels, *self._pairs.values()}
        for collective in list(self.cluster.under_way):
            if collective.channel in own:
                collective.give_up()

    def close(self, gpus: list) -> None:
        """The group is destroyed: its buffers are given back."""
        for gpu in gpus:
            gpu.memory.share.give_back_outside(f"NCCL {self.name}")
