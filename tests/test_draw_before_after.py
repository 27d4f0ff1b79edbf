"""The picture of several collectives, read from its SVG."""

import re

from helpers import draw
from simgpu.pictures import COLOURS

BEFORE = [[10 * rank + i for i in range(2)] for rank in range(2)]
ROWS = {
    "broadcast": [(before, BEFORE[1]) for before in BEFORE],
    "all-reduce": [(before, [10, 12]) for before in BEFORE],
}


def boxes(svg: str) -> list[tuple[str, str]]:
    """The number and the fill of each box."""
    found = re.findall(r'<rect [^>]*fill="(#\w+)"[^>]*/><text[^>]*>(\d+)<', svg)
    return [(number, fill) for fill, number in found]


def test_a_number_keeps_the_colour_of_its_rank():
    svg = draw.before_after({"broadcast": ROWS["broadcast"]})._repr_svg_()
    assert boxes(svg).count(("11", COLOURS[1])) == 3  # before, and after on both
    assert boxes(svg).count(("1", COLOURS[0])) == 1


def test_a_sum_is_grey():
    svg = draw.before_after({"all-reduce": ROWS["all-reduce"]})._repr_svg_()
    assert boxes(svg).count(("12", "#DDDDDD")) == 2


def test_it_says_what_every_rank_has():
    picture = draw.before_after(ROWS)
    assert "broadcast: rank 0 has 0 1, then 10 11; rank 1" in picture.title
    assert "all-reduce: rank 0 has 0 1, then 10 12" in picture.title


def test_names_stay_left_of_the_numbers():
    svg = draw.before_after({"reduce-scatter": ROWS["broadcast"]})._repr_svg_()
    first = min(float(x) for x in re.findall(r'<rect x="([\d.]+)"', svg))
    assert first >= 8 + len("reduce-scatter") * 7.5
