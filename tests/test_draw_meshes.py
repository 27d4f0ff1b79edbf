"""The pictures of meshes, read from their SVG."""

from helpers import draw
from helpers.draw.meshes import shares

AXES = {"replicate": [[0, 4], [1, 5]], "shard": [[0, 1], [4, 5]]}


def test_it_says_which_axis_crosses_the_network():
    picture = draw.mesh(AXES, per_node=4)
    assert "replicate: 0-4, 1-5, over the network" in picture.title
    assert "shard: 0-1, 4-5, inside a node, NVLink" in picture.title
    svg = picture._repr_svg_()
    assert svg.count("stroke-dasharray") == 2  # links between the nodes
    assert svg.count(">rank 5<") == 2
    assert svg.count(">node 0<") == svg.count(">node 1<") == 2


def test_a_group_has_one_colour():
    svg = draw.mesh({"tp": [[0, 2], [1, 3]]}, per_node=4)._repr_svg_()
    assert [svg.count(draw.COLOURS[i]) for i in range(2)] == [2, 2]


def test_a_link_that_passes_another_rank_goes_under_it():
    near = draw.mesh({"tp": [[0, 1]]}, per_node=4)._repr_svg_().count("<line")
    far = draw.mesh({"tp": [[0, 2]]}, per_node=4)._repr_svg_().count("<line")
    assert (near, far) == (1, 3)


def test_shares_say_what_is_computed_and_stored():
    full, half = (0, 0, 1, 1), (0, 0, 0.5, 1)
    ways = {"FSDP": [(full, half, "0-3"), (full, (0.5, 0, 0.5, 1), "4-7")]}
    picture = shares(ways, per_node=2)
    assert "FSDP: rank 0 computes 100 %, stores 50 %, samples 0-3" in picture.title
    svg = picture._repr_svg_()
    for words in ("0-3", "4-7", "computed by the rank", "stored by the rank", "node 0"):
        assert words in svg


def test_the_picture_of_the_lesson_has_six_ways():
    title = draw.mesh_ways().title
    assert "HSDP: rank 0 computes 100 %, stores 25 %, samples 0–3" in title
    assert "FSDP x TP: rank 0 computes 25 %, stores 12.5 %, samples 0–15" in title
    assert "TP x PP: rank 0 computes 12.5 %, stores 12.5 %, samples 0–31" in title
