"""Seconds of a collective, from its message size, its ranks and their topology.

Models: NCCL's algorithms ring, tree and NVLS (the NVSwitch reduces), and plain sends,
with the protocols LL (starts at once, little bandwidth), LL128 (some of it) and Simple
(starts late, all of the bandwidth). Each takes

    start + latency of hops + bytes on the busiest link / its bandwidth

and the fastest is chosen, as NCCL's tuner does. A rank also copies its own part from its input to its output.
Without NVLink two ranks meet at a PCIe switch, and more share what the host moves. Each
rank of a node has its own share of the network, as if the others used theirs. Leaves
out: sizes at which NCCL's tuner does not choose the fastest; other work on the same
links; and the wait for the last rank, which is the clock's business.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from simgpu._device.cards import Card
from simgpu._timing.kernel_cost import FLOOR
from simgpu._timing.topology import Topology


class Latency(NamedTuple):
    """Seconds of a collective of no bytes, by kind of card."""

    start: float  # of each kernel of NCCL
    hop: float  # from a rank to the next in its node


class Protocol(NamedTuple):
    """How a kernel of NCCL moves data."""

    step: float  # before the first hop, in starts of the card
    wait: float  # of each hop in a node, in starts of the card
    hop: float  # the same, in hops of the card; the two are added
    bandwidth: float  # share of what the link reaches


class Constants(NamedTuple):
    """What the model assumes of NCCL. "Fitted": to runs of nccl-tests, see tests."""

    ampere: Latency = Latency(8.9e-6, 0.84e-6)  # fitted to A100; assumed of older cards
    hopper: Latency = Latency(4.3e-6, 0.84e-6)  # fitted to H100
    blackwell: Latency = Latency(7.3e-6, 1.25e-6)  # fitted to B200
    pcie: Latency = Latency(5.7e-6, 0.92e-6)  # fitted to L40S
    ll: Protocol = Protocol(0.0, 0.0, 1.0, 0.62)  # fitted; over NVLink the next holds
    ll_bandwidth: float = 11e9  # bytes/s that a rank sends with LL, at most; fitted
    ll128: Protocol = Protocol(0.21, 0.0, 1.0, 0.41)  # fitted
    simple: Protocol = Protocol(1.5, 0.58, 0.0, 1.0)  # fitted
    ll_part: float = 6.5e9  # bytes/s of each send with LL, at most; fitted
    # Sends and receives that go at once, all fitted: seconds to begin, hops for each
    # rank more, and the share of what NVLink reaches
    ll_send: float = 2.1e-6
    send: float = 8.2e-6
    peer: float = 0.45
    sends: float = 0.84
    tree: float = 0.9  # of a ring's bandwidth: NCCL's tuner
    nvls_step: float = 10.8  # of an all-reduce in the switch, in starts; fitted
    nvls: float = 0.82  # of what the link reaches; fitted
    own: float = 0.42  # bytes over the link that a byte of the own part costs; fitted
    # A step begins when a chunk of the one before has arrived. That costs this share of
    # the first bytes; both fitted
    fill: float = 0.09
    filled: float = 40e6
    link: float = 0.78  # of NVLink's bandwidth; fitted
    # Of PCIe's bandwidth, without NVLink; fitted to one kind of machine with L40S
    pair: float = 0.66  # of each of two ranks
    host: float = 0.66  # of more than two together
    sockets: float = 0.55  # of that, with more than `socket` ranks
    socket: int = 4  # ranks on a socket of the host; assumed
    # Of the network's bandwidth, and as above; fitted to two nodes of A100 with EFA
    network: float = 0.95
    far_fill: float = 1.4
    far_filled: float = 16e6
    adapter: float = 0.8  # of PCIe's bandwidth, from a rank to its adapter; assumed


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

    hops: int  # inside nodes, one after the other
    far_hops: int  # between nodes
    # Bytes, more of them where the algorithm does not reach all of the bandwidth
    sent: float  # that leave the busiest GPU for its own node
    far_sent: float = 0.0  # that leave the busiest node, or that come to it
    adapters: int = 1  # ranks that send these at once, each through its share
    own: float = 0.0  # bytes that a rank copies to itself


def _ring(passes: int, nbytes: int, group: Group) -> _Work:
    """`passes` times around: to reduce, to gather, or both."""
    steps, far = passes * (group.size - 1), passes * (group.nodes - 1)
    sent = nbytes * steps / group.size
    near = sent if group.size > group.nodes else 0.0
    far_sent = sent if group.nodes > 1 else 0.0
    own = nbytes / group.size
    return _Work(steps - far, far, near, far_sent, group.adapters, own)


def _chain(nbytes: int, group: Group) -> _Work:
    """Broadcast and reduce: from rank to rank, cut into chunks that follow closely."""
    far = group.nodes - 1
    near = nbytes if group.size > group.nodes else 0
    far_sent = nbytes if far else 0
    return _Work(group.size - 1 - far, far, near, far_sent, group.adapters)


def _tree(nbytes: int, group: Group) -> _Work:
    """All-reduce: up and down a chain in each node and a double binary tree of nodes.

    Two nodes exchange halves. Of more, each has two children in one of the two trees.
    """
    depth = math.ceil(math.log2(group.nodes))
    near = nbytes * min(2, group.most - 1) / CONSTANTS.tree
    far_sent = nbytes * min(2, group.nodes - 1) / CONSTANTS.tree
    hops, far_hops, own = 2 * (group.most - 1), 2 * depth, nbytes / group.size
    return _Work(hops, far_hops, near, far_sent, group.adapters, own)


def _nvls(nbytes: int, group: Group) -> _Work:
    """All-reduce: the NVSwitch adds what its GPUs send and gives the sum to all."""
    sent = nbytes * (1 + 1 / group.adapters) / CONSTANTS.nvls
    return _tree(nbytes, group)._replace(hops=0, sent=sent, own=0.0)


def _parts(nbytes: int, group: Group, nvlink: bool) -> _Work:
    """All-to-all, gather, scatter: a part between a rank and each of the others.

    The rank is where it takes longest. Without NVLink all its parts share its PCIe.
    """
    part, far = nbytes / group.size, group.nodes - 1
    near = part * ((group.most if nvlink else group.size) - 1)
    far_sent = part * (group.size - group.adapters)
    return _Work(group.size - 1 - far, far, near, far_sent, own=part)


def _send(nbytes: int, group: Group) -> _Work:
    """One message from a rank to another, in the same node or far."""
    far = group.nodes - 1
    return _Work(1 - far, far, nbytes * (1 - far), nbytes * far)


def latency_of(card: Card) -> Latency:
    """Seconds of a collective of no bytes on a card."""
    if not card.nvlink_bandwidth:
        return CONSTANTS.pcie
    if card.capability >= (10, 0):
        return CONSTANTS.blackwell
    return CONSTANTS.hopper if card.capability >= (9, 0) else CONSTANTS.ampere


def near_bandwidth(group: Group, topology: Topology) -> float:
    """Bytes/s that each rank of a group sends to the next in its node, at most.

    Without NVLink all ranks of a node share what its host moves.
    """
    c, card, ranks = CONSTANTS, topology.card, topology.ranks_per_node
    if card.nvlink_bandwidth:
        return card.nvlink_bandwidth * c.link
    if group.most <= 2:
        return card.pcie_bandwidth * c.pair
    share = c.host * (c.sockets if ranks > c.socket else 1.0)
    return card.pcie_bandwidth * min(share / ranks, c.pair)


def far_bandwidth(topology: Topology) -> float:
    """Bytes/s that each rank of a node sends to others, over PCIe and its adapter."""
    adapter = topology.network.bandwidth / topology.ranks_per_node * CONSTANTS.network
    return min(adapter, topology.card.pcie_bandwidth * CONSTANTS.adapter)


def _seconds_of_bytes(
    work: _Work,
    share: float,
    group: Group,
    topology: Topology,
    most: float = math.inf,
    fills: bool = False,
) -> float:
    """Seconds of an algorithm's bytes, with a share of each link or `most` bytes/s."""
    c = CONSTANTS
    near, far = work.sent, work.far_sent / work.adapters
    if topology.card.nvlink_bandwidth:
        near += work.own * c.own
    if fills:
        near += c.fill * min(near, c.filled)
        far += c.far_fill * min(far, c.far_filled / topology.ranks_per_node)
    near_link, far_link = near_bandwidth(group, topology), far_bandwidth(topology)
    return max(near / min(near_link * share, most), far / min(far_link * share, most))


