"""The picture of what four stopwatches read of one step."""

import re
from xml.etree import ElementTree

import pytest
import torch

import simgpu
from helpers import draw


@pytest.fixture
def log():
    simgpu.start(1)
    x = torch.ones(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    simgpu.timeline().clear()
    for _ in range(5):
        x @ x
    torch.cuda.synchronize()
    yield simgpu.timeline()
    simgpu.stop()


def test_each_bar_says_what_its_stopwatch_reads(log):
    svg = draw.stopwatches(log)._repr_svg_()
    ElementTree.fromstring(svg)
    found = {
        words: float(number.replace(",", ""))
        for words, number in re.findall(r">([a-zA-Z ]+): ([\d,]+) µs<", svg)
    }
    kernels = 1e6 * sum(event.end - event.start for event in log.events)
    assert found["the launches only"] == 50
    assert found["until the GPU is done"] == found["from mark to mark"]
    assert found["until the GPU is done"] == pytest.approx(25 + kernels, abs=1)
    assert found["the kernels"] == pytest.approx(kernels, abs=1)


def test_the_title_has_both_times(log):
    title = draw.stopwatches(log).title
    assert title.startswith("One step, simulated: launched in 50 µs, done after ")


def test_real_gpus_have_words_instead_of_a_picture():
    assert draw.stopwatches("no timeline here") == "no timeline here"
