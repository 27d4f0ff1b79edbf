"""The picture of who sends to whom and when, read from its SVG."""

import re

from helpers import draw
from simgpu import Event, JobTimeline, RankLog
from simgpu.pictures import COLOURS, HOST


def message(name: str, start: float, end: float, **waits) -> Event:
    times = start * 1e-6, end * 1e-6
    return Event("collective", name, "cuda:0", *times, 0, 0, **waits)


def log(first: list[Event], second: list[Event], microseconds: float) -> JobTimeline:
    seconds = microseconds * 1e-6
    return JobTimeline(
        [RankLog(0, first, [], seconds), RankLog(1, second, [], seconds)]
    )


LATE = {"waited": 40e-6, "waited_for": 1}
ONE_WAY = log(
    [message("recv from 1", 0, 100, **LATE)], [message("send to 0", 40, 100)], 100
)
ADDED = Event("kernel", "add_", "cuda:0", 100e-6, 200e-6, 0, 0)
BOTH_WAYS = log(
    [message("send to 1", 0, 100), message("recv from 1", 0, 100), ADDED], [], 200
)


def boxes(svg: str) -> list[tuple[str, str]]:
    """The fill and the words of each box that has words."""
    found = r'<rect [^>]*fill="([#\w]+)"[^>]*/><text[^>]*middle"[^>]*>([^<]+)<'
    return re.findall(found, svg)


def test_a_message_has_the_colour_of_its_sender():
    svg = draw.conversations({"one way": ONE_WAY})._repr_svg_()
    assert (COLOURS[1], "from 1") in boxes(svg)
    assert (COLOURS[1], "to 0") in boxes(svg)


def test_it_names_the_rank_that_is_waited_for():
    svg = draw.conversations({"one way": ONE_WAY})._repr_svg_()
    assert ("white", "waits for rank 1") in boxes(svg)


def test_a_batch_is_one_box_and_computing_is_grey():
    svg = draw.conversations({"both ways": BOTH_WAYS}, ranks=[0])._repr_svg_()
    assert boxes(svg) == [(COLOURS[0], "to 1, from 1"), (HOST, "add")]
    assert "rank 1</text>" not in svg


def test_programs_share_one_axis():
    picture = draw.conversations({"one way": ONE_WAY, "both ways": BOTH_WAYS})
    assert "one way: 100 µs; both ways: 200 µs" in picture.title
    svg = picture._repr_svg_()
    assert "200 µs (simulated)" in svg
    wide = [float(w) for w in re.findall(r'width="([\d.]+)" height="18"', svg)]
    sent = (700 - 60 - 12) * 100 / 200
    assert any(abs(w - sent) < 0.1 for w in wide)
