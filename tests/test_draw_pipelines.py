"""The picture of a pipeline's schedules, read from its SVG."""

import pytest

from helpers import draw
from simgpu import Event, JobTimeline, RankLog


def kernel(rank: int, launched: float, start: float, end: float) -> Event:
    place = f"cuda:{rank}"
    return Event(
        "kernel", "addmm", place, 1e-3 * start, 1e-3 * end, 0, 0, launched=launched
    )


@pytest.fixture
def run() -> tuple[JobTimeline, list]:
    """Two ranks, one micro-batch: a forward task of 1 ms each, and 2 ms backward."""
    rows = [
        [kernel(0, 1, 5, 6), kernel(0, 2, 9, 11)],
        [kernel(1, 1, 6, 7), kernel(1, 2, 7, 8), kernel(1, 3, 8, 9)],
    ]
    message = Event("collective", "send to 1", "cuda:0", 0.0, 1.0, 8, 0)
    logs = [
        RankLog(rank, [*events, message], [], 0.011) for rank, events in enumerate(rows)
    ]
    marks = [[(1, "F", 7, 0), (2, "B", 7, 0)], [(1, "F", 7, 1), (2, "B", 7, 1)]]
    return JobTimeline(logs), marks


def test_a_bubble_is_the_idle_share_and_messages_do_not_count_as_work(run):
    log, _ = run
    assert draw.bubble(log) == pytest.approx(1 - 6 / 12)


def test_it_shows_tasks_bubbles_and_both_numbers(run):
    picture = draw.pipelines({"GPipe": run}, "One step")
    assert picture.title == "One step. GPipe: 6.0 ms, bubble 50.0%"
    svg = picture._repr_svg_()
    assert svg.count(">7</text>") == 4  # two tasks of each rank
    assert svg.count("stroke-dasharray") == 3  # rank 0: between; rank 1: both ends
    assert svg.count(">bubble</text>") == 3
    assert "simulated" in svg and svg.count(">6 ms</text>") == 1


def test_schedules_share_one_axis(run):
    log, marks = run
    short = JobTimeline([log.logs[1]]), marks[1:]
    svg = draw.pipelines({"long": run, "short": short}, "Two")._repr_svg_()
    both = [part for part in svg.split("<rect") if 'height="20"' in part]
    widths = [part.partition('width="')[2].partition('"')[0] for part in both]
    assert widths[2:4] == widths[4:]  # rank 1's tasks are as wide in both


def test_a_line_marks_the_tasks_of_a_second_stage(run):
    log, marks = run
    lines = draw.pipelines({"v": (log, marks)}, "One")._repr_svg_().count("<line")
    marks[1][1] = (2, "W", 7, 3)
    svg = draw.pipelines({"v": (log, marks)}, "One")._repr_svg_()
    assert svg.count("<line") == lines + 1
