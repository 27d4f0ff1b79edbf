"""Figures that were measured -> the constants of a card and of a network.

Each constant is that with which the model's own formula has the right median over the
rows that it decides, one after the other:

    memory_bandwidth   sums of 16 MiB and more, with a cold L2 cache
    pcie_bandwidth     pinned copies of 64 MiB and more, both ways
    host               launches in a row; a sum between two events; pinned copies of
                       4 KiB; pageable copies of 64 MiB and more
    flops, reached     products of each type, of at least a tenth of the largest's FLOPs
    attention          fused attention, the same
    nvlink_bandwidth   all-reduce, all-gather and reduce-scatter of 64 MiB and more
                       inside one machine, or else copies between two cards. None, if
                       that is not 1.5 times as fast as PCIe: it is PCIe then
    network            bandwidth: the same collectives of 64 MiB and more between
                       machines; latency: those of 64 KiB and less

What was not measured is as in the table for the same card, or else for the nearest one:
of the same compute capability, or an older one. Of a card that is in the table, the
peaks stay those of its datasheet, and the shares that are reached are fitted; of any
other, the shares are the nearest card's.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from simgpu import costs
from simgpu._device.cards import CARDS, MORE_CARDS, Card, Host
from simgpu._timing.collective_cost import choose
from simgpu._timing.cost import ASSUMED
from simgpu._timing.kernel_cost import (
    Attention,
    Product,
    Work,
    kernel_seconds,
    product_seconds,
)
from simgpu._timing.topology import Network, Topology

KNOWN = CARDS | MORE_CARDS
LARGE, SMALL = 64 * 2**20, 64 * 2**10  # bytes of a message
LARGE_SUM = 16 * 2**20  # bytes of a sum
NVLINK = 1.5  # times PCIe
_STEPS = 60  # of a bisection
_SHARE = 0.1  # of the largest's FLOPs
# kind of recording -> the type in which it computes, and bytes of an element
_PRODUCTS = {
    "gemm_bf16": ("bfloat16", 2),
    "gemm_fp16": ("float16", 2),
    "gemm_tf32": ("tf32", 4),
    "gemm_fp64": ("float64", 8),
    "gemm_fp32": ("float32", 4),
}
_RINGS = ("all_reduce", "all_gather", "reduce_scatter")
US = 1e-6

Rows = Sequence[list]


class Fitted(NamedTuple):
    """A card, and what of it was measured."""

    card: Card
    like: str  # the card of the table that has the rest
    measured: list[str]  # constants


def nearest(properties: dict[str, Any]) -> str:
    """The card of the table that is most like one: by name, or by generation."""
    capability = tuple(properties["capability"])
    for key, card in KNOWN.items():
        if card.name == properties["name"]:
            return key

    def far(key: str) -> tuple:
        card = KNOWN[key]
        processors = properties.get("multi_processors", card.multi_processors)
        off = abs(math.log(card.multi_processors / processors))
        if card.capability <= capability:
            return 0, [-part for part in card.capability], off
        return 1, list(card.capability), off

    return min(KNOWN, key=far)


def solve(ratio: Callable[[float], float], low: float, high: float) -> float:
    """Where a ratio that falls is 1, between two bounds: the lowest such place."""
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if ratio(middle) > 1 + 1e-9 else (low, middle)
    return float(f"{high:.6g}")


def _median(pairs: Sequence[tuple[float, float]]) -> float:
    """Of predicted over recorded."""
    return statistics.median(predicted / recorded for predicted, recorded in pairs)


# -- a card ----------------------------------------------------------------------------


def card_of(
    properties: dict[str, Any], recordings: dict[str, Rows], launch: float | None
) -> Fitted:
    """The constants of a card.

    Args:
        properties: what the driver says of it, under the names of `Card`.
        recordings: kind -> rows.
        launch: seconds of the host for a launch, if that was measured.
    """
    like = nearest(properties)
    known = KNOWN[like].name == properties["name"]
    given = properties | {"capability": tuple(properties["capability"])}
    card = dataclasses.replace(KNOWN[like], **given)
    if not known:  # whether it has NVLink must be measured
        card = dataclasses.replace(card, nvlink_bandwidth=0)
    measured = list(given)
    for name, step in _STEPS_OF_CARD.items():
        if name == "host":
            found = card
            if launch is not None:
                host = _host(card, recordings, launch)
                found = dataclasses.replace(card, host=host)
                found = _pcie(found, recordings, known)  # now that its latency is known
        else:
            found = step(card, recordings, known)
        if found is not card:
            card = found
            measured.append(name)
    return Fitted(card, like, measured)


def _memory(card: Card, recordings: dict[str, Rows], known: bool) -> Card:
    rows = [(row[2], row[3] * US) for row in recordings.get("add_fp16", ())]
    rows = [row for row in rows if row[0] >= max(LARGE_SUM, 2 * card.l2_cache)]
    if not rows:
        return card

    def with_it(bandwidth: float) -> Card:
        return dataclasses.replace(card, memory_bandwidth=bandwidth)

    def ratio(bandwidth: float) -> float:
        its = with_it(bandwidth)
        return _median([(kernel_seconds(its, Work(n)), us) for n, us in rows])

    return with_it(solve(ratio, 1e9, 1e15))


def _products(card: Card, recordings: dict[str, Rows], known: bool) -> Card:
    found = card
    for kind, (dtype, size) in _PRODUCTS.items():
        rows = [_product(kind, row, size) for row in recordings.get(kind, ())]
        rows = _large([row for row in rows if row is not None])
        if rows:
            found = _with_rate(found, dtype, rows, known)
    return found


class _Row(NamedTuple):
    """A product that was measured."""

    product: Product
    nbytes: int
    seconds: float

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.product[:4])


def _product(kind: str, row: list, size: int) -> _Row | None:
    """A row of products; of those between two events only one large one."""
    if kind == "gemm_fp32":
        _, op, batch, rows, inner, columns, us = row
        if op != "linear":
            return None
        rows *= batch
    else:
        _, rows, columns, inner, us = row
    elements = rows * inner + inner * columns + rows * columns
    return _Row(Product(1, rows, columns, inner), elements * size, us * US)


def _large(rows: list[_Row]) -> list[_Row]:
    most = max((row.flops for row in rows), default=0)
    return [row for row in rows if row.flops >= _SHARE * most]


def _with_rate(card: Card, dtype: str, rows: list[_Row], known: bool) -> Card:
    # what a launch adds to those between two events
    host = card.host or ASSUMED
    more = host.launch + host.start if dtype == "float32" else 0.0
    peak, share = card.flops[dtype], card.reached[dtype]

    def with_it(rate: float) -> Card:
        if known:
            return dataclasses.replace(
                card, reached=card.reached | {dtype: rate / peak}
            )
        return dataclasses.replace(card, flops=card.flops | {dtype: rate / share})

    def ratio(rate: float) -> float:
        its = with_it(rate)
        return _median([
            (product_seconds(its, row.product, dtype, row.nbytes) + more, row.seconds)
            for row in rows
        ])  # fmt: skip

    return with_it(solve(ratio, 1e9, 1e17))


def _attention(card: Card, recordings: dict[str, Rows], known: bool) -> Card:
    rows = []
    for _, sequences, tokens, heads, _, width, us in recordings.get(
        "attention_sdpa", ()
    ):
        elements = sequences * heads * tokens * width
        # queries, keys, values and the result; a number for each row of the softmax
        nbytes = 4 * elements * 2 + sequences * heads * tokens * 4
        shape = Attention(sequences * heads, tokens, tokens, width, causal=True)
        rows.append((Work(nbytes, 4 * elements * tokens, elements, "bfloat16", None,
                          1.0, True, shape), us * US))  # fmt: skip
    most = max((work.flops for work, _ in rows), default=0)
    rows = [row for row in rows if row[0].flops >= _SHARE * most]
    if not rows:
        return card

    def with_it(share: float) -> Card:
        return dataclasses.replace(card, reached=card.reached | {"attention": share})

    def ratio(share: float) -> float:
        its = with_it(share)
        return _median([(kernel_seconds(its, work), us) for work, us in rows])

    return with_it(solve(ratio, 1e-3, 1e3))


def _copies(recordings: dict[str, Rows], memory: str, large: bool = True):
    """(way, bytes, seconds) of copies."""
    return [
        (way, nbytes, nbytes / (rate * 1e9))
        for _, way, its, nbytes, rate in recordings.get("copies", ())
        if its == memory and nbytes and (nbytes >= LARGE) == large
    ]


def _pcie(card: Card, recordings: dict[str, Rows], known: bool) -> Card:
    rows = _copies(recordings, "pinned")
    if not rows:
        return card

    def with_it(bandwidth: float) -> Card:
        return dataclasses.replace(card, pcie_bandwidth=bandwidth)

    def ratio(bandwidth: float) -> float:
        its = with_it(bandwidth)
        return _median([(_to_host(its, n, pinned=True), took) for _, n, took in rows])

    return with_it(solve(ratio, 1e8, 1e13))


def _to_host(card: Card, nbytes: int, pinned: bool) -> float:
    return costs.copy_seconds(card, None, nbytes, pinned)


def _host(card: Card, recordings: dict[str, Rows], launch: float) -> Host:
    found = ASSUMED._replace(launch=launch)
    floors = [row for row in recordings.get("host_floor", ()) if row[1] == "add"]
    if floors:
        kernel = kernel_seconds(card, Work(3 * 64 * 128 * 4))
        found = found._replace(start=max(floors[0][3] * US - launch - kernel, 0.0))
    if rows := _copies(recordings, "pinned", large=False):
        of_bytes = _to_host(card, rows[0][1], True) - ASSUMED.copy
        took = statistics.median(seconds for _, _, seconds in rows)
        found = found._replace(copy=max(took - of_bytes, 0.0))
    if rows := _copies(recordings, "pageable"):
        rates = [nbytes / (took - found.copy) for _, nbytes, took in rows]
        found = found._replace(copy_bandwidth=statistics.median(rates))
    return found


def _between_cards(card: Card, recordings: dict[str, Rows], known: bool) -> Card:
    if recordings.get("nccl_tests"):
        rows = [row[1:] for row in recordings["nccl_tests"]
                if row[1] in _RINGS and row[3] >= LARGE]  # fmt: skip

        def seconds(its: Card, row: list) -> float:
            name, ranks, nbytes, _ = row
            return choose(name, nbytes, range(ranks), Topology(its, ranks)).seconds

        pairs: list[tuple[Any, float]] = [(row, row[-1] * US) for row in rows]
    else:

        def seconds(its: Card, nbytes: int) -> float:
            return costs.copy_seconds(its, its, nbytes, pinned=True)

        pairs = [(n, took) for _, n, took in _copies(recordings, "peer")]
    if not pairs:
        return card

    def with_it(bandwidth: float) -> Card:
        return dataclasses.replace(card, nvlink_bandwidth=bandwidth)

    def ratio(bandwidth: float) -> float:
        its = with_it(bandwidth)
        return _median([(seconds(its, row), took) for row, took in pairs])

    bandwidth = solve(ratio, 1e8, 1e14)
    return with_it(bandwidth if bandwidth > NVLINK * card.pcie_bandwidth else 0)


_STEPS_OF_CARD = {
    "memory_bandwidth": _memory,
    "pcie_bandwidth": _pcie,
    "host": None,
    "flops": _products,
    "attention": _attention,
    "nvlink_bandwidth": _between_cards,
}


# -- a network -------------------------------------------------------------------------


def network_of(card: Card, rows: Rows) -> Network | None:
    """The network of a machine, all its adapters together; None without rows.

    Args:
        card: of every rank.
        rows: of "nccl_nodes".
    """
    wanted = [row for row in rows if row[1] in _RINGS]
    large = [row for row in wanted if row[5] >= LARGE]
    small = [row for row in wanted if row[5] <= SMALL]
    if not large:
        return None

    def ratio(network: Network, rows: Rows) -> float:
        pairs = []
        for _, name, nodes, ranks, _, nbytes, us in rows:
            topology = Topology(card, ranks // nodes, nodes, network)
            pairs.append(
                (choose(name, nbytes, range(ranks), topology).seconds, us * US)
            )
        return _median(pairs)

    network = Network(1e9)
    for _ in range(3):
        found = network
        network = found._replace(
            bandwidth=solve(lambda x: ratio(found._replace(bandwidth=x), large),  # noqa: B023
                            1e6, 1e14)
        )  # fmt: skip
        if small:
            both = network
            network = both._replace(
                latency=1 / solve(lambda x: ratio(both._replace(latency=1 / x), small),  # noqa: B023
                                  1e1, 1e9)
            )  # fmt: skip
    return network
