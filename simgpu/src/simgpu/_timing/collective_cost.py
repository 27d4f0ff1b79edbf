"""Seconds of a collective, from its message size, its ranks and their topology.

Models: NCCL's algorithms ring, tree and NVLS (the NVSwitch reduces), and plain sends,
with the protocols LL (starts at once, little bandwidth), LL128 (some of it) and Simple
(starts late, all of the bandwidth). Each takes

    start + latency of hops + bytes on the busiest link / its bandwidth

and the fastest is chosen, as NCCL's tuner does. A rank also copies its own part from
its input to its output. Without NVLink two ranks meet at a PCIe switch, and more share
what the host moves. Each rank of a node has its own share of the network, as if the
others used theirs. Leaves out: sizes at which NCCL's tuner does not choose the fastest;
other work on the same links; and the wait for the last rank, which is the clock's
business.
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
    share: float  # of the bandwidth that the link reaches


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
    # Without NVLink; fitted to one kind of machine with L40S
    pair: float = 0.66  # of PCIe's bandwidth, of each of two ranks
    # bytes/s that the host moves for more than two together, with any card: assumed
    host: float = 21.1e9
    sockets: float = 0.55  # of that, with more than `socket` ranks
    socket: int = 4  # ranks on a socket of the host; assumed
    # Of the network's bandwidth. A rank's first bytes take its latency once more for
    # each chunk. Both fitted to two nodes of A100 with EFA
    network: float = 0.95
    far_chunk: float = 290e3
    far_filled: float = 16e6  # of all ranks of a node
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
    tree = _tree(nbytes, group)
    return _Work(0, tree.far_hops, sent, tree.far_sent, group.adapters)


def _parts(nbytes: int, group: Group, nvlink: bool) -> _Work:
    """All-to-all, gather, scatter: a part between a rank and each of the others.

    The rank is where it takes longest. Without NVLink all its parts share its PCIe.
    """
    part, far = nbytes / group.size, group.nodes - 1
    near = part * ((group.most if nvlink else group.size) - 1)
    far_sent = part * (group.size - group.adapters)
    return _Work(group.size - 1 - far, far, near, far_sent, own=part)


def latency_of(card: Card) -> Latency:
    """Seconds of a collective of no bytes on a card."""
    if not card.nvlink_bandwidth:
        return CONSTANTS.pcie
    if card.capability >= (10, 0):
        return CONSTANTS.blackwell
    return CONSTANTS.hopper if card.capability >= (9, 0) else CONSTANTS.ampere


class _Links(NamedTuple):
    """What connects the ranks of a group. Bandwidths are those that are reached."""

    start: float
    hop: float
    near: float  # bytes/s from each rank to the next in its node
    far: float  # bytes/s from each rank of a node to others
    far_hop: float  # seconds from node to node
    own: float  # bytes over the link that a byte of a rank's own part costs
    far_filled: float  # bytes of a rank


def _links_of(group: Group, topology: Topology) -> _Links:
    c, card, ranks = CONSTANTS, topology.card, topology.ranks_per_node
    network = topology.network
    adapter = network.bandwidth / ranks * c.network
    far = min(adapter, card.pcie_bandwidth * c.adapter)
    own = 0.0
    if card.nvlink_bandwidth:
        near, own = card.nvlink_bandwidth * c.link, c.own
    elif group.most <= 2:
        near = card.pcie_bandwidth * c.pair
    else:  # all ranks of a node share what its host moves
        share = c.host * (c.sockets if ranks > c.socket else 1.0) / ranks
        near = min(share, card.pcie_bandwidth * c.pair)
    start, hop = latency_of(card)
    filled = c.far_filled / ranks
    return _Links(start, hop, near, far, network.latency, own, filled)


def _relayed(work: _Work, protocol: Protocol, links: _Links) -> float:
    """Seconds of an algorithm in which ranks pass on what they have received."""
    c = CONSTANTS
    # a hop between nodes begins and ends with one inside
    hops = work.hops + work.far_hops
    latency = links.start * (1 + protocol.step + hops * protocol.wait)
    latency += hops * links.hop * protocol.hop + work.far_hops * links.far_hop
    near, far = work.sent + work.own * links.own, work.far_sent / work.adapters
    near_link, far_link = links.near * protocol.share, links.far * protocol.share
    fill = 0.0
    if protocol is c.ll:
        near_link = min(near_link, c.ll_bandwidth)
        far_link = min(far_link, c.ll_bandwidth)
    elif protocol is c.simple:
        near += c.fill * min(near, c.filled)
        fill = min(far, links.far_filled) / c.far_chunk * links.far_hop
    return latency + max(near / near_link, far / far_link + fill)


def _switched(work: _Work, links: _Links) -> float:
    """Seconds of an all-reduce in the NVSwitch."""
    switch = CONSTANTS.simple._replace(step=CONSTANTS.nvls_step, wait=0.0)
    return _relayed(work, switch, links)


def _of_sends(work: _Work, part: float, links: _Links) -> tuple[float, float]:
    """Seconds of the bytes of sends, each of `part` bytes, with LL and with Simple."""
    near, far = work.sent + work.own * links.own, work.far_sent / work.adapters
    simple = max(near / links.near, far / links.far)
    return max(part / CONSTANTS.ll_part, simple / CONSTANTS.ll.share), simple


def _message(nbytes: int, group: Group, links: _Links) -> float:
    """Seconds of one message from a rank to another, in the same node or far."""
    far = group.nodes - 1
    work = _Work(1 - far, far, nbytes * (1 - far), nbytes * far)
    ll, simple = _of_sends(work, nbytes, links)
    simple += links.start * CONSTANTS.simple.wait
    return links.start + far * links.far_hop + min(ll, simple)


def _direct(nbytes: int, group: Group, links: _Links, nvlink: bool) -> float:
    """Seconds of all-to-all, gather, scatter: sends and receives that go at once."""
    c = CONSTANTS
    work = _parts(nbytes, group, nvlink)
    ll, simple = _of_sends(work, nbytes / group.size, links)
    if nvlink:
        simple /= c.sends
    # those to the other ranks are under way together, near and far
    latency = links.start + (group.size - 2) * c.peer * links.hop
    latency += links.far_hop if group.nodes > 1 else 0.0
    return latency + min(c.ll_send + ll, c.send + simple)


def _candidates(
    name: str, nbytes: int, group: Group, topology: Topology
) -> dict[str, float]:
    """Seconds of each algorithm that NCCL has for a collective."""
    c, card, links = CONSTANTS, topology.card, _links_of(group, topology)
    nvlink = card.nvlink_bandwidth > 0
    if name == "send":
        return {"direct": _message(nbytes, group, links)}
    if name in ("all_to_all", "gather", "scatter"):
        return {"direct": _direct(nbytes, group, links, nvlink)}
    if name == "all_reduce":
        algorithms = {"ring": _ring(2, nbytes, group), "tree": _tree(nbytes, group)}
    elif name in ("all_gather", "reduce_scatter"):
        algorithms = {"ring": _ring(1, nbytes, group)}
    else:
        algorithms = {"ring": _chain(nbytes, group)}
    # NCCL's LL128 needs NVLink, and writes that arrive in their order
    ll128 = nvlink and (group.nodes == 1 or topology.network.ordered)
    found = {}
    for algorithm, work in algorithms.items():
        found[algorithm] = min(
            _relayed(work, c.ll, links), _relayed(work, c.simple, links)
        )
        if ll128:
            found[algorithm] = min(found[algorithm], _relayed(work, c.ll128, links))
    # NCCL uses the switch of Hopper's NVLink from three GPUs on
    if name == "all_reduce" and nvlink and group.adapters > 2:
        if card.capability >= (9, 0):
            found["NVLS"] = _switched(_nvls(nbytes, group), links)
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
