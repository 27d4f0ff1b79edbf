"""`draw.averaging`: what a rank computes and sends in a step of DDP by hand."""

from helpers import draw
from simgpu import Event, JobTimeline, RankLog

US = 1e-6


def log(message_starts: float) -> JobTimeline:
    """Forward to 10 µs, backward to 60, a message of 40, a step of 5."""
    ends = message_starts + 40
    last = max(ends, 60)
    rows = [
        ("kernel", "addmm", 0, 10),
        ("kernel", "ones_like", 10, 12),
        ("kernel", "mm", 12, 60),
        ("collective", "all_reduce", message_starts, ends),
        ("kernel", "_foreach_add_", last, last + 5),
    ]
    events = [Event(k, n, "cuda:0", a * US, b * US, 0, 0) for k, n, a, b in rows]
    return JobTimeline([RankLog(0, events, [], (last + 5) * US)])


def test_the_title_says_how_long_the_gpu_waits():
    logs = {"after": log(60), "during": log(30), "hidden": log(15)}
    title = draw.averaging(logs, ranks=[0]).title
    assert "after: 1 messages, the GPU waits 40 of 105 µs" in title
    assert "during: 1 messages, the GPU waits 10 of 75 µs" in title
    assert "hidden: 1 messages, the GPU waits 0 of 65 µs" in title


def test_two_pictures_can_share_an_axis():
    alone = draw.averaging({"during": log(30)}, ranks=[0])
    shared = draw.averaging({"during": log(30)}, ranks=[0], until=log(60))
    assert "75 µs (simulated)" in alone._repr_svg_()
    assert "105 µs (simulated)" in shared._repr_svg_()


def test_a_message_has_its_number():
    svg = draw.averaging({"hidden": log(15)}, ranks=[0])._repr_svg_()
    assert ">1</text>" in svg and ">backward</text>" in svg


def test_a_later_copy_is_no_part_of_the_step():
    """A notebook compares the values of a step before it asks for its timeline."""
    plain = log(30)
    copy = Event("copy", "cuda:0 to cpu", "cuda:0", 80 * US, 99 * US, 0, 0)
    (rank,) = plain.logs
    late = JobTimeline([RankLog(0, [*rank.events, copy], [], 99 * US)])
    titles = [draw.averaging({"step": one}, ranks=[0]).title for one in (plain, late)]
    assert titles[0] == titles[1]
