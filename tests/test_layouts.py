"""Steps composed from dry runs of their parts, beside dry runs of the whole."""

import pytest
import torch

import simgpu
from recorded.files import Recording
from simgpu._timing.cost import HOSTS
from tests.layouts import nanotron, rows, schedule, sweep
from tests.layouts.schedule import Pass, Stage
from tests.layouts.shapes import Layout
from tests.layouts.tensor_parallel import BUFFERS

SMALL = Layout(6, 512, 8, 2048, 8192, 1024, 4, 3, 1, 1, 1)


@pytest.fixture
def whole():
    """The dry run of the whole program, as its first stage."""

    def run(of: Layout, **options):
        BUFFERS.clear()
        dtype = torch.get_default_dtype()
        try:
            return simgpu.dry_run(nanotron.train, of, world=of.gpus, **options)
        finally:
            torch.set_default_device("cpu")
            torch.set_default_dtype(dtype)

    return run


@pytest.mark.parametrize("of", [
    SMALL._replace(hidden=2048, heads=16, intermediate=8192),
    SMALL._replace(hidden=2048, heads=16, intermediate=8192, tp=2),
    SMALL._replace(hidden=2048, heads=16, intermediate=8192, layers=12, accumulate=2),
], ids=["one", "tp 2", "more layers"])  # fmt: skip
def test_layers_and_micro_batches_extend_to_the_whole(whole, of, monkeypatch):
    monkeypatch.setattr(sweep, "LOAD", 1.0)  # a dry run's card is cool
    parts = sweep.parts_of([of])[sweep.shape_of(of)]
    found = sweep.Predicted(of, parts, HOSTS["bare"])
    report = whole(of)
    assert found.seconds == pytest.approx(report.step_seconds, rel=0.05)
    held = found.peak / sweep.FRAGMENTS - sweep.LOGITS * sweep._logits(of)
    assert held == pytest.approx(report.peak_bytes, rel=0.05)


def test_a_slow_host_binds_small_micro_batches(whole):
    of = SMALL._replace(micro=1, accumulate=4)
    slow, bare = (whole(of, host=host).step_seconds for host in ("slow", "bare"))
    assert slow > 2 * bare
    parts = sweep.parts_of([of])[sweep.shape_of(of)]
    found = sweep.Predicted(of, parts, HOSTS["slow"]).seconds
    assert found == pytest.approx(slow, rel=0.1)


def test_a_pipeline_has_its_bubble():
    stage = Stage(Pass(1.0, 0.5), Pass(2.0, 0.5))
    assert schedule.seconds((stage,), 4, 0.0) == 12
    assert schedule.seconds((stage,) * 4, 8, 0.0) == 3 * (8 + 4 - 1)
    slower = Stage(Pass(1.0, 4.0), Pass(2.0, 4.0))
    assert schedule.seconds((slower,), 4, 0.0) == 32
    assert schedule.order(0, 2, 3) == [
        (True, 0), (True, 1), (False, 0), (True, 2), (False, 1), (False, 2)
    ]  # fmt: skip


def test_stages_share_what_is_computed():
    of = Layout(16, 2048, 32, 8192, 131_072, 4096, 1, 1, 1, 8, 1)
    assert [count for count, _ in nanotron.stages(of)] == [3, 3, 2, 3, 2, 3, 0, 0]
    assert sum(has_head for _, has_head in nanotron.stages(of)) == 1


def row(**other) -> list:
    values = dict(model="1B", layers=2, hidden=256, heads=4, intermediate=1024,
                  tied=True, vocab=1024, nodes=1, micro=1, accumulate=8, dp=8, pp=1,
                  tp=1, zero=1, status="ran", rate=1e5, memory=1.0)  # fmt: skip
    return list((values | other).values())


def test_broken_runs_are_left_out_and_counted():
    recorded = [
        row(), row(rate=3e4, zero=0), row(rate=1000.0, tp=2, dp=4),
        row(status="crashed or out of memory", rate=None, memory=None), row(nodes=2),
    ]  # fmt: skip
    recording = Recording("ultrascale", "ultrascale", {"rows": recorded})
    found, omitted = rows.steps(recording)
    assert [its.is_healthy for its in found] == [True, False, False, False]
    assert sorted(its.why for its in omitted) == [
        "8 ranks on 2 nodes", "broken: a third of the rate of a layout that is alike",
        "broken: more than a second for a micro-batch", "did not run",
    ]  # fmt: skip
    ((share, pick),) = rows.choices(found).values()
    assert share == 1 and pick.layout.zero == 1
    *_, steps, choice = rows.lines_of(found)
    assert steps.startswith("steps: median ") and " of 1 healthy rows; " in steps
    assert choice == "choice: median 100 %, worst 100 % of 1 groups"
