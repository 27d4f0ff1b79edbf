"""The data that lessons train on: small, real and at hand without a download.

The handwritten digits that come with scikit-learn: 1797 images of 8 x 8 pixels, a copy
of the test set of https://archive.ics.uci.edu/dataset/80.
"""

from typing import NamedTuple

import torch
from sklearn.datasets import load_digits


class Digits(NamedTuple):
    """Images as rows of 64 pixels, 0 to 1, and their labels, 0 to 9."""

    x: torch.Tensor  # (1437, 64) float32, to train on
    y: torch.Tensor  # (1437,) int64
    test_x: torch.Tensor  # (360, 64)
    test_y: torch.Tensor  # (360,)


def digits() -> Digits:
    """The digits in an order that is the same everywhere, a fifth kept for testing.

    Taught in 09-share-tensors-between-processes.
    """
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = (torch.from_numpy(images).float() / 16)[order]
    y = torch.from_numpy(labels).long()[order]
    test = len(labels) // 5 + 1
    return Digits(x[test:], y[test:], x[:test], y[:test])