def _message(work: _Work, nbytes: int, group: Group, topology: Topology) -> float:
    """Seconds of one send."""
    c = CONSTANTS
    start, _ = latency_of(topology.card)
    latency = start + work.far_hops * topology.network.latency
    simple = start * c.simple.wait + _seconds_of_bytes(work, 1.0, group, topology)
    return latency + min(_ll_part(work, nbytes, group, topology), simple)


def _direct(work: _Work, part: float, group: Group, topology: Topology) -> float:
    """Seconds of sends and receives that go at once, each of `part` bytes."""
    c = CONSTANTS
    start, hop = latency_of(topology.card)
    # those to the other ranks are under way together, near and far
    latency = start + (group.size - 2) * c.peer * hop
    latency += topology.network.latency if work.far_hops else 0.0
    share = c.sends if topology.card.nvlink_bandwidth else 1.0
    simple = c.send + _seconds_of_bytes(work, share, group, topology)
    return latency + min(c.ll_send + _ll_part(work, part, group, topology), simple)


def _ll_part(work: _Work, part: float, group: Group, topology: Topology) -> float:
    """Seconds of the bytes of sends with LL."""
    c = CONSTANTS
    all_parts = _seconds_of_bytes(work, c.ll.bandwidth, group, topology)
    return max(part / c.ll_part, all_parts)


