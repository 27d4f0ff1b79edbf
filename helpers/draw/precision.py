"""Numbers of 16 and 32 bits, and where a step of mixed precision has which of them."""

import struct
from typing import TYPE_CHECKING

from simgpu.pictures import COLOURS, WIDEST, Picture

if TYPE_CHECKING:
    import torch

# name -> bits of exponent and of fraction; TF32 exists only inside of matmuls
FORMATS = {
    "float32": (8, 23),
    "TF32": (8, 10),
    "float16": (5, 10),
    "bfloat16": (8, 7),
}
_WORDS = (  # title of a box, what happens there, what is lost or kept
    ("weights", "of the model", "every digit kept"),
    ("copies", "of the weights", "rounded for this step"),
    ("matmuls", "outputs", "fast, and half the bytes"),
    ("loss", "of scores.float()", "times the scale"),
    ("gradients", "of the copies", "scale keeps small ones"),
    ("gradients", "divided by scale", "float32 holds them"),
    ("updated weights", "of the model", "small changes kept"),
)
_PLACES = ((0, 0), (1, 0), (2, 0), (3, 0), (2, 1), (1, 1), (0, 1))  # column, row


def name_of(dtype: "torch.dtype") -> str:
    """A type as people call it: "float16"."""
    return str(dtype).removeprefix("torch.")


def bits_of(value: float, name: str) -> str:
    """The bits of a number in one of FORMATS: sign, exponent, fraction."""
    if name == "TF32":  # float32 rounded to ten bits of fraction
        (whole,) = struct.unpack(">I", struct.pack(">f", value))
        return f"{(whole + (1 << 12)) >> 13:019b}"
    import torch

    dtype = getattr(torch, name)
    size = torch.int32 if name == "float32" else torch.int16
    width = 32 if name == "float32" else 16
    whole = torch.tensor(value, dtype=dtype).view(size).item() % 2**width
    return f"{whole:0{width}b}"


def number_formats(value: float) -> Picture:
    """A number in four formats, bit by bit: what is range, and what is digits."""
    picture = Picture(WIDEST, 196, f"{value:g} as {', '.join(FORMATS)}, bit by bit")
    for row, (name, (exponent, _)) in enumerate(FORMATS.items()):
        top = 10 + 38 * row
        picture.text(8, top + 20, name, 14)
        for i, bit in enumerate(bits_of(value, name)):
            fill = COLOURS[i > exponent] if i else "white"
            picture.box(84 + 19 * i, top, 19, 30, fill)
            picture.text(93 + 19 * i, top + 20, bit, 13, "middle")
    legend = (("white", "sign"), (COLOURS[0], "exponent: the range"))
    legend += ((COLOURS[1], "fraction: the digits"),)
    for i, (fill, words) in enumerate(legend):
        picture.box(84 + 190 * i, 168, 14, 14, fill)
        picture.text(104 + 190 * i, 180, words, 13)
    return picture


def mixed_step(weights, copies, outputs, loss, half_gradients, gradients) -> Picture:
    """The path of one step: which type each part has, read off its tensor.

    Args:
        weights: the model's, which the optimizer changes.
        copies: of them, with which the matmuls compute.
        outputs: of the matmuls.
        loss: of which `backward()` begins.
        half_gradients: of the copies.
        gradients: with which the optimizer changes the weights.
    """
    parts = weights, copies, outputs, loss, half_gradients, gradients, weights
    names = [name_of(part.dtype) for part in parts]
    path = ", ".join(f"{w[0]} {name}" for w, name in zip(_WORDS, names, strict=True))
    picture = Picture(WIDEST, 266, f"One step of mixed precision: {path}")
    picture.text(8, 20, "forward", 13, weight="bold")
    picture.text(8, 258, "backward and update", 13, weight="bold")
    wide, tall = 148, 92
    for name, words, place in zip(names, _WORDS, _PLACES, strict=True):
        x, y = 8 + 178 * place[0], 30 + 118 * place[1]
        picture.box(x, y, wide, tall, COLOURS[0 if name == "float32" else 1])
        for line, text in enumerate((words[0], words[1], name, words[2])):
            weight = "bold" if line in (0, 2) else "normal"
            picture.text(x + wide / 2, y + 20 + 21 * line, text, 12, "middle", weight)
    for column in range(3):
        picture.line(158 + 178 * column, 76, 182 + 178 * column, 76, arrow=True)
    for column in (1, 2):
        picture.line(6 + 178 * column, 194, -18 + 178 * column, 194, arrow=True)
    picture.line(616, 124, 616, 194)
    picture.line(616, 194, 516, 194, arrow=True)
    return picture
