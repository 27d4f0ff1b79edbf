"""Explorers: the picture follows the controls, and readers without a kernel see one."""

from xml.etree import ElementTree

import pytest

from helpers import explore
from helpers.simgpu.clock import COPY_LATENCY

ALLOCATOR = dict(tensors=9, size=6, free="every second", more=12)
OVERLAP = dict(chunks=4, megabytes=64, speed=12, compute=6)


@pytest.mark.parametrize("make", [explore.allocator, explore.overlap, explore.ring])
def test_the_picture_follows_the_controls(make):
    explorer = make()
    first = explorer.html.value
    ElementTree.fromstring(first)
    name, control = next(iter(explorer.controls.items()))
    before = control.value
    control.value = before + 1
    assert explorer.values[name] == before + 1
    assert explorer.html.value != first
    control.value = before
    assert explorer.html.value == first


@pytest.mark.parametrize("make", [explore.allocator, explore.overlap, explore.ring])
def test_a_reader_without_a_kernel_sees_the_picture(make, monkeypatch):
    shown = []
    monkeypatch.setattr(explore, "display", lambda bundle, raw: shown.append(bundle))
    explorer = make()
    explorer._ipython_display_()
    (bundle,) = shown
    assert bundle["image/svg+xml"] == explorer.html.value
    assert bundle["text/plain"].startswith("Explorer(")
    assert explorer.model_id not in bundle["text/plain"]
    view = bundle["application/vnd.jupyter.widget-view+json"]
    assert view["model_id"] == explorer.model_id


@pytest.mark.parametrize(
    "change, ending",
    [
        ({}, "12 MiB more: out of memory with 34 MiB not taken"),
        ({"more": 8}, "8 MiB more: found in the cache"),
        ({"more": 2}, "2 MiB more: found in the cache"),
        ({"tensors": 3}, "12 MiB more: found in a new segment"),
        ({"free": "all", "more": 48}, "48 MiB more: found in a new segment"),
        ({"size": 24}, "out of memory at tensor 3 of 9"),
    ],
)
def test_allocator_tells_how_the_story_ends(change, ending):
    picture = explore.allocator_picture(**{**ALLOCATOR, **change})
    assert picture.title.endswith(f". {ending}")


def test_allocator_draws_every_setting():
    explorer = explore.allocator()
    for free in explorer.controls["free"].options:
        for tensors in (1, 24):
            for size in (1, 24):
                explore.allocator_picture(tensors, size, free, more=48)


def test_overlap_hides_the_shorter_of_copying_and_computing():
    copy = COPY_LATENCY + 64e6 / 4 / 12e9
    times = explore.overlap_times(**OVERLAP)
    assert times[0][0] == pytest.approx(copy)
    assert times[-1][2] == pytest.approx(copy + 6e-3)  # computing is the longer here
    slow = explore.overlap_times(**{**OVERLAP, "speed": 1})
    assert slow[-1][2] == pytest.approx(4 * (COPY_LATENCY + 16e-3) + 6e-3 / 4)
    (alone,) = explore.overlap_times(**{**OVERLAP, "chunks": 1})
    assert alone[2] == pytest.approx(COPY_LATENCY + 64e6 / 12e9 + 6e-3)


def test_overlap_says_one_and_two_streams_are_the_same_for_one_chunk():
    picture = explore.overlap_picture(**{**OVERLAP, "chunks": 1})
    assert picture.title.endswith("1.00 times as fast")


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_ring_sums_every_chunk_in_every_rank(ranks):
    states = explore.ring_states(ranks)
    assert len(states) == 2 * (ranks - 1) + 1
    everyone = frozenset(range(ranks))
    assert states[-1] == [[everyone] * ranks] * ranks
    after_half = states[ranks - 1]
    complete = [row.index(everyone) for row in after_half]
    assert sorted(complete) == list(range(ranks))  # one complete chunk in each rank
    assert all(row.count(everyone) == 1 for row in after_half)
    for before, after in zip(states, states[1:], strict=False):
        changed = [sum(a != b for a, b in zip(x, y, strict=True))
                   for x, y in zip(before, after, strict=True)]  # fmt: skip
        assert changed == [1] * ranks  # each rank receives one chunk in each step


def test_ring_draws_every_step():
    titles = [explore.ring_picture(4, step).title for step in range(8)]
    assert titles[0] == "After step 0 of 6: the start"
    assert titles[3].endswith("all-gather") and titles[6].endswith("all done")
    assert titles[7] == titles[6]
