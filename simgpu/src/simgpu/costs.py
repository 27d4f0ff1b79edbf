"""What the model says work costs: its constants, and its formulas.

    from simgpu import CARDS, costs
    costs.copy_seconds(None, CARDS["A100"], 2**30, pinned=True)    # from the host
    product = costs.Product(1, 4096, 4096, 4096)
    costs.product_seconds(CARDS["A100"], product, "float16", nbytes=3 * 2**25)

Public so that a program can compare what it predicts with what the simulator counts,
and show of what its microseconds are made. The values are fitted or assumed, as the
comments in `_timing/` say with their sources; they may change in any minor release, and
simulated times with them.
"""

from typing import NamedTuple

from simgpu._device.cards import Card
from simgpu._timing import cost
from simgpu._timing.collective_cost import CONSTANTS as COLLECTIVES
from simgpu._timing.collective_cost import Choice
from simgpu._timing.collective_cost import choose as choose_collective
from simgpu._timing.cost import (
    COPY_LATENCY,
    EVENT,
    HOST_COPY,
    LAUNCH,
    OF_PEAK_BYTES,
    PIN,
    PIN_LATENCY,
    START,
    pin_seconds,
)
from simgpu._timing.kernel_cost import (
    FLOOR,
    OF_BANDWIDTH,
    PRODUCT_CLOCKS,
    PRODUCT_FLOOR,
    PRODUCT_OF_BANDWIDTH,
    Attention,
    Product,
    Work,
    attention_seconds,
    kernel_seconds,
    product_seconds,
)
from simgpu._timing.topology import Network, Topology

__all__ = [
    "Attention", "COLLECTIVES", "COPY_LATENCY", "Choice", "EVENT", "FLOOR", "HOST_COPY",
    "LAUNCH", "Network", "OF_BANDWIDTH", "OF_PEAK_BYTES", "PIN", "PIN_LATENCY",
    "PRODUCT_CLOCKS", "PRODUCT_FLOOR", "PRODUCT_OF_BANDWIDTH", "Product", "START",
    "Topology", "Work", "attention_seconds", "choose_collective", "copy_bandwidth",
    "copy_seconds", "kernel_seconds", "pin_seconds", "product_seconds",
]  # fmt: skip


class _End(NamedTuple):
    """An end of a copy, as the clock's own formula reads it."""

    card: Card


def copy_bandwidth(source: Card | None, target: Card | None, pinned: bool) -> float:
    """Bytes a second of a copy between two cards, or a card and the host (None).

    Args:
        source: where the bytes are.
        target: where they go; one of the two is a card. Two use NVLink if both have it.
        pinned: whether the host's end is pinned memory; of no account between cards.
    """
    bandwidth: float = cost.copy_bandwidth(_end(source), _end(target), pinned)
    return bandwidth


def copy_seconds(
    source: Card | None, target: Card | None, nbytes: int, pinned: bool
) -> float:
    """Seconds of a copy of `nbytes`; see `copy_bandwidth` for the other arguments."""
    seconds: float = cost.copy_seconds(_end(source), _end(target), nbytes, pinned)
    return seconds


def _end(card: Card | None) -> _End | None:
    return None if card is None else _End(card)
