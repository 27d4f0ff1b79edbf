"""`draw.equal_ranks`: equal values look alike, and the title says it in words."""

import re

from helpers import draw


def test_equal_values_have_one_colour_and_others_their_own():
    values = {"weights": [1.5, 1.5, 1.5], "mean": [0.25, 0.5, 0.25]}
    svg = draw.equal_ranks(values, {"mean": "nobody"})._repr_svg_()
    title = re.search("<title>(.*?)</title>", svg)[1]
    assert title == "Values on 3 ranks. weights: equal; mean: 2 different values"
    fills = re.findall(r'fill="(#\w+)" stroke', svg)
    assert len(set(fills[:3])) == 1
    assert fills[3] == fills[5] != fills[4]
    assert ">nobody<" in svg and svg.count(">1.500<") == 3
