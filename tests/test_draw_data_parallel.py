"""The pictures of lesson 12, read from their SVG."""

import re
from types import SimpleNamespace

from helpers import draw


def copy(source: int, target: int, start: float, end: float, nbytes: int = 1000):
    source, target = f"cuda:{source}", f"cuda:{target}"
    return SimpleNamespace(
        kind="copy", name="", device=target, source=source, target=target,
        start=start * 1e-3, end=end * 1e-3, nbytes=nbytes,
    )  # fmt: skip


def kernel(name: str, gpu: int, start: float, end: float):
    return SimpleNamespace(
        kind="kernel", name=name, device=f"cuda:{gpu}", source="", target="",
        start=start * 1e-3, end=end * 1e-3, nbytes=0,
    )  # fmt: skip


STEP = [
    copy(0, 1, 0, 1),
    kernel("addmm", 1, 1, 2),
    kernel("addmm", 0, 1, 2),
    copy(1, 0, 2, 2.1, nbytes=10),
    kernel("mm", 0, 2.5, 3.5),
    kernel("mm", 1, 2.5, 3.5),
    copy(1, 0, 3.5, 4.5),
    kernel("_foreach_add_", 0, 4.5, 5),
]


def test_each_gpu_says_how_long_it_computes_copies_and_is_idle():
    svg = draw.shared_step(STEP)._repr_svg_()
    for words in (
        "computing 2.5 ms, copying 2.1 ms, idle 0.4 ms",  # a copy is on both GPUs
        "computing 2.0 ms, copying 2.1 ms, idle 0.9 ms",
    ):
        assert svg.count(words) == 2  # in the picture and in its title
    assert "simulated" in svg


def test_the_phases_of_the_first_gpu_follow_each_other():
    svg = draw.shared_step(STEP)._repr_svg_()
    phases = ["weights out", "forward", "backward", "gradients in", "Adam"]
    places = [svg.index(f">{phase}</text>") for phase in phases]
    assert places == sorted(places)
    heads = re.findall(r'<line x1="([\d.]+)" y1="50" x2="([\d.]+)"', svg)
    assert len(heads) == len(phases)
    assert all(float(left) < float(right) for left, right in heads)


def test_the_four_functions_say_what_goes_where():
    svg = draw.four_functions(2048, "8.3 MiB")._repr_svg_()
    for name in ("scatter", "replicate", "parallel_apply", "gather"):
        assert f">{name}</text>" in svg
    assert svg.count(">512 images</text>") == 4
    assert ">2048 x 10 scores, then the loss</text>" in svg
    assert "8.3 MiB from cuda:0" in svg


def test_weights_go_out_three_times_or_once():
    svg = draw.star_and_chain(2100, 969)._repr_svg_()
    assert "one after another: 2,100 µs" in svg and "along a chain: 969 µs" in svg
    assert svg.count("of W</text>") == 4  # three copies, and the pieces
