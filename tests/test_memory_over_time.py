"""`draw.memory_over_time`: the bands of a step's memory, and its highest moment."""

import re

import nbformat
import pytest

from helpers import draw
from helpers.draw.memory_over_time import moments
from tests import take_home

MIB = 2**20


def words(picture) -> list[str]:
    """What stands in a picture."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture._repr_svg_())


def noted(line: str, address: int, size: int, action: str = "alloc", name: str = ""):
    """An entry of the allocator's history."""
    return {
        "action": action, "addr": address, "size": size, "user_metadata": line,
        "frames": [{"name": name}],
    }  # fmt: skip


STEP = [
    noted("forward", 1, 8 * MIB),  # stays: an activation
    noted("forward", 2, 4 * MIB),  # goes in the same line: temporary
    noted("forward", 2, 4 * MIB, "free_requested"),
    noted("forward", 2, 4 * MIB, "free_completed"),
    noted("backward", 3, 2 * MIB, name="recompute_fn"),
    noted("backward", 4, 6 * MIB),  # stays: a gradient
    noted("backward", 3, 2 * MIB, "free_requested"),
    noted("backward", 1, 8 * MIB, "free_requested"),
    noted("step", 5, 3 * MIB),
    noted("zero_grad", 4, 6 * MIB, "free_requested"),
    noted("zero_grad", 9, 1 * MIB, "free_requested"),  # made before the record
]


def test_a_block_is_named_by_the_line_that_made_it_and_by_when_it_goes():
    found = moments(STEP, {"parameters": 5 * MIB, "batch": 2 * MIB})
    assert [moment.total / MIB for moment in found] == [
        15, 19, 15, 15, 17, 23, 21, 13, 16, 10, 9,
    ]  # fmt: skip
    assert found[5].sizes == {
        "parameters": 5 * MIB, "batch": 2 * MIB, "activations": 8 * MIB,
        "temporary": 0, "computed again": 2 * MIB, "gradients": 6 * MIB,
    }  # fmt: skip
    assert found[-1].sizes["optimizer state"] == 3 * MIB
    assert found[-1].sizes["batch"] == MIB


def test_a_long_history_is_drawn_in_few_columns():
    events = [
        noted("forward", i, i % 7 * MIB, action)
        for i in range(4000)
        for action in ("alloc", "free_requested")
    ]
    picture = draw.memory_over_time("Many", {"all": events}, {"parameters": MIB})
    assert len(picture._repr_svg_()) < 20_000
    assert "peak 7 MiB, in forward" in words(picture)


def test_an_event_without_a_line_is_refused():
    rows = {"Adam": [noted("", 1, 512)]}
    with pytest.raises(ValueError, match="an event has no line"):
        draw.memory_over_time("A step", rows, {"parameters": MIB})


def test_what_is_left_in_lesson_04_are_two_workspaces():
    """No name keeps a tensor there: the text says so, and how much two of them take."""
    book = nbformat.read(take_home.NOTEBOOKS / take_home.lesson_of("04"), as_version=4)
    printed = "".join(
        out.get("text", "") for cell in book.cells for out in cell.get("outputs", [])
    )
    nbytes, mib = re.search(r"([\d,]+) bytes = ([\d.]+) MiB", printed).groups()
    assert int(nbytes.replace(",", "")) == 2 * 8_519_680 and float(mib) == 2 * 8.125
