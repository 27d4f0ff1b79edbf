"""Seconds of a collective, from its message size, its ranks and their topology.

Models: NCCL's algorithms ring, tree and NVLS (the NVSwitch reduces), and plain sends,
each with the protocols LL (starts at once, little bandwidth) and Simple (starts late,
all of the bandwidth). Each takes

    start + passes * step + hops * hop + bytes on the busiest link / its bandwidth

and the fastest is chosen, as NCCL's tuner does. A pass either reduces or gathers; an
all-reduce makes two. Each rank of a node has its own share of the network, as if the
others used theirs. Leaves out: the protocol LL128, which lies between the two; other
work on the same links; and the wait for the last rank, which is the clock's business.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from simgpu._timing.kernel_cost import FLOOR
from simgpu._timing.topology import Topology


class Protocol(NamedTuple):
    """How a kernel of NCCL moves data. Times are those of an H100 with NVLink."""

    step: float  # seconds of each pass over the bytes, however many ranks there are
    hop: float  # seconds from one rank to the next in its node, besides the bytes
    bandwidth: float  # share of the link's bandwidth


class Constants(NamedTuple):
    """What the model assumes of NCCL. "Fitted": to recorded kernel times, see tests."""

    start: float = 2e-6  # seconds of each kernel; fitted
    # Fitted. NCCL's tuner has 0.6 microseconds and 1/4: a recorded kernel also waits
    # for the other ranks' hosts
    ll: Protocol = Protocol(0.0, 2.6e-6, 0.05)
    simple: Protocol = Protocol(13.5e-6, 0.7e-6, 1.0)  # fitted
    send_step: float = 6e-6  # seconds; that of a send with Simple; fitted
    tree: float = 0.9  # of a ring's bandwidth: NCCL's tuner
    nvls: float = 0.85  # the same
    ll_limit: int = 16 * 1024  # bytes that a send moves with LL: NCCL's default
    clock: int = 1_980_000  # kHz of an H100; latencies are cycles of the card: assumed
    pcie_hop: float = 5 / 3  # times a hop over NVLink: NCCL's tuner
    # of the link's bandwidth: "With the protocol overhead (~20%) NCCL can get an
    # effective NVLink bandwidth of 370GB/s", of 450 (NVIDIA/nccl-tests, issue 212)
    link: float = 0.8
    network: float = 0.9  # of the network's bandwidth: assumed
    # A step begins when a chunk of the one before has arrived. That costs this share of
    # the bytes (fitted), up to those of a message of `chunked` bytes (assumed: the
    # largest that was recorded)
    fill: float = 0.39
    chunked: int = 64 * 1000**2


CONSTANTS = Constants()


class Choice(NamedTuple):
    """The fastest way to run a collective."""

    algorithm: str  # "ring", "tree", "NVLS", "direct" (sends); "none" for one rank
    seconds: float
    bus_bandwidth: float  # bytes/s, as nccl-tests prints it


class Group(NamedTuple):
    """The ranks of a collective, as an algorithm sees them."""

    size: int  # ranks
    nodes: int
    most: int  # ranks in the node that has the most of them
    adapters: int  # ranks in the node that has the fewest; they send at once


class _Work(NamedTuple):
    """What an algorithm asks of the links."""

    passes: int  # over the bytes: 1 to reduce or to gather, 2 to do both
    hops: int  # inside nodes, one after the other
    far_hops: int  # between nodes
    sent: float  # bytes that leave the busiest GPU for its own node
    far_sent: float = 0.0  # bytes that leave the busiest node, or that come to it
    adapters: int = 1  # ranks that send these at once, each through its share
    bandwidth: float = 1.0  # share of each link's bandwidth that the algorithm reaches


def _ring(passes: int, nbytes: int, group: Group) -> _Work:
    """`passes` times around: all-reduce 2, all-gather and reduce-scatter 1."""
    steps, far = passes * (group.size - 1), passes * (group.nodes - 1)
    sent = nbytes * steps / group.size
    near = sent if group.size > group.nodes else 0.0
    far_sent = sent if group.nodes > 1 else 0.0
    return _Work(passes, steps - far, far, near, far_sent, group.adapters)


def _chain(nbytes: int, group: Group) -> _Work:
    """Broadcast and reduce: from rank to rank, cut into chunks that follow closely."""
    far = group.nodes - 1
    near = nbytes if group.size > group.nodes else 0
    far_sent = nbytes if far else 0
    return _Work(1, group.size - 1 - far, far, near, far_sent, group.adapters)


def _tree(nbytes: int, group: Group) -> _Work:
    """All-reduce: up and down a chain in each node and a double binary tree of nodes.

    Two nodes exchange halves. Of more, each has two children in one of the two trees.
    """
    depth = math.ceil(math.log2(group.nodes))
    near = nbytes * min(2, group.most - 1)
    far_sent = nbytes * min(2, group.nodes - 1)
    bandwidth = CONSTANTS.tree
    return _Work(
        2, 2 * (group.most - 1), 2 * depth, near, far_sent, group.adapters, bandwidth
    )


def _nvls(nbytes: int, group: Group) -> _Work:
    """All-reduce: the NVSwitch adds what its GPUs send and gives the sum to all."""
    sent = nbytes * (1 + 1 / group.adapters)
    tree = _tree(nbytes, group)
    return tree._replace(hops=2, sent=sent, bandwidth=CONSTANTS.nvls)


def _parts(nbytes: int, group: Group, nvlink: bool) -> _Work:
    """All-to-all, gather, scatter: a part between a rank and each of the others.

    The rank is where it takes longest. Without NVLink all its parts share its PCIe.
    """
    part, far = nbytes / group.size, group.nodes - 1
    near = part * ((group.most if nvlink else group.size) - 1)
    far_sent = part * (group.size - group.adapters)
    return _Work(1, group.size - 1 - far, far, near, far_sent)


def _send(nbytes: int, group: Group) -> _Work:
    """One message from a rank to another, in the same node or far."""
    far = group.nodes - 1
    return _Work(1, 1 - far, far, nbytes * (1 - far), nbytes * far)


def _seconds(work: _Work, protocol: Protocol, fill: float, topology: Topology) -> float:
    """Seconds of an algorithm; `fill` is in proportion to its bytes."""
    c, network = CONSTANTS, topology.network
    hop = protocol.hop * (1 if topology.card.nvlink_bandwidth else c.pcie_hop)
    latency = c.start + work.passes * protocol.step
    latency += (work.hops + work.far_hops) * hop
    latency *= c.clock / topology.card.clock
    latency += work.far_hops * network.latency
    near = work.sent * (1 + fill) / (topology.link_bandwidth * c.link)
    # a rank reaches its adapter over PCIe
    adapter = network.bandwidth / topology.ranks_per_node * c.network
    adapter = min(adapter, topology.card.pcie_bandwidth * c.link)
    far = work.far_sent / (adapter * work.adapters)
    return latency + max(near, far) / (protocol.bandwidth * work.bandwidth)


def _candidates(
    name: str, nbytes: int, group: Group, topology: Topology
) -> dict[str, float]:
    """Seconds of each algorithm that NCCL has for a collective."""
    c = CONSTANTS
    if name in ("send", "all_to_all", "gather", "scatter"):
        work, part = _send(nbytes, group), nbytes
        if name != "send":
            work = _parts(nbytes, group, topology.card.nvlink_bandwidth > 0)
            part = nbytes / group.size
        seconds = _seconds(work, c.simple._replace(step=c.send_step), 0.0, topology)
        if part <= c.ll_limit:
            seconds = min(seconds, _seconds(work, c.ll, 0.0, topology))
        return {"direct": seconds}
    if name == "all_reduce":
        algorithms = {"ring": _ring(2, nbytes, group), "tree": _tree(nbytes, group)}
    elif name in ("all_gather", "reduce_scatter"):
        algorithms = {"ring": _ring(1, nbytes, group)}
    else:
        algorithms = {"ring": _chain(nbytes, group)}
    fill = c.fill * min(1, c.chunked / nbytes) if nbytes else 0.0
    found = {
        algorithm: min(_seconds(work, p, fill, topology) for p in (c.ll, c.simple))
        for algorithm, work in algorithms.items()
    }
    # NCCL uses the switch of Hopper's NVLink from three GPUs on
    hopper = topology.card.capability >= (9, 0) and topology.card.nvlink_bandwidth
    if name == "all_reduce" and hopper and group.adapters > 2:
        found["NVLS"] = _seconds(_nvls(nbytes, group), c.simple, fill, topology)
    return found


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


# collective -> bus bandwidth over algorithm bandwidth, from the number of ranks
# (NVIDIA/nccl-tests, doc/PERFORMANCE.md)
FACTORS = {
    "all_reduce": lambda ranks: 2 * _others(ranks),
    "all_gather": _others,
    "reduce_scatter": _others,
    "all_to_all": _others,
    "gather": _others,
    "scatter": _others,
    "broadcast": lambda ranks: 1.0,
    "reduce": lambda ranks: 1.0,
    "send": lambda ranks: 1.0,
    "barrier": lambda ranks: 0.0,
}


def group_of(ranks: Iterable[int], topology: Topology) -> Group:
    """Ranks, as an algorithm sees them.

    Raises:
        ValueError: for ranks that make no group of the job.
    """
    members = topology.members(ranks)
    return Group(sum(members), len(members), max(members), min(members))


def choose(
    name: str, nbytes: int, ranks: Sequence[int] | Group, topology: Topology
) -> Choice:
    """The fastest algorithm for a collective, what it takes, and its bus bandwidth.

    Args:
        name: a key of `FACTORS`.
        nbytes: the message size as nccl-tests counts it. all_reduce, broadcast, reduce,
            send: the buffer of a rank. all_gather, gather: the gathered buffer.
            reduce_scatter, scatter: the buffer before it is scattered. all_to_all: the
            buffer of a rank, all parts. barrier: of no account.
        ranks: global ranks of the members, or what `group_of` says of them; of a send,
            the two ends.
        topology: where they are.

    Raises:
        ValueError: for an unknown collective, a negative size, or ranks that make no
            group of the job.
    """
    if name not in FACTORS:
        raise ValueError(f"unknown collective {name!r}; one of {', '.join(FACTORS)}")
    if nbytes < 0:
        raise ValueError(f"{name}: a message of {nbytes} bytes")
    group = ranks if isinstance(ranks, Group) else group_of(ranks, topology)
    if name == "send" and group.size > 2:
        raise ValueError(f"a send has two ends, not {group.size}: {list(ranks)}")
    if group.size == 1:
        return Choice("none", FLOOR, 0.0)
    # PyTorch's barrier is an all-reduce of one element
    run, sent = ("all_reduce", 4) if name == "barrier" else (name, nbytes)
    found = _candidates(run, sent, group, topology)
    algorithm = min(found, key=found.get)
    seconds = found[algorithm]
    return Choice(algorithm, seconds, nbytes * FACTORS[name](group.size) / seconds)


def collective_seconds(
    name: str, nbytes: int, ranks: Sequence[int] | Group, topology: Topology
) -> float:
    """Seconds of a collective once all members are there; see `choose`."""
    return choose(name, nbytes, ranks, topology).seconds
