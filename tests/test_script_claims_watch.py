"""What 19-test-the-claims runs: `claims_watch.py`."""

from pathlib import Path

import pytest
import torch

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
    assert watch.tally(reached).startswith("17 claims: 1 true, 9 true when …, 7 false")


def test_tally_refuses_a_claim_that_was_forgotten_or_judged_otherwise(watch, reached):
    with pytest.raises(AssertionError, match=r"claims \[3\]"):
        watch.tally({n: verdict for n, verdict in reached.items() if n != 3})
    with pytest.raises(AssertionError, match=r"claims \[17\]"):
        watch.tally(reached | {17: "false"})


def test_the_table_shows_every_claim(watch):
    html = watch.table()._repr_html_()
    assert html.count("<tr>") == 1 + len(watch.CLAIMS) and "`" not in html


def test_classes_are_found_in_any_spelling(watch):
    assert "DataParallel" in watch.classes_named("data_?parallel")
    assert watch.classes_named("model_?parallel") == []


def test_an_error_becomes_a_line(watch):
    assert watch.tried(lambda: torch.ones(1).shape) == (1,)
    assert watch.tried(lambda: 1 / 0) == "ZeroDivisionError: division by zero"


def test_the_cpu_is_timed_without_the_simulator_which_comes_back(watch):
    simgpu.start(2)
    try:
        assert watch.faster(torch.add, torch.ones(8), stays=False) > 0
        assert simgpu.count() == 2
    finally:
        simgpu.stop()
