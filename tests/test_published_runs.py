"""The planner of lessons 26 and 27 beside runs that others have published."""

import json
import statistics
from pathlib import Path

import pytest

from scripts import published_runs
from scripts.plan_run import peak_bytes

RECORDINGS = Path(__file__).parent / "recordings"
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


def test_every_run_has_a_line_of_its_own(capsys, ratios):
    published_runs.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ratios)
    assert sum(line.endswith("judged") for line in lines) == 54
