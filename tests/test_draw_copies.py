"""The pictures of lesson 05: hidden copies, and the way of a batch to the GPU."""

import re

import pytest

from helpers import draw
from simgpu import Event


def event(start: float, end: float, kind: str) -> Event:
    """A kernel, or a copy to the GPU, in microseconds."""
    fields = dict.fromkeys(Event._fields, 0)
    fields |= {"kind": kind, "start": start * 1e-6, "end": end * 1e-6}
    fields |= {"source": "cpu" if kind == "copy" else "cuda:0", "device": "cuda:0"}
    return Event(**fields)


def loop(copies, kernels) -> list[Event]:
    return [event(*c, "copy") for c in copies] + [event(*k, "kernel") for k in kernels]


IN_TURNS = loop([(0, 20), (70, 90)], [(20, 70), (90, 140)])
OVERLAPPED = loop([(0, 20), (20, 40)], [(20, 70), (70, 120)])


def text(picture) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture._repr_svg_())


def test_hidden_copies_say_what_is_hidden_and_what_waits():
    picture = draw.hidden_copies({"in turns": IN_TURNS, "overlapped": OVERLAPPED}, 2)
    assert picture.title == (
        "2 batches, simulated: in turns 140 µs, 0 hidden; overlapped 120 µs, 20 hidden"
    )
    said = text(picture)
    assert said.count("copy hidden here") == 1
    assert said.count("compute waits for this copy") == 1
    assert {"in turns: 140 µs", "overlapped: 120 µs"} <= set(said)


def test_the_loops_share_one_axis():
    said = text(draw.hidden_copies({"a": IN_TURNS, "b": OVERLAPPED}, 2))
    assert said.count("0") == 1 and said.count("140 µs (simulated)") == 1


def test_real_gpus_have_no_events_to_draw():
    assert "simulated GPUs" in draw.hidden_copies({"in turns": []}, 2).title


def test_events_must_belong_to_the_batches():
    with pytest.raises(ValueError, match="not those of 3 batches"):
        draw.hidden_copies({"in turns": IN_TURNS}, 3)


def test_the_path_says_who_copies_and_whether_python_waits():
    picture = draw.copy_path()
    said = text(picture)
    assert {"pageable", "pinned", "GPU memory", ".pin_memory()"} <= set(said)
    assert "Python goes on" in said and "Python waits" in said
    assert "non_blocking=True" in picture.title
