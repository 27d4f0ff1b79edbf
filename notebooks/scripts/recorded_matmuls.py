"""Matmuls in float16 that others measured on real A100s and H100s, as the course reads.

`recorded_matmuls.json` has them and names their source: the kernel alone, by PyTorch's
profiler, with a resolution of 1 µs. Used in lesson 08.
"""

import json
from pathlib import Path
from typing import NamedTuple

from simgpu import CARDS
from simgpu.costs import Product, product_seconds

FILE = Path(__file__).with_suffix(".json")


class Matmul(NamedTuple):
    """(rows, inner) by (inner, columns), measured on a card."""

    card: str
    rows: int
    columns: int
    inner: int
    seconds: float

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.columns * self.inner

    @property
    def nbytes(self) -> int:
        """Of both factors and the result, each moved once."""
        elements = self.rows * (self.inner + self.columns) + self.inner * self.columns
        return 2 * elements

    @property
    def roof_seconds(self) -> float:
        """What the card's datasheet allows: the longer of arithmetic and memory."""
        card = CARDS[self.card]
        arithmetic = self.flops / card.flops["float16"]
        return max(arithmetic, self.nbytes / card.memory_bandwidth)

    @property
    def model_seconds(self) -> float:
        """What the simulator says."""
        product = Product(1, self.rows, self.columns, self.inner)
        return product_seconds(CARDS[self.card], product, "float16", self.nbytes)


def recorded(card: str = "", size: int = 0) -> list[Matmul]:
    """The measured matmuls; those of a card, and by a square matrix, if asked for."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))["rows"]
    found = [Matmul(*row[:-1], row[-1] * 1e-6) for row in rows]
    if card:
        found = [matmul for matmul in found if matmul.card == card]
    if size:
        found = [m for m in found if m.columns == size and m.inner == size]
    return found
