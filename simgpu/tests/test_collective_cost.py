"""What a collective costs: against recordings, and where ranks lie in nodes."""

import subprocess
import sys
from pathlib import Path

import pytest

from recorded.comparison import figures_of
from recorded.files import read
from recorded.operations import compare
from simgpu._device.cards import CARDS
from simgpu._timing.collective_cost import FACTORS, choose, collective_seconds
from simgpu._timing.topology import Network, Topology, parse_bandwidth
from support.limits import SHORT

RECORDINGS = Path(__file__).parent / "recordings"
MIB = 1024**2
A100, H100, T4 = CARDS["A100"], CARDS["H100"], CARDS["T4"]
ONE_NODE = Topology(A100, 8)
TWO_NODES = Topology(A100, 8, nodes=2, network="200 GB/s")
SIXTEEN_NODES = Topology(A100, 8, nodes=16)


# -- recordings ------------------------------------------------------------------------


def _recorded(name):
    (recording,) = (r for r in read(RECORDINGS) if r.name == name)
    rows, omitted = compare(recording)
    assert omitted == []
    return rows


@pytest.mark.parametrize("fitted", [True, False])
@pytest.mark.parametrize("name, of, number, apart, near", [
    ("nccl_tests", "A100", 252, 0.05, 0.95), ("nccl_tests", "H100", 252, 0.05, 0.94),
    ("nccl_tests", "B200", 252, 0.05, 0.95), ("nccl_tests", "L40S", 252, 0.05, 0.86),
    ("nccl_nodes", "2 nodes", 29, 0.1, 0.85),  # over EFA
])  # fmt: skip
def test_collectives_take_what_was_recorded(name, of, number, apart, near, fitted):
    rows = [row for row in _recorded(name) if of == row.card or of in row.what]
    assert len(rows) == number
    found = figures_of(row for row in rows if row.fitted == fitted)
    assert 1 - apart < found.median < 1 + apart and found.near > near


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
def test_small_messages_take_what_was_recorded(name):
    rows = [r for r in _recorded("nccl_tests") if r.what.startswith(f"{name} of")]
    small = [r for r in rows if 2**16 <= int(r.what.split()[2]) <= 2**22]
    near = figures_of(r for r in small if r.card != "L40S")  # its machine is uneven
    assert 0.95 < near.median < 1.05 and near.near > 0.9


def test_kernels_that_wait_for_the_last_rank_take_longer():
    # recorded from the launch of each rank, at times of the order of a small message
    rows = [row for row in _recorded("nccl_nvlink") if "all_reduce" in row.what]
    assert len(rows) == 40 and not any(row.fitted for row in rows)
    found = figures_of(rows)
    assert 0.85 < found.median < 1 and found.low < 0.5 and found.high < 1.3


# kernel times on 8 H100, the smallest of the ranks: (collective, MiB, microseconds)
# NVIDIA/Megatron-LM, pull request 5596, without symmetric memory; and nccl-tests on 2
# nodes of 8 H100 with 8 x 200 Gbit/s over TCP (GCP's a3-megagpu-8g):
# lessizzmore/create-a3mega-ztan-fork @ 02dd8f455c43, ztan-NCCL-test-result
@pytest.mark.parametrize("name, nodes, mib, microseconds", [
    ("all_gather", 1, 8, 43.4), ("all_gather", 1, 32, 118.9),
    ("all_gather", 1, 128, 385.3), ("reduce_scatter", 1, 8, 47.0),
    ("reduce_scatter", 1, 32, 112.6),
    ("all_reduce", 2, 1024, 6759), ("all_reduce", 2, 8192, 47535),
])  # fmt: skip
def test_what_was_published_is_predicted(name, nodes, mib, microseconds):
    topology = Topology(H100, 8, nodes=nodes, network="1.6 Tbit/s")
    seconds = collective_seconds(name, mib * MIB, range(8 * nodes), topology)
    assert 1 / 1.3 < seconds * 1e6 / microseconds < 1.3


