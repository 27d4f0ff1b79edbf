"""Pictures of lesson 09: bits of numbers, and the types of a step."""

import struct

import pytest
import torch

from helpers import draw
from helpers.draw.precision import FORMATS, bits_of


@pytest.mark.parametrize("value", [0.1, 1.0, -2.5, 300.0])
def test_bits_are_those_of_the_number(value):
    (whole,) = struct.unpack(">I", struct.pack(">f", value))
    assert bits_of(value, "float32") == f"{whole:032b}"
    for name, (exponent, fraction) in FORMATS.items():
        bits = bits_of(value, name)
        assert len(bits) == 1 + exponent + fraction
        power = int(bits[1 : 1 + exponent], 2) - (2 ** (exponent - 1) - 1)
        found = (1 + int(bits[1 + exponent :], 2) / 2**fraction) * 2.0**power
        assert found == pytest.approx(abs(value), rel=2.0 ** -(fraction + 1))
        assert bits[0] == ("1" if value < 0 else "0")


def test_formats_are_named_in_the_picture():
    text = draw.number_formats(0.1)._repr_svg_()
    assert "<title>0.1 as float32, TF32, float16, bfloat16, bit by bit</title>" in text
    for name in (*FORMATS, "exponent: the range", "fraction: the digits"):
        assert f">{name}</text>" in text


def test_a_step_says_the_types_that_its_tensors_have():
    full, half = torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)
    picture = draw.mixed_step(full, half, half, full, half, full)
    assert picture.title.startswith(
        "One step of mixed precision: weights float32, copies bfloat16, matmuls bf"
    )
    text = picture._repr_svg_()
    assert text.count(">bfloat16</text>") == 3 and text.count(">float32</text>") == 4
    assert text.count(draw.COLOURS[1]) == 3 and text.count(draw.COLOURS[0]) == 4
