"""The picture of loader workers: its schedule, and the words in its SVG."""

import pytest

from helpers import draw
from helpers.draw.loaders import plan


@pytest.mark.parametrize(("workers", "interval"), [(1, 10), (2, 5), (3, 4), (8, 4)])
def test_the_slower_of_loading_and_training_sets_the_pace(workers, interval):
    _, used = plan(load=10, step=4, workers=workers, batches=49)
    begin, end = used[0][0], used[48][0]
    assert (end - begin) / 48 == pytest.approx(interval)


def test_a_worker_runs_ahead_by_its_prefetch_factor_and_no_more():
    loaded, used = plan(load=1, step=100, workers=1, batches=4, factor=2)
    assert loaded[2][0] == loaded[1][1]  # asked for as the loop takes batch 0
    assert loaded[3][0] == used[1][0] == 101


def test_the_picture_says_how_long_the_gpu_waits():
    svg = draw.loaders(1e-3, 0.4e-3, [1, 3], batches=3)._repr_svg_()
    for words in (
        "1 worker: 3 batches in 3.4 ms; after its first batch the GPU waits 1.2 ms",
        "3 workers: 3 batches in 2.2 ms; after its first batch the GPU waits 0.0 ms",
    ):
        assert svg.count(words) == 2  # in the picture and in its title
    assert svg.count(">GPU</text>") == 2 and svg.count(">worker 2</text>") == 1
    assert svg.count(">waits</text>") == 2
