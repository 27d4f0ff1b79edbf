"""The bars of lesson 04: what a reader sees in the picture."""

import pytest

from helpers import draw

MIB = 2**20
ROWS = {
    "forward": {"parameters": 4 * MIB, "temporary": 2 * MIB},
    "step": {"parameters": 4 * MIB, "gradients": 4 * MIB, "temporary": 0},
}
COUNTED = {"forward": 6.5 * MIB, "step": 8 * MIB}


def svg() -> str:
    return draw.memory_bars("Peaks", ROWS, COUNTED)._repr_svg_()


def test_the_title_says_every_prediction_and_count():
    assert (
        "<title>Peaks, simulated. forward: predicted 6 MiB, counted 6.5 MiB;" in svg()
    )


def test_every_part_is_named_once_beside_what_was_counted():
    for name in ("parameters", "temporary", "gradients", "counted"):
        assert svg().count(f">{name}</text>") == 1


def test_a_part_has_the_same_colour_in_every_row_and_an_empty_one_no_box():
    for name in draw.COLOURS[:2]:  # parameters: two rows and the legend
        assert svg().count(f'fill="{name}"') == (3 if name == draw.COLOURS[0] else 2)


def test_rows_that_were_not_counted_are_refused():
    with pytest.raises(ValueError, match="but counted"):
        draw.memory_bars("Peaks", ROWS, {"forward": MIB})


def test_more_parts_than_colours_are_refused():
    many = {"forward": {str(i): MIB for i in range(8)}}
    with pytest.raises(ValueError, match="8 parts, but 7 colours"):
        draw.memory_bars("Peaks", many, {"forward": 8 * MIB})
