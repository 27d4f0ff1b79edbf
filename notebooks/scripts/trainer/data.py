"""The data that the trainers read: rows of tokens. Put yours in the place of this file.

A text's tokens are its bytes, and a zero ends a document. Token numbers of another
tokenizer come as a `.npy` file of one dimension; `--end` is the one that ends a
document. Both stay on the disk and are read where they are needed.
"""

import numpy as np
import torch
from torch.utils.data import Dataset


class Rows(Dataset):
    """Rows of `context` tokens, and the tokens that follow each of them."""

    def __init__(self, tokens, context, end):
        self.tokens, self.context, self.end = tokens, context, end

    def __len__(self):
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, i):
        first = i * self.context
        tokens = self.tokens[first : first + self.context + 1].astype(np.int64)
        tokens = torch.from_numpy(tokens)
        row = {"tokens": tokens[:-1], "targets": tokens[1:]}
        if self.end is not None:
            ends = row["tokens"] == self.end
            row["document"] = ends.cumsum(0) - ends.long()  # an end is of its document
            row["targets"] = row["targets"].masked_fill(ends, -100)
        return row


def sets(path, context, end=None):
    if path.suffix == ".npy":
        tokens = np.load(path, mmap_mode="r")
    else:
        tokens = np.memmap(path, dtype=np.uint8, mode="r")
        if end is None and (tokens[:1_000_000] == 0).any():
            end = 0
    last = len(tokens) * 95 // 100
    return [Rows(part, context, end) for part in (tokens[:last], tokens[last:])]
