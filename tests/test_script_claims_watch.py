"""What 29-test-the-claims runs: `claims_watch.py`."""

from pathlib import Path

import pytest
import torch
from torch.cuda._sanitizer import CUDASanitizerErrors

from helpers import simgpu
from tests.launching import load

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


@pytest.fixture(scope="module")
def watch():
    return load("claims_watch.py")


@pytest.fixture
def reached(watch):
    return {number: claim.verdict for number, claim in watch.CLAIMS.items()}


def test_every_claim_has_a_verdict_and_a_lesson(watch):
    for claim in watch.CLAIMS.values():
        assert claim.verdict in ("true", "false") or claim.verdict[:10] == "true when "
        assert list(NOTEBOOKS.glob(f"{claim.lesson}-*.ipynb"))


def test_tally_counts_each_kind(watch, reached):
    said = watch.tally(reached, compare=True)
    assert said == "17 claims: 0 true, 11 true when …, 6 false; all as in the table"


def test_tally_refuses_a_claim_that_was_forgotten(watch, reached):
    del reached[3]
    for compare in (True, False):
        with pytest.raises(AssertionError, match=r"no cell has judged: claims \[3\]"):
            watch.tally(reached, compare)


def test_tally_compares_with_the_table_if_asked(watch, reached):
    reached[17] = "true"
    with pytest.raises(AssertionError, match=r"not as in the table: claims \[17\]"):
        watch.tally(reached, compare=True)
    assert watch.tally(reached, compare=False).startswith("17 claims: 1 true, 10 true")


def test_the_table_shows_every_claim(watch):
    html = watch.table()._repr_html_()
    assert html.count("<tr>") == 1 + len(watch.CLAIMS) and "`" not in html
    text = repr(watch.table())
    assert all(claim.line in text for claim in watch.CLAIMS.values())


def test_classes_are_found_in_any_spelling(watch):
    assert "DataParallel" in watch.classes_named("data_?parallel")
    assert watch.classes_named("model_?parallel") == []


def test_an_error_becomes_a_line(watch):
    assert watch.tried(lambda: torch.ones(1).shape) == (1,)
    assert watch.tried(lambda: 1 / 0) == "ZeroDivisionError: division by zero"


def test_the_cpu_is_timed_without_the_simulator_which_comes_back(watch):
    simgpu.start(2)
    try:
        assert watch.faster(torch.add, 8, stays=False) > 0
        assert simgpu.count() == 2
    finally:
        simgpu.stop()


def test_races_are_shown_and_then_raise_again(watch):
    simgpu.start(2)
    try:
        assert watch.total(busy=True) == 1000
        assert watch.total(busy=True, wait=True) == watch.total(busy=False) == 3000
        assert simgpu.count() == 2
        side, x = torch.cuda.Stream(), torch.ones(3, device="cuda")
        torch.cuda.synchronize()
        x *= 3
        with pytest.raises(CUDASanitizerErrors), torch.cuda.stream(side):
            x.sum()
    finally:
        simgpu.stop()


def test_a_slow_stage_may_be_the_first_or_the_last(watch):
    gpipe, other = watch.bubbles([3, 1], 2)  # by hand: done after 21 and after 18
    assert gpipe.idle == pytest.approx(1 - 24 / 42)
    assert other.idle == pytest.approx(1 - 24 / 36)
    gpipe, other = watch.bubbles([1, 3], 2)
    assert gpipe.idle == other.idle
