"""The picture of a rank's step on several nodes, read from its SVG."""

from types import SimpleNamespace

from helpers import draw
from simgpu import Event


def event(kind: str, name: str, start: float, end: float, group: str = "") -> Event:
    words = {"group": group} if group else {}
    return Event(kind, name, "cuda:0", start * 1e-6, end * 1e-6, 8, 0, **words)


def picture(*events: Event) -> str:
    log = SimpleNamespace(events=lambda rank: list(events))
    drawn = draw.network_steps({"HSDP": log}, "One step", per_node=2)
    return drawn._repr_svg_()


def test_a_message_is_on_the_link_that_its_group_needs():
    svg = picture(
        event("kernel", "mm", 100, 200),
        event("collective", "all_gather blocks.0", 200, 400, "ranks 2, 3"),
        event("collective", "all_reduce blocks.0", 300, 700, "ranks 0, 2"),
        event("collective", "all_reduce bucket 1", 700, 1100, "all ranks"),
        event("kernel", "mm", 1000, 1100),
    )
    assert svg.count(">NVLink</text>") == 1 and svg.count(">network</text>") == 1
    assert svg.count(">all-reduce</text>") == 2 and ">all-gather</text>" in svg
    assert "computes 200 and the network is busy 800" in svg
    assert svg.count("HSDP: 1,000 µs</text>") == 1
    assert svg.count(">waits</text>") == svg.count("stroke-dasharray") == 1


def test_time_in_which_two_messages_travel_is_counted_once():
    svg = picture(
        event("kernel", "mm", 0, 10),
        event("collective", "all_gather", 10, 50, "all ranks"),
        event("collective", "reduce_scatter", 30, 80, "all ranks"),
    )
    assert "the network is busy 70" in svg
    assert svg.count(">network</text>") == 2  # a lane for each kind


def test_a_link_without_messages_has_no_lane():
    svg = picture(event("kernel", "mm", 0, 10))
    assert "NVLink" not in svg and ">network</text>" not in svg
