"""Judges of the exercises of lesson 00."""

import torch

from helpers.check import Wrong, call, exercise


@exercise("00.1")
def copied_bytes(answer) -> None:
    """Bytes that the four-line program copies with two GPUs."""
    there, weights, back = 2048 * 1024 * 4, 1024 * 1024 * 4, 2048 * 1024 * 4
    if answer == there + back:  # also X and twice W
        raise Wrong("X goes there, W goes to each GPU, and the result comes back")
    if answer == there + weights + back:
        raise Wrong("every GPU needs its own copy of W")
    if answer == there + 4 * weights + back:
        raise Wrong("that is for four GPUs; this time there are two")
    if answer == (there + 2 * weights + back) // 4:
        raise Wrong("that is the count of numbers; a float32 has 4 bytes")
    if answer != there + 2 * weights + back:
        raise Wrong("count X once, W once for each GPU, and the result once")


@exercise("00.2")
def spread(function) -> None:
    """A function (x, n) -> n pieces of x, piece i on GPU i."""
    for rows, number in ((8, 4), (6, 2), (5, 3), (5, 4)):
        x = torch.arange(rows * 2.0).reshape(rows, 2)
        pieces = list(call(function, x, number))
        if len(pieces) != number:
            raise Wrong(f"{number} GPUs need {number} pieces, not {len(pieces)}")
        for i, piece in enumerate(pieces):
            if piece.device != torch.device("cuda", i):
                raise Wrong(f"piece {i} is on {piece.device}, not on cuda:{i}")
        together = torch.cat([piece.cpu() for piece in pieces])
        if together.shape != x.shape or not torch.equal(together, x):
            raise Wrong(f"the pieces of {rows} rows put together are not x")