# -- what follows from the model -------------------------------------------------------


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("topology", [ONE_NODE, TWO_NODES, Topology(T4, 4, nodes=3)])
def test_more_bytes_never_take_less_time(name, topology):
    ranks = [0, topology.world_size - 1] if name == "send" else range(8)
    sizes = [0, 1, *(int(1.3**k) for k in range(1, 80))]
    seconds = [collective_seconds(name, size, ranks, topology) for size in sizes]
    assert seconds == sorted(seconds) and seconds[0] > 0


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize("nbytes", [1024, 256 * MIB])
def test_two_nodes_cost_more_than_one(name, card, nbytes):
    # where ranks meet in the host, 8 adapters of their own would be faster than it is
    network = None if card.nvlink_bandwidth else "100 Gbit/s"
    topology = Topology(card, 8, nodes=2, network=network)
    near, far = ([0, 1], [0, 8]) if name == "send" else (range(8), range(4, 12))
    far_seconds = collective_seconds(name, nbytes, far, topology)
    assert far_seconds > collective_seconds(name, nbytes, near, topology)


# nccl-tests on 8 A100 reach 222, 205 and 213 GB/s with 512 MiB: a rank copies its own
# part as well, which counts half as much in an all-reduce
@pytest.mark.parametrize("name, of_link", [
    ("all_reduce", 0.757), ("all_gather", 0.737), ("reduce_scatter", 0.737)
])  # fmt: skip
def test_a_ring_of_large_messages_reaches_the_link(name, of_link):
    choice = choose(name, 2**34, range(8), ONE_NODE)
    assert choice.algorithm == "ring"
    reached = choice.bus_bandwidth / A100.nvlink_bandwidth
    assert reached == pytest.approx(of_link, rel=0.01)


def test_a_tree_is_faster_for_small_messages_of_many_ranks():
    ranks = range(SIXTEEN_NODES.world_size)
    assert choose("all_reduce", 1024, ranks, SIXTEEN_NODES).algorithm == "tree"
    assert choose("all_reduce", 2**32, ranks, SIXTEEN_NODES).algorithm == "ring"


@pytest.mark.parametrize(
    "card, ranks, expected",
    [(H100, 8, "NVLS"), (H100, 4, "NVLS"), (H100, 2, "ring"), (A100, 8, "ring")],
)
def test_the_switch_reduces_for_many_hopper_gpus(card, ranks, expected):
    choice = choose("all_reduce", 64 * MIB, range(ranks), Topology(card, 8))
    assert choice.algorithm == expected


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "all_to_all"])
def test_a_hierarchical_group_is_bounded_by_the_network(name):
    ranks = [0, 1, 2, 3, 8, 9, 10, 11]  # half of each node, so half of its network
    choice = choose(name, 2**32, ranks, TWO_NODES)
    assert choice.seconds > 2**31 / (200e9 / 2)  # half of the bytes must cross
    slower = Topology(A100, 8, nodes=2, network="20 GB/s")
    assert collective_seconds(name, 2**32, ranks, slower) > 9 * choice.seconds


def test_ranks_share_the_network_of_their_node():
    one_each = collective_seconds("all_reduce", 2**30, [0, 8], TWO_NODES)
    all_ranks = collective_seconds("all_reduce", 2**30, range(16), TWO_NODES)
    assert one_each > 4 * all_ranks  # 1/8 of the network


def test_pcie_is_slower_than_nvlink():
    nbytes = 256 * MIB
    slow = collective_seconds("all_reduce", nbytes, range(4), Topology(T4, 4))
    assert slow > 10 * collective_seconds("all_reduce", nbytes, range(4), ONE_NODE)


@pytest.mark.parametrize("name", FACTORS)
def test_a_group_of_one_costs_almost_nothing(name):
    choice = choose(name, 2**30, [3], ONE_NODE)
    assert choice.algorithm == "none" and choice.seconds < 1e-5


def test_bus_bandwidth_is_that_of_nccl_tests():
    choice = choose("all_reduce", MIB, range(4), ONE_NODE)
    assert choice.bus_bandwidth == pytest.approx(1.5 * MIB / choice.seconds)


def test_a_barrier_takes_as_long_as_the_smallest_all_reduce():
    smallest = collective_seconds("all_reduce", 4, range(16), TWO_NODES)
    assert collective_seconds("barrier", 0, range(16), TWO_NODES) == smallest


# -- topology --------------------------------------------------------------------------


