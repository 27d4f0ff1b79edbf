"""What NCCL would keep for a process group on one rank: members, GPU, streams."""

import os
import socket

import torch
import torch.distributed as dist

from simgpu._device import overhead
from simgpu._distributed.cluster import Cluster
from simgpu._distributed.collective import Channel
from simgpu._distributed.subjects import Buckets
from simgpu._timing.events import FIRST_OF_NCCL

_DUPLICATE = (
    "NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\nDuplicate GPU detected : rank {} and rank {} both on CUDA device {}"
)
_MOVED = (
    "rank {} has used this process group on cuda:{} and comes with a tensor on cuda:{} "
    "now. NCCL would wait for a second connection, which the other ranks may never "
    "make. Is torch.cuda.set_device(rank) missing?"
)


_TIMING = ("TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_DESYNC_DEBUG")


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

    def __init__(self, cluster: Cluster, name: str, ranks: list[int], member: int,
                 bound: torch.device | None, options):  # fmt: skip
        self.cluster, self.name, self.ranks, self.member = cluster, name, ranks, member
        self.bound, self.options = bound, options
        self.engine = "nccl"  # or another name that PyTorch has for it
        self.backend = None  # as `torch.distributed` shows it
        self.limit = options._timeout.total_seconds()
        together = len(ranks) == cluster.size
        title = "all ranks" if together else f"ranks {', '.join(map(str, ranks))}"
        self.title = cluster.title(title)
        self.channel = Channel(cluster, name, ranks, member, self.title,
                               self.limit)  # fmt: skip
        self._pairs: dict[tuple[int, int, str], Channel] = {}
        self._streams: dict[object, int] = {}
        self.ordinal: int | None = None  # of the GPU of its collectives so far
        self.guessed = False  # nothing but a barrier has used it, on a likely GPU
        self.attempts = 0  # to be connected
        self.splits = 0  # groups that have been split from it
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

    def pair(self, source: int, target: int, sends: bool) -> Channel:
        """The channel of messages from one member to another."""
        key = (source, target, "send" if sends else "receive")
        if key not in self._pairs:
            ranks = [self.ranks[source], self.ranks[target]]
            title = f"rank {ranks[0]} to rank {ranks[1]}"
            name = f"{self.name}/{source}>{target}"
            self._pairs[key] = Channel(
                self.cluster, name, ranks, 0 if sends else 1, title, self.limit, True
            )
        return self._pairs[key]

    def gpu_of_barrier(self, devices: list[int], gpus: list):
        """Which GPU a barrier takes, which has no tensor to tell.

        As PyTorch documents it: the one that was asked for, else the one that the group
        is bound to, else the first one that it has used, else the rank says which.
        """
        if devices:
            return gpus[devices[0]]
        if self.bound is not None:
            return gpus[self.bound.index]
        used = [gpu for gpu in gpus if gpu.ordinal == self.ordinal]
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
                words; for another GPU than the first time; if a member never comes.
        """
        __tracebackhide__ = True
        if self.ordinal == gpu.ordinal:
            self.guessed = self.guessed and guess
            return
        if self.ordinal is not None and not self.guessed:
            me = self.ranks[self.member]
            raise dist.DistBackendError(_MOVED.format(me, self.ordinal, gpu.ordinal))
        node = self.cluster.topology.node_of(self.cluster.rank)
        machine = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', 0)} {node}"
        board, me = self.cluster.board, self.member
        doing = f"rank {self.cluster.rank}: {what} on {self.title} for the first time"
        self.cluster.look_at_arenas(self.ranks, doing, self.limit)
        here = f"{self.name}/here {self.attempts}"
        self.attempts += 1  # one that fails may be followed by a better one
        self.cluster.connecting.add(self.name)
        board.post(f"{here}/{me}", (machine, gpu.ordinal, clock.host))
        keys = {f"{here}/{i}": rank for i, rank in enumerate(self.ranks)}
        all_here = board.read(keys, doing, self.limit)
        seen: dict[tuple, int] = {}
        for member, (its_machine, ordinal, _) in enumerate(all_here):
            first = seen.setdefault((its_machine, ordinal), member)
            if first != member and me in (first, member):
                both = _DUPLICATE.format(me, first + member - me, gpu.ordinal)
                raise dist.DistBackendError(both)
        self.ordinal, self.guessed = gpu.ordinal, guess
        self.cluster.connecting.remove(self.name)
        if "context" in gpu.memory.outside and len(self.ranks) > 1:
            gpu.memory.outside[f"NCCL {self.name}"] = overhead.NCCL_BUFFERS
        last = max(range(len(all_here)), key=lambda i: (all_here[i][2], -i))
        clock.host_waits(
            all_here[last][2], f"connect, wait for rank {self.ranks[last]}"
        )

    def set_limit(self, seconds: float) -> None:
        """From now on a collective may wait so long for the others."""
        self.limit = seconds
        for channel in (self.channel, *self._pairs.values()):
            channel.limit = seconds

    def give_up(self) -> None:
        """The group is aborted: nobody will wait for what is under way."""
        self.cluster.connecting.discard(self.name)
        own = {self.channel, *self._pairs.values()}
        for collective in list(self.cluster.under_way):
            if collective.channel in own:
                collective.give_up()

    def close(self, gpus: list) -> None:
        """The group is destroyed: its buffers are given back."""
        for gpu in gpus:
            gpu.memory.outside.pop(f"NCCL {self.name}", None)
