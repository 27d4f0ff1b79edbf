"""The cards that are found by name, beside those that every list names."""

import re

import pytest
import torch

import simgpu
from simgpu._device.cards import CARDS, GIB, MORE_CARDS, find_card
from simgpu._measure.fit import nearest

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability":
# threads of a multiprocessor, KiB that it shares
LIMITS = {
    (7, 0): (2048, 96),
    (7, 5): (1024, 64),
    (8, 0): (2048, 164),
    (8, 6): (1536, 100),
    (8, 9): (1536, 100),
    (9, 0): (2048, 228),
    (10, 0): (2048, 228),
    (10, 3): (2048, 228),
}
SOLD = {  # GB of memory, as they are sold
    "A100-40GB": 40, "V100-32GB": 32, "V100-16GB": 16, "RTX4090": 24, "RTX3090": 24,
    "A10G": 24, "L4": 24, "H100-PCIE": 80, "H20": 96,
    "B300": 288, "GB200": 192, "GB300": 288,
}  # fmt: skip


@pytest.fixture(autouse=True)
def gpus_end():
    yield
    simgpu.stop()


@pytest.mark.parametrize("name", CARDS | MORE_CARDS)
def test_the_figures_of_a_card_agree(name):
    card = find_card(name)
    limits = card.threads_per_multi_processor, card.shared_memory // 1024
    assert limits == LIMITS[card.capability]
    # two transfers a clock; datasheets round, by 2.4 % for H200
    moved = 2 * 1000 * card.memory_clock * card.memory_bus / 8
    assert card.memory_bandwidth == pytest.approx(moved, rel=0.025)
    assert ("float8" in card.flops) == (card.capability >= (8, 9))
    assert card.reached["attention"] < 1


@pytest.mark.parametrize("name", MORE_CARDS)
def test_a_program_sees_the_card(name):
    card = MORE_CARDS[name]
    assert find_card(name.lower()) is card
    simgpu.start(1, name)
    found = torch.cuda.get_device_properties(0)
    assert found.name.startswith(card.name)
    assert (found.major, found.minor) == card.capability
    assert found.multi_processor_count == card.multi_processors
    assert found.total_memory == card.total_memory
    # what CUDA reports is less than what is sold, by what the driver keeps
    assert 0.9 < found.total_memory / (SOLD[name] * GIB) < 1.0
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(2**39, dtype=torch.uint8, device="cuda")
    assert f"a total capacity of {card.total_memory / GIB:.2f} GiB" in str(raised.value)


def test_other_sizes_of_a_card_compute_as_it_does():
    for name in ("A100-40GB", "V100-16GB"):
        card, other = MORE_CARDS[name], CARDS[name.partition("-")[0]]
        assert (card.flops, card.reached) == (other.flops, other.reached)
        assert card.nvlink_bandwidth == other.nvlink_bandwidth


def test_a_measured_card_is_like_the_one_of_its_name():
    card = MORE_CARDS["L4"]
    assert nearest({"name": card.name, "capability": card.capability}) == "L4"


def test_a_card_that_nobody_knows_is_told_all_names():
    with pytest.raises(ValueError, match="unknown card") as raised:
        find_card("A100-4GB")
    names = re.findall(r"[\w-]+", str(raised.value).partition("choose one of")[2])
    assert names == [*CARDS, *MORE_CARDS]
