"""`simgpu.prove` finds and places every incident of lesson 28, and no right program.

The programs are those of `notebooks/incidents`, each incident after a public report.
"""

import pytest

from incidents import INCIDENTS, PROGRAMS, VARIANTS, Variant, write
from simgpu import prove


def named(variants):
    return pytest.mark.parametrize("variant", variants, ids=lambda v: v.name)


@named(INCIDENTS)
@pytest.mark.slow
def test_an_incident_is_found_and_placed(variant, tmp_path):
    report = prove(write(variant, tmp_path), (1, 2))
    assert not report
    first = report.findings[0]
    step, stage, place = variant.found
    assert (first.step, first.stage) == (step, stage), report
    begin, open_end, _ = place.partition("…")
    right = first.place.startswith(begin) if open_end else first.place == place
    assert right, report


@named([*PROGRAMS, *VARIANTS])
@pytest.mark.slow
def test_a_right_program_raises_no_alarm(variant, tmp_path):
    report = prove(write(variant, tmp_path), (1, 2))
    assert report, report
    assert report.steps >= 6


@named([variant for variant in PROGRAMS if variant.name != "ddp_images"])
@pytest.mark.slow
def test_four_ranks_agree_as_well(variant, tmp_path):
    assert prove(write(variant, tmp_path), (1, 4))


def test_lines_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="there 0 times"):
        _ = Variant("typo", "ddp_digits", "-    no such line\n+    another\n").text


def test_the_corpus_is_large_enough():
    assert len(INCIDENTS) >= 15
    assert len(PROGRAMS) + len(VARIANTS) >= 15
    assert len({i.name for i in INCIDENTS}) == len(INCIDENTS)
    assert all(i.source.startswith("https://") for i in INCIDENTS)
