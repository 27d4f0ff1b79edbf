"""The data that lessons train on: small, real and at hand without a download.

`digits.csv.gz` holds handwritten digits, 1797 images of 8 x 8 pixels from 0 to 16 and
their labels: the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin
and C. Kaynak (1998), UCI Machine Learning Repository, https://doi.org/10.24432/C50P49,
licence CC BY 4.0, in the form in which scikit-learn ships it.

`language_reference.txt.gz` holds 201,480 characters of English: five chapters of "The
Python Language Reference", copyright (c) 2001-2023 Python Software Foundation, all
rights reserved, used under the Python Software Foundation License Version 2,
https://docs.python.org/3.11/license.html, in the form in which CPython 3.11 ships it as
the module `pydoc_data.topics` (specialnames, compound, types, formatstrings,
string-methods; it differs between versions, hence the copy). Changed: typographic
quotes, dashes and dots became ASCII.
"""

import gzip
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch


class Digits(NamedTuple):
    """Images as rows of 64 pixels, 0 to 1, and their labels, 0 to 9."""

    x: torch.Tensor  # (1437, 64) float32, to train on
    y: torch.Tensor  # (1437,) int64
    test_x: torch.Tensor  # (360, 64)
    test_y: torch.Tensor  # (360,)


def digits() -> Digits:
    """The digits in an order that is the same everywhere, a fifth kept for testing.

    Taught in 14-share-tensors-between-processes.
    """
    table = np.loadtxt(Path(__file__).parent / "digits.csv.gz", delimiter=",")
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    table = torch.from_numpy(table)[order]
    x, y = table[:, :-1].float() / 16, table[:, -1].long()
    test = len(table) // 5 + 1
    return Digits(x[test:], y[test:], x[:test], y[:test])


class Text(NamedTuple):
    """A text as numbers, one for each character: its place in `letters`."""

    train: torch.Tensor  # (191406,) int64, the beginning
    test: torch.Tensor  # (10074,), the end
    letters: str  # the 94 characters that occur, sorted

    def words(self, tokens: torch.Tensor) -> str:
        """The characters of some numbers."""
        return "".join(self.letters[i] for i in tokens)


def text() -> Text:
    """A part of Python's language reference, the last twentieth kept for testing.

    Taught in 28-train-it-all.
    """
    packed = (Path(__file__).parent / "language_reference.txt.gz").read_bytes()
    characters = gzip.decompress(packed)
    letters = bytes(sorted(set(characters)))
    place = torch.zeros(256, dtype=torch.int64)
    place[list(letters)] = torch.arange(len(letters))
    tokens = place[torch.frombuffer(bytearray(characters), dtype=torch.uint8).long()]
    test = len(tokens) // 20
    return Text(tokens[:-test], tokens[-test:], letters.decode("ascii"))
