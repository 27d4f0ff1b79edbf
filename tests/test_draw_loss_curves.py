"""The picture of loss curves that lie on one another, and their distances."""

import pytest

from helpers import draw

ONE = {0: 5.5, 1: 5.0, 2: 4.25}


def picture(**curves) -> draw.Picture:
    return draw.loss_curves(curves, ONE, "A training")


@pytest.mark.parametrize(
    "off, below",
    [
        (0.0, "0.00001"),
        (2e-6, "0.00001"),
        (9e-6, "0.00001"),
        (4e-5, "0.0001"),
        (4e-4, "0.01"),
        (4e-2, "1"),
    ],
)
def test_it_says_the_bound_above_the_largest_distance(off, below):
    found = picture(DDP={0: 5.5, 1: 5.0 - off, 2: 4.25})
    assert f"DDP: below {below}" in found.title
    assert f">below {below}</text>" in found._repr_svg_()


def test_a_rounding_error_does_not_change_the_picture():
    other = {step: loss + 1e-6 for step, loss in ONE.items()}
    again = {step: loss + 4e-6 for step, loss in ONE.items()}
    assert picture(DDP=other)._repr_svg_() == picture(DDP=again)._repr_svg_()


def test_a_curve_may_have_some_of_the_steps():
    curves = {"all": ONE, "some": {1: 5.0, 2: 4.25}}
    marks, notes = {"one rounding": 3e-7}, {1: "killed"}
    svg = draw.loss_curves(curves, ONE, "A training", marks, notes)._repr_svg_()
    assert svg.count("<polyline") == 2
    for words in ("loss, nats per byte", "one rounding", "some", "all", "killed"):
        assert f">{words}</text>" in svg
