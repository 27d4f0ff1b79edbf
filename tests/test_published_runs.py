"""Lesson 26's planner beside runs that others have published."""

import json
import statistics
from pathlib import Path

import pytest

from layouts import rows
from layouts import sweep as composed
from layouts.shapes import Layout
from scripts import published_runs
from scripts.plan_run import LAUNCHES, peak_bytes
from tests import planned

RECORDINGS = Path(__file__).parent / "recordings"
OF_SIMULATOR = RECORDINGS.parents[1] / "simgpu" / "tests" / "recordings"
SIZES = {"9b": [4096, 40, 32], "1b": [2048, 24, 16]}
MPT = ["A100", "9b", 2048, 16, 4, 2, True, "HYBRID_SHARD", 3000.0, 50.0]
LLAMA = ["x", "H100", 8, "Llama 3 8B", "fsdp", 2, 8192, 0.5, None, False, 6000]


@pytest.fixture(scope="module")
def ratios():
    return published_runs.ratios()


def test_each_run_is_there(ratios):
    assert len(ratios) == 90
    assert sum(run.is_fitted for run, _ in ratios) == 36
    assert all(run.source for run, _ in ratios)


@pytest.mark.parametrize("is_fitted, near, most", [(True, 35, 1.17), (False, 52, 1.2)])
def test_predictions_are_as_near_as_the_lesson_says(ratios, is_fitted, near, most):
    apart = [
        max(ratio, 1 / ratio) for run, ratio in ratios if run.is_fitted == is_fitted
    ]
    assert sum(one <= 1.15 for one in apart) == near
    assert statistics.median(apart) < 1.06
    assert max(apart) < most


def test_published_memory_is_up_to_a_sixth_less(ratios):
    runs = [run for run, _ in ratios if run.memory]
    assert len(runs) == 2
    for run in runs:
        predicted = sum(peak_bytes(run.model, run.plan).values())
        assert 1.08 < predicted / run.memory < 1.17


def test_the_share_of_the_peak_is_counted_as_publishers_do(ratios):
    text = (RECORDINGS / "train_llmfoundry.json").read_text("utf-8")
    recording = json.loads(text)
    runs, left_out = published_runs.read(recording)
    assert len(runs) == len(recording["rows"]) and not left_out
    for run, row in zip(runs, recording["rows"], strict=True):
        share = published_runs.mfu_as_published(run, run.rate)
        assert 100 * share == pytest.approx(row[-1], rel=0.002)
    for run, _ in ratios:
        if run.mfu:
            share = published_runs.mfu_as_published(run, run.rate)
            assert share == pytest.approx(run.mfu, abs=0.01)  # some are whole percents


def test_a_row_says_how_its_states_are_shared():
    runs, _ = published_runs.read({"models": SIZES, "rows": [MPT]})
    assert (runs[0].plan.gpus, runs[0].plan.shard) == (16, 8)
    row = [*MPT[:7], "NO_SHARD", *MPT[8:]]
    runs, _ = published_runs.read({"models": SIZES, "rows": [row]})
    assert runs[0].plan.shard == 1 and not runs[0].is_fitted
    row = [MPT[0], "1b", *MPT[2:7], "SHARD_GRAD_OP", *MPT[8:]]
    runs, _ = published_runs.read({"models": SIZES, "rows": [row]})
    assert not runs[0].plan.reshard and runs[0].is_fitted


@pytest.mark.parametrize(
    "change, why",
    [
        ({0: "torchtitan float8"}, "the speed in float8"),
        ({9: True}, "the speed of compiled kernels"),
        ({3: "Mamba 3B"}, "the sizes of 'Mamba 3B'"),
        ({1: "B200"}, "the card B200"),
        ({2: 12}, "12 GPUs are not whole machines"),
        ({4: "pipeline"}, "the strategy 'pipeline'"),
        ({6: 131072}, "sequences of 131,072 tokens"),
        ({10: 0}, "0 tokens/s"),
    ],
)
def test_rows_of_which_nothing_is_known_say_why(change, why):
    assert published_runs.read({"rows": [LLAMA]})[1] == []
    broken = [change.get(i, cell) for i, cell in enumerate(LLAMA)]
    runs, ((row, reason),) = published_runs.read({"rows": [broken]})
    assert runs == [] and why in reason and row == str(broken)


def test_other_tables_are_told_apart():
    _, ((_, why),) = published_runs.read({"rows": [["A100", 1.0]]})
    assert why == "2 columns; 10 or 11 are known"
    _, ((_, why),) = published_runs.read({"models": {}, "rows": [MPT]})
    assert why == "not known: the sizes of '9b'"


@pytest.fixture(scope="module")
def sweep() -> list[tuple[rows.Recorded, float]]:
    """The healthy rows up to 32 nodes, and planned / recorded seconds."""
    recording = json.loads((OF_SIMULATOR / "ultrascale.json").read_text("utf-8"))
    read = [rows.of_sweep(row) for row in recording["rows"]]
    return [
        (its, planned.seconds(its.layout) / its.seconds)
        for its, why in zip(read, rows.broken(read), strict=True)
        if its.seconds and not why and its.layout.gpus <= 8 * rows.MOST_NODES
    ]


@pytest.mark.parametrize("group", planned.GROUPS)
def test_a_sweep_is_predicted_as_the_lesson_says(sweep, group):
    is_in = planned.GROUPS[group]
    ratios = [ratio for its, ratio in sweep if its.model == "8B" and is_in(its.layout)]
    count, *figures = planned.in_lesson()[group]
    assert int(count) == len(ratios)
    assert figures[:2] == planned.as_in_lesson(ratios)


def test_slices_and_stages_on_several_machines_wait_as_the_lesson_says(sweep):
    of = Layout(32, 4096, 32, 14336, 131072, 4096, 1, 32, 8, 2, 8, 1)
    found = {its.layout: (its.seconds, ratio * its.seconds) for its, ratio in sweep}
    assert found[of] == pytest.approx((12.5, 2.1), abs=0.05)
    other = of._replace(micro=8, accumulate=4)
    assert found[other] == pytest.approx((2.1, 2.15), abs=0.05)


def test_launches_of_a_block_are_those_of_its_dry_run():
    of = Layout(1, 2048, 32, 8192, 131072, 4096, 1, 1, 1, 1, 2)
    block = composed.parts_of([of])[composed.shape_of(of)]["block"]
    assert block.forward.launches == block.backward.back_launches == LAUNCHES


def test_the_host_alone_is_near_a_small_micro_batch_of_the_sweep(sweep):
    of = Layout(32, 4096, 32, 14336, 131072, 4096, 1, 256, 1, 1, 8, 0)
    ((its, ratio),) = [row for row in sweep if row[0].layout == of]
    assert its.seconds / 256 == pytest.approx(0.142, abs=5e-4)
    assert 0.8 < ratio < 1


def test_every_run_has_a_line_of_its_own(capsys, ratios):
    published_runs.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ratios)
    assert sum(line.endswith("judged") for line in lines) == 54
