"""Silent bugs of parallel training: `prove` names the wrong twin, and only that one.

The programs are those of `scripts/silent`, each after a public report.
"""

from pathlib import Path

import pytest

from simgpu import prove

SCRIPTS = Path(__file__).parent / "scripts" / "silent"

FOUND = {  # program -> where the wrong twin is first seen: stage, place
    "balance_of_local_tokens": ("loss", ""),
    "batch_in_second_place": ("samples", ""),
    "dropout_of_copies": ("dropout", "the dropout after 0"),
    "fused_projections": ("output", "the model"),
    "gradient_of_a_column": ("gradient", "0.bias"),
    "heads_for_sequences": ("output", "1"),
    "loss_of_gathered_logits": ("loss", ""),
    "mean_of_cut_tokens": ("loss", ""),
    "norm_counts_copies": ("gradient", ""),
    "norm_of_a_cut_sequence": ("gradient", "norm.bias"),
    "packed_documents": ("output", "the model"),
    "padding_of_a_rank": ("loss", ""),
    "padded_batch": ("samples", ""),
    "reduced_in_bfloat16": ("gradient", "2.bias"),
    "ring_without_masks": ("output", "1"),
    "rope_of_a_zigzag_cut": ("output", "1"),
    "router_of_cut_tokens": ("gradient", "router.weight"),
    "stale_shards": ("update", "0.weight"),
    "targets_of_a_cut_sequence": ("loss", ""),
    "tied_over_stages": ("gradient", "words.weight"),
    "tokens_of_parts_of_a_batch": ("loss", ""),
    "two_players": ("gradient", "2.bias"),
    "words_of_other_ranks": ("output", "0"),
}
UNALIGNED = {"padded_batch", "padding_of_a_rank"}


def report_of(program: str, twin: str):
    script = SCRIPTS / f"{program}.py"
    return prove(script, (1, 2), arguments=[twin], steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("program", FOUND)
def test_a_silent_bug_is_named(program):
    finding = report_of(program, "wrong").findings[0]
    step = int(program == "two_players")  # the judge has the first step
    assert (finding.step, finding.stage, finding.place) == (step, *FOUND[program])


@pytest.mark.slow
@pytest.mark.parametrize("program", FOUND)
def test_its_right_twin_is_not_accused(program):
    report = report_of(program, "right")
    assert report and report.steps == 2, report
    assert bool(report.notes) == (program in UNALIGNED), report


def test_every_program_is_tested():
    programs = {path.stem for path in SCRIPTS.glob("*.py")} - {"job"}
    assert programs == FOUND.keys()
