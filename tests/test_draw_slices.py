"""The pictures of lesson 19: two matmuls over ranks, messages that nothing hides."""

import re
from types import SimpleNamespace

import pytest

from helpers import draw
from simgpu import Event
from simgpu.pictures import COLOURS


def text(picture) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture._repr_svg_())


def test_two_matmuls_say_who_has_which_slice():
    picture = draw.two_matmuls(4, tokens=512, width=128, hidden=512)
    said = text(picture)
    assert {"A, by columns", "B, by rows", "all-reduce", "4 terms of y"} <= set(said)
    assert {"128 × 128 a rank", "512 × 128 a rank"} <= set(said)
    assert "128 of 512 columns" in picture.title and "adds 4 terms" in picture.title


def test_every_rank_has_its_colour_in_each_slice():
    svg = draw.two_matmuls(2, tokens=8, width=4, hidden=16)._repr_svg_()
    # legend, A, hidden, hidden again, B, term
    assert [svg.count(f'fill="{colour}"') for colour in COLOURS[:3]] == [6, 6, 0]


def test_columns_must_be_divisible():
    with pytest.raises(ValueError, match="10 columns cannot be cut over 4"):
        draw.two_matmuls(4, tokens=8, width=4, hidden=10)


def event(kind: str, start: float, end: float) -> Event:
    fields = dict.fromkeys(Event._fields, 0)
    return Event(**fields | {"kind": kind, "start": start * 1e-6, "end": end * 1e-6})


def log(*events) -> SimpleNamespace:
    return SimpleNamespace(events=lambda rank: list(events))


def test_exposed_counts_what_nothing_hides():
    waiting = log(event("kernel", 5, 25), event("collective", 25, 45))
    hidden = log(event("kernel", 0, 50), event("collective", 10, 30))
    half = log(event("kernel", 0, 50), event("collective", 40, 60))
    picture = draw.exposed({"a": waiting, "b": hidden, "c": half})
    assert picture.title == (
        "Rank 0, simulated: a 40 µs, of which it waits 20 µs; b 50 µs, of which it "
        "waits 0 µs; c 60 µs, of which it waits 10 µs"
    )
    said = text(picture)
    assert "a: 40 µs, waits 20 µs" in said and "60 µs (simulated)" in said
    assert said.count("0") == 1  # one axis
