"""The roofline: a roof of the right height, dots where they belong, words on it."""

import re
from xml.etree import ElementTree

from helpers import draw

A100 = ("A100, float32", 19.5e12, 2039e9)
RIDGE = 19.5e12 / 2039e9
POINTS = [("at the ridge", RIDGE, 19.5e12), ("far below", 1.0, 1e10)]


def circles(svg: str) -> list[tuple[float, float]]:
    found = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg)
    return [(float(x), float(y)) for x, y in found]


def test_a_kernel_that_reaches_both_limits_lies_on_the_ridge():
    svg = draw.roofline("title", [A100], POINTS)._repr_svg_()
    ElementTree.fromstring(svg)
    (x, y), (left, below) = circles(svg)
    assert left < x and below > y
    start, end = re.findall(r'<line x1="\S+" y1="\S+" x2="(\S+)" y2="(\S+)"', svg)[:2]
    assert abs(float(start[0]) - x) < 0.1 and abs(float(start[1]) - y) < 0.1
    assert float(end[1]) == float(start[1])  # flat from there


def test_one_roof_says_which_side_is_bound_by_what():
    svg = draw.roofline("title", [A100], POINTS)._repr_svg_()
    for words in ("memory-bound", "compute-bound", "ridge 9.6", "FLOPs a byte"):
        assert words in svg
    assert "1  at the ridge" in svg and "A100, float32: 19.5 TFLOP/s" in svg


def test_dots_have_the_colour_of_their_roof():
    roofs = [A100, ("H100, float32", 67e12, 3350e9)]
    points = [("first@0", 1.0, 1e11), ("second@1", 1.0, 2e11)]
    svg = draw.roofline("title", roofs, points)._repr_svg_()
    for colour in draw.COLOURS[:2]:
        assert re.search(rf'<circle [^>]*fill="{colour}"', svg)
    assert "memory-bound" not in svg and "2  second" in svg


def test_what_is_outside_of_the_axes_stands_at_their_edge():
    svg = draw.roofline("title", [A100], [("tiny", 1e-6, 1.0)])._repr_svg_()
    ((x, y),) = circles(svg)
    assert (x, y) == (64.0, 300.0)
