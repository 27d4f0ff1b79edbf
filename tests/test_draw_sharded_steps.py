"""The picture of steps with sharded parameters, read from its SVG."""

from helpers import draw
from simgpu import Event


def event(kind: str, name: str, start: float, end: float, nbytes: int = 0) -> Event:
    return Event(kind, name, "cuda:0", start * 1e-6, end * 1e-6, nbytes, 0)


EVENTS = [
    event("collective", "all_gather blocks.7", 100, 150),
    event("kernel", "addmm", 150, 200),
    event("kernel", "mm", 260, 300),
    event("collective", "reduce_scatter blocks.7", 300, 340),
]


def test_it_says_how_long_the_gpu_waits_and_which_block_travels():
    picture = draw.sharded_steps({"by hand": (100e-6, 220e-6, EVENTS)}, "A step")
    svg = picture._repr_svg_()
    assert svg.count("by hand: 200 µs, of which the GPU waits 110") == 2
    assert svg.count(">7</text>") == 2
    assert svg.count("stroke-dasharray") == 2
    for words in ("forward", "backward", "all-gather", "reduce-scatter", "simulated"):
        assert words in svg


def test_messages_without_names_get_the_numbers_of_their_blocks():
    words = ["all_gather"] * 4 + ["reduce_scatter"] * 2
    sent = [event("collective", w, i, i + 1, 64) for i, w in enumerate(words)]
    small = event("collective", "all_gather", 20, 21, 8)
    run = (0.0, 3e-6, [small, *sent])
    svg = draw.sharded_steps({"by hand": run}, "A step", blocks=2)._repr_svg_()
    assert svg.count(">0</text>") - 1 == svg.count(">1</text>") == 3  # one: the axis
