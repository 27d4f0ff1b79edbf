"""Bars on one axis of time, and the pictures of jobs that are drawn with them."""

import re

import pytest

from simgpu._pictures.lanes import Lanes
from simgpu._ranks.job_memory import GpuMemory, JobMemory


def lanes(seconds: float = 10.0, **options) -> Lanes:  # no limit: simulated
    return Lanes("a title", 100, seconds, 100, **options)


def bars(axis: Lanes) -> list[tuple[float, float]]:
    """(x, width) of all boxes."""
    found = re.findall(r'<rect x="([\d.]+)".*?width="([\d.]+)"', "".join(axis.parts))
    return [(float(x), float(width)) for x, width in found]


def words(axis: Lanes) -> list[str]:
    return re.findall(r">([^<]+)</text>", "".join(axis.parts))


def test_an_axis_goes_from_its_left_to_its_right():
    axis = lanes(begin=5.0, right=100)
    assert [axis.at(time) for time in (5, 10, 15)] == [100, 350, 600]
    axis.bar(0, 20, 5.0, 15.0, "white")
    assert bars(axis) == [(100, 500)]


def test_a_short_bar_is_still_seen():
    axis = lanes(least=2)
    axis.bar(0, 20, 1.0, 1.0, "white", "")
    assert [width for _, width in bars(axis)] == [2]


def test_a_bar_has_the_first_words_that_fit_or_none():
    axis = lanes(seconds=588, letter=10, room=0)  # no limit: a second is a pixel
    axis.bar(0, 20, 0, 35, "white", "four", "two", "a")
    axis.bar(0, 20, 0, 8, "white", "four", "a")
    axis.between(10, 100, 150, "six ..", "four")
    assert words(axis) == ["two", "four"]


@pytest.mark.parametrize(
    ("seconds", "unit", "last"),
    [(8e-6, "µs", "8 µs"), (9e-6, "µs", "8 µs"), (4.7e-3, "µs", "4,000 µs"),
     (0.0188, "ms", "15 ms"), (0.2e-3, "ms", "0")],
)  # fmt: skip
def test_ticks_are_at_most_eight_at_round_times(seconds, unit, last):
    axis = lanes(seconds, begin=3.0)
    axis.ticks(50, unit)
    found = words(axis)
    assert found[0] == "0" and found[-1] == last and len(found) <= 9


def test_the_last_tick_does_not_run_over_the_edge():
    axis = lanes(8e-3)
    axis.ticks(50, "µs")
    assert axis.parts[-1].count('text-anchor="end"') == 1


def test_a_footer_says_how_many_simulated_microseconds_the_axis_has():
    axis = lanes(1.5e-3)
    axis.footer(90)
    assert words(axis) == ["0", "1,500 µs (simulated)"]


def test_a_legend_has_a_box_for_each_fill_and_says_where_it_ends():
    axis = lanes()
    end = axis.legend(80, {"forward": "white", "idle": "black"})
    assert words(axis) == ["forward", "idle"]
    assert bars(axis)[0][0] == 100 < bars(axis)[1][0] < end


@pytest.mark.parametrize(
    ("simulated", "kind"), [(True, "simulated"), (False, "measured")]
)
def test_memory_of_a_job_says_whether_it_is_simulated(simulated, kind):
    """Whatever ranks are open when it is drawn."""
    row = GpuMemory(0, "cuda:0", 2**20, 2**21, 2**21, 2**30)
    svg = JobMemory([row], simulated)._repr_svg_()
    assert f"Memory of 1 rank ({kind}): at most 2 MiB, on rank 0" in svg
