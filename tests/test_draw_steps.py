"""The picture of one step of several runs, read from its SVG."""

import re
from types import SimpleNamespace

from helpers import draw


def event(kind: str, start: float, end: float) -> SimpleNamespace:
    return SimpleNamespace(kind=kind, start=start * 1e-6, end=end * 1e-6)


RUNS = {
    "as written": (100e-6, [event("copy", 110, 120), event("kernel", 150, 200)]),
    "lean": (0.0, [event("kernel", 10, 50)]),
}


def test_each_run_says_how_long_it_copies_computes_and_is_idle():
    svg = draw.steps(RUNS)._repr_svg_()
    for words in (
        "as written: 100 µs = 10 copying + 50 computing + 40 idle",
        "lean: 50 µs = 0 copying + 40 computing + 10 idle",
    ):
        assert svg.count(words) == 2  # in the picture and in its title
    assert "simulated" in svg


def test_runs_share_one_axis_that_begins_with_their_step():
    svg = draw.steps(RUNS)._repr_svg_()
    frames = re.findall(r'<rect x="12" y="[\d.]+" width="([\d.]+)" height="24"', svg)
    longer, shorter = map(float, frames)
    assert longer == 2 * shorter


def test_copies_are_numbered():
    svg = draw.steps(RUNS)._repr_svg_()
    assert (
        len(re.findall(r'text-anchor="middle" font-weight="normal">1</text>', svg)) == 1
    )


def test_an_axis_has_few_marks_however_long_the_step():
    for seconds in (50e-6, 4e-3, 2.0):
        events = [event("kernel", 0, 1e6 * seconds)]
        svg = draw.steps({"run": (0.0, events)})._repr_svg_()
        assert len(re.findall(r">\d+ µs</text>", svg)) <= 11
    assert draw.steps({})._repr_svg_()
