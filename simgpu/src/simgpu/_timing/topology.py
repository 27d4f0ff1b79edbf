"""How the ranks of a job lie: in which node each one is, and what connects them.

Models: equal nodes, filled by consecutive ranks as torchrun fills them; one model of
card; NVLink through a switch, or PCIe, inside a node; one network between nodes. Leaves
out: nodes with different numbers of ranks, GPUs that NVLink connects only in pairs, and
how far apart two nodes are in the network.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

from simgpu._device import measured
from simgpu._device.cards import Card

# bytes/s for each rank of a node: 200 Gbit/s, as in NVIDIA's DGX A100, where each GPU
# has an adapter for HDR InfiniBand
DEFAULT_BANDWIDTH = 25e9
# seconds from one node to another over InfiniBand, assumed: no run was recorded. NCCL's
# tuner (src/graph/tuning.cc) takes 3 to 14 microseconds for a hop, by protocol; TCP
# takes several times as long
DEFAULT_LATENCY = 12e-6
# the same over EFA, the network of AWS: half of what the smallest all-reduce of two
# nodes takes (161 microseconds with A100, 69 with H100) besides its hops in a node
EFA_LATENCY = 27e-6  # of the second generation, from Hopper on; fitted to one figure
FIRST_EFA_LATENCY = 68e-6  # of machines with A100; fitted

_ACCEPTED = 'write "100 Gbit/s", "25 GB/s" or a number of bytes/s'
_KIND = re.compile(r"(?P<bandwidth>.*\S)\s+(?P<kind>EFA|InfiniBand)", re.IGNORECASE)
_BANDWIDTH = re.compile(
    r"(?P<number>\d+(?:\.\d+)?)\s*(?P<prefix>[kKMGT]?)"
    r"(?P<unit>bit|byte|b|B)s?(?:/s|ps)"
)
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


class Network(NamedTuple):
    """What connects the nodes. A node's ranks share its bandwidth equally."""

    bandwidth: float  # bytes/s that a node sends, and as many that it receives
    latency: float = DEFAULT_LATENCY  # seconds
    ordered: bool = True  # writes arrive in their order, as NCCL's LL128 needs


def network_of(text: float | str, card: Card) -> Network:
    """The network that `text` describes: a bandwidth, and maybe its kind.

    Args:
        text: bytes/s, "100 Gbit/s", "400 GB/s EFA" or "400 Gbit/s InfiniBand". Without
            a kind it is InfiniBand.
        card: of the nodes. AWS connects machines with A100 and older cards with the
            first generation of EFA, which does not keep the order of writes.

    Raises:
        ValueError: for what is not a bandwidth, with or without a kind.
    """
    found = _KIND.fullmatch(text.strip()) if isinstance(text, str) else None
    bandwidth = parse_bandwidth(found["bandwidth"] if found else text)
    if not found or found["kind"].lower() != "efa":
        return Network(bandwidth)
    first = card.capability < (9, 0)
    latency = FIRST_EFA_LATENCY if first else EFA_LATENCY
    return Network(bandwidth, latency, ordered=not first)


def parse_bandwidth(bandwidth: float | str) -> float:
    """Bytes/s in `bandwidth`: a number, or text such as "100 Gbit/s" or "25 GB/s".

    A small b means bits and a large B bytes. G is 1e9, as networks are sold.

    Raises:
        ValueError: for what is not a bandwidth, and for less than 1 byte/s.
    """
    if isinstance(bandwidth, str):
        match = _BANDWIDTH.fullmatch(bandwidth.strip())
        if not match:
            raise ValueError(f"cannot read {bandwidth!r} as a bandwidth; {_ACCEPTED}")
        bits = match["unit"] in ("bit", "b")
        number = float(match["number"]) * _PREFIXES[match["prefix"]]
        bandwidth = number / 8 if bits else number
    elif isinstance(bandwidth, bool) or not isinstance(bandwidth, (int, float)):
        raise ValueError(f"cannot read {bandwidth!r} as a bandwidth; {_ACCEPTED}")
    if not 1 <= bandwidth < math.inf:
        raise ValueError(f"{bandwidth} bytes/s is no bandwidth; {_ACCEPTED}")
    return float(bandwidth)


def measured_network(path: str) -> Network:
    """The network that a file of `simgpu measure` has.

    Raises:
        ValueError: for a file that is not there, or has no network.
    """
    try:
        return Network(**measured.constants(path, "network"))
    except TypeError as error:
        raise measured.damaged(path, "network", error) from None


@dataclass(frozen=True)
class Topology:
    """The ranks of a job on their nodes.

    Args:
        card: the model of every GPU; its `nvlink_bandwidth` is 0 where a node has PCIe.
        ranks_per_node: each rank has one GPU.
        nodes: in the job.
        network: of a node, all its adapters together: a `Network`, text such as
            "100 Gbit/s" or "400 GB/s EFA", or bytes/s; see `network_of`; or a file that
            `simgpu measure` has written, "my.json". The default is 200 Gbit/s of
            InfiniBand for each rank of a node.

    Raises:
        ValueError: for fewer than one node or rank, or a network that cannot be read.
    """

    card: Card
    ranks_per_node: int
    nodes: int = 1
    network: Network | float | str | None = None

    def __post_init__(self):
        for name in ("nodes", "ranks_per_node"):
            number = getattr(self, name)
            if (
                isinstance(number, bool)
                or not isinstance(number, Integral)
                or number < 1
            ):
                raise ValueError(f"{name} must be an integer of 1 or more: {number!r}")
        network = self.network
        if measured.names_file(network):
            network = measured_network(network)
        if network is None:
            network = Network(DEFAULT_BANDWIDTH * self.ranks_per_node)
        elif isinstance(network, Network):
            network = network._replace(bandwidth=parse_bandwidth(network.bandwidth))
        else:
            network = network_of(network, self.card)
        if not 0 <= network.latency < math.inf:
            raise ValueError(f"a network's latency in seconds: {network.latency!r}")
        object.__setattr__(self, "network", network)  # frozen

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """The node of a rank, which torchrun calls GROUP_RANK.

        Raises:
            ValueError: for a rank that the job does not have.
        """
        if isinstance(rank, bool) or not isinstance(rank, Integral):
            raise ValueError(f"a rank is an integer, not {rank!r}")
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {rank} is not in a job of {self.world_size} ranks"
                f" ({self.nodes} x {self.ranks_per_node})"
            )
        return rank // self.ranks_per_node

    def members(self, ranks: Iterable[int]) -> list[int]:
        """How many of these ranks each of their nodes has, for example [2, 2].

        Raises:
            ValueError: for no rank, one that occurs twice, or one the job has not.
        """
        ranks = list(ranks)
        if not ranks:
            raise ValueError("a group has at least one rank")
        nodes = Counter(self.node_of(rank) for rank in ranks)
        twice = [rank for rank, times in Counter(ranks).items() if times > 1]
        if twice:
            raise ValueError(f"rank {twice[0]} occurs twice in the group {ranks}")
        return [nodes[node] for node in sorted(nodes)]
