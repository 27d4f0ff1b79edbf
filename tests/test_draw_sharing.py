"""The pictures of lesson 14: one tensor in two processes, and a lost update."""

import re

from helpers import draw


def text(picture) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture._repr_svg_())


def test_the_values_stay_on_the_gpu_and_a_handle_travels():
    picture = draw.shared_tensor(50_000_000)
    said = text(picture)
    assert {"sender", "worker", "allocated nothing", "memory of the GPU"} <= set(said)
    assert any("values of x, " in words for words in said)
    assert picture.title.startswith("A handle goes through the queue")


def test_both_workers_read_before_either_writes():
    said = text(draw.lost_update())
    assert said.count("reads 0") == said.count("writes 0 + 1") == 2
    assert "1, not 2" in said
