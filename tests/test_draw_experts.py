"""`draw.tokens_to_experts`: the picture of lesson 22."""

import re

from helpers import draw
from simgpu.pictures import COLOURS


def test_a_token_goes_to_its_expert_and_keeps_its_colour():
    picture = draw.tokens_to_experts([[1, 0], [0, 0]])
    found = r'<rect x="([\d.]+)" y="(\d+)"[^>]*fill="(#\w+)"'
    boxes = re.findall(found, picture._repr_svg_())
    first, second = COLOURS[:2]
    before = [fill for _, y, fill in boxes if y == "52"]
    after = [fill for _, y, fill in boxes if y == "108"]
    assert before == [first, first, second, second]
    assert after == [first, second, second, first]
    assert "rank 1: tokens for 0, 0, then tokens of ranks 0" in picture.title
