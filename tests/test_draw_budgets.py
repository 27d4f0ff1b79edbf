"""The picture of memory budgets, read from its SVG."""

import re

import pytest

from helpers import draw

MIB = 2**20
ROWS = {
    "plain": draw.Budget({"activations": 64 * MIB, "gradients": 8 * MIB}, 72 * MIB, 5),
    "2 parts": draw.Budget({"activations": 32 * MIB, "gradients": 0}, 36 * MIB, 6.25),
}


def test_budgets_say_peaks_times_and_the_card():
    svg = draw.budgets(ROWS, card=48 * MIB, kind="simulated")._repr_svg_()
    words = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    for expected in ("72 MiB", "36 MiB", "5.0 ms", "6.2 ms", "the card: 48 MiB"):
        assert expected in words
    (title,) = re.findall("<title>(.*?)</title>", svg)
    assert "plain 72 MiB, 5.0 ms" in title and "simulated" in title


def test_bars_share_one_axis_and_empty_parts_are_not_drawn():
    svg = draw.budgets(ROWS, card=48 * MIB, kind="simulated")._repr_svg_()
    bars = re.findall(r'x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="24"', svg)
    (left, plain), (_, gradients), (start, parts) = bars
    assert left == start
    assert float(plain) / float(parts) == pytest.approx(2, rel=1e-4)
    assert float(plain) / float(gradients) == pytest.approx(8, rel=1e-4)