def _relayed(
    work: _Work, protocol: Protocol, group: Group, topology: Topology
) -> float:
    """Seconds of an algorithm in which ranks pass on what they have received."""
    c = CONSTANTS
    start, hop = latency_of(topology.card)
    latency = start * (1 + protocol.step)
    # a hop between nodes begins and ends with one inside
    hops = work.hops + work.far_hops
    latency += hops * (start * protocol.wait + hop * protocol.hop)
    latency += work.far_hops * topology.network.latency
    most = c.ll_bandwidth if protocol is c.ll else math.inf
    fills = protocol is c.simple
    return latency + _seconds_of_bytes(
        work, protocol.bandwidth, group, topology, most, fills
    )


def _switched(work: _Work, group: Group, topology: Topology) -> float:
    """Seconds of an all-reduce in the NVSwitch."""
    start, _ = latency_of(topology.card)
    latency = start * (1 + CONSTANTS.nvls_step)
    latency += work.far_hops * topology.network.latency
    return latency + _seconds_of_bytes(work, 1.0, group, topology, fills=True)


def _candidates(
    name: str, nbytes: int, group: Group, topology: Topology
) -> dict[str, float]:
    """Seconds of each algorithm that NCCL has for a collective."""
    c, card = CONSTANTS, topology.card
    if name == "send":
        return {"direct": _message(_send(nbytes, group), nbytes, group, topology)}
    if name in ("all_to_all", "gather", "scatter"):
        work = _parts(nbytes, group, card.nvlink_bandwidth > 0)
        return {"direct": _direct(work, nbytes / group.size, group, topology)}
    if name == "all_reduce":
        algorithms = {"ring": _ring(2, nbytes, group), "tree": _tree(nbytes, group)}
    elif name in ("all_gather", "reduce_scatter"):
        algorithms = {"ring": _ring(1, nbytes, group)}
    else:
        algorithms = {"ring": _chain(nbytes, group)}
    protocols = [c.ll, c.simple]
    # NCCL's LL128 needs NVLink, and writes that arrive in their order
    if card.nvlink_bandwidth and (group.nodes == 1 or topology.network.ordered):
        protocols.append(c.ll128)
    found = {
        algorithm: min(_relayed(work, p, group, topology) for p in protocols)
        for algorithm, work in algorithms.items()
    }
    # NCCL uses the switch of Hopper's NVLink from three GPUs on
    hopper = card.capability >= (9, 0) and card.nvlink_bandwidth
    if name == "all_reduce" and hopper and group.adapters > 2:
        found["NVLS"] = _switched(_nvls(nbytes, group), group, topology)
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