def test_consecutive_ranks_fill_a_node():
    topology = Topology(A100, 2, nodes=3)
    assert [topology.node_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert topology.members([0, 1, 4]) == [2, 1]


@pytest.mark.parametrize("text, expected", [
    ("100 Gbit/s", 12.5e9), ("200Gb/s", 25e9), ("400 Gbps", 50e9), ("25 GB/s", 25e9),
    ("1.6 Tbit/s", 200e9), ("800 kbit/s", 1e5), (5e9, 5e9),
])  # fmt: skip
def test_bandwidths_are_read(text, expected):
    assert parse_bandwidth(text) == expected


@pytest.mark.parametrize("bad", ["fast", "100", "100 G", "0 GB/s", -1, 0, True, None])
def test_what_is_no_bandwidth_says_what_is(bad):
    with pytest.raises(ValueError, match='write "100 Gbit/s", "25 GB/s" or a number'):
        parse_bandwidth(bad)


@pytest.mark.parametrize("bad", ["400 Gbit/s ATM", "EFA", "fast EFA"])
def test_what_is_no_network_says_what_is(bad):
    with pytest.raises(ValueError, match='write "100 Gbit/s", "25 GB/s" or a number'):
        Topology(A100, 8, nodes=2, network=bad)


@pytest.mark.parametrize("text, card, expected", [
    ("400 Gbit/s EFA", A100, (50e9, 68e-6, False)),
    ("400 GB/s efa", H100, (400e9, 27e-6, True)),
    ("400 Gbit/s InfiniBand", H100, (50e9, 12e-6, True)),
    ("400 Gbit/s", H100, (50e9, 12e-6, True)),
    (5e9, A100, (5e9, 12e-6, True)),
    (None, A100, (8 * 25e9, 12e-6, True)),  # 200 Gbit/s for each rank
])  # fmt: skip
def test_a_network_may_say_its_kind(text, card, expected):
    assert Topology(card, 8, nodes=2, network=text).network == expected


def test_efa_has_a_floor_of_its_own():
    # what nccl-tests print of the smallest all-reduce of two nodes
    for card, network, recorded in ((A100, 50, 161e-6), (H100, 400, 69e-6)):
        topology = Topology(card, 8, nodes=2, network=f"{network} GB/s EFA")
        seconds = collective_seconds("all_reduce", 8, range(16), topology)
        assert seconds == pytest.approx(recorded, rel=0.1)


def test_more_ranks_share_the_host_where_there_is_no_nvlink():
    def bandwidth(card, ranks, node):
        topology = Topology(card, node)
        return choose("all_gather", 2**28, range(ranks), topology).bus_bandwidth

    fast = CARDS["L40S"]
    two, four, eight = (bandwidth(fast, n, n) for n in (2, 4, 8))
    assert two > 3 * four > 3 * 3 * eight
    assert bandwidth(fast, 2, 8) == two
    # two wait for their PCIe, more for the host, which is the same
    assert bandwidth(T4, 2, 2) < 0.6 * two
    assert bandwidth(T4, 4, 4) == pytest.approx(four)


def test_a_rank_reaches_the_network_over_pcie():
    topology = Topology(T4, 1, nodes=2, network="400 GB/s")
    seconds = collective_seconds("send", 2**30, [0, 1], topology)
    assert seconds > 2**30 / T4.pcie_bandwidth


def test_latency_of_the_network_counts():
    slow = Topology(A100, 1, nodes=2, network=Network(25e9, latency=1e-3))
    assert collective_seconds("send", 8, [0, 1], slow) > 1e-3


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: choose("allreduce", 8, [0, 1], ONE_NODE), "unknown collective"),
        (lambda: choose("all_reduce", -8, [0, 1], ONE_NODE), "message of -8 bytes"),
        (lambda: choose("all_reduce", 8, [], ONE_NODE), "at least one rank"),
        (lambda: choose("all_reduce", 8, [0, 8], ONE_NODE), "rank 8 is not in a job"),
        (lambda: choose("all_reduce", 8, [1, 1], ONE_NODE), "rank 1 occurs twice"),
        (lambda: choose("send", 8, [0, 1, 2], ONE_NODE), "two ends, not 3"),
        (lambda: ONE_NODE.node_of("0"), "a rank is an integer"),
        (lambda: Topology(A100, 0), "ranks_per_node must be an integer"),
        (lambda: Topology(A100, 8, nodes=1.5), "nodes must be an integer"),
        (lambda: Topology(A100, 8, network=Network(1e9, -1)), "latency"),
    ],
)
def test_bad_inputs_say_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_it_needs_no_pytorch():
    script = (
        "import sys, simgpu._timing.collective_cost; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=SHORT)
