"""Steps composed from dry runs of their parts, beside dry runs of the whole."""

import pytest
import torch

import simgpu
from layouts import nanotron, replay, rows, sweep
from layouts.shapes import Layout
from layouts.tensor_parallel import BUFFERS
from layouts.trace import Event, Trace
from recorded.files import Recording
from simgpu._plan import schedule
from simgpu._plan.schedule import Pass, Stage
from simgpu._timing.cost import HOSTS

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
            torch.set_default_device(None)
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
    assert found.tensors(0) == pytest.approx(report.peak_bytes, rel=0.05)
    if of.tp == 1:  # with more, the replay holds what a collective has had for longer
        assert found.replayed().most == pytest.approx(report.peak_bytes, rel=0.02)


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
        (True, 0, 0), (True, 0, 1), (False, 0, 0), (True, 0, 2), (False, 0, 1),
        (False, 0, 2),
    ]  # fmt: skip


def test_stages_share_what_is_computed():
    of = Layout(16, 2048, 32, 8192, 131_072, 4096, 1, 1, 1, 8, 1)
    assert [count for count, _ in nanotron.stages(of)] == [3, 2, 3, 2, 3, 2, 1, 0]
    assert sum(has_head for _, has_head in nanotron.stages(of)) == 1
    halves = nanotron.stages(of._replace(pp=2))  # ten layers are exactly one half
    assert halves == [(10, False), (6, True)]


MIB = 2**20
# The first part makes its output of 4 MiB; a layer keeps 16 MiB for backward, and sends
# 32 MiB, which are then free; both make gradients of a parameter (64 MiB)
FIRST = Trace([Event(0, False, 0, 4 * MIB, 1)],
              [Event(0, True, 0, 64 * MIB, 1), Event(1, True, 0, 0, 1)],
              (2, 2), (0, 4 * MIB), -1, [0])  # fmt: skip
LAYER = Trace(
    [Event(0, False, 0, 16 * MIB, 1), Event(0, False, 1, 32 * MIB, 1),
     Event(0, False, 2, 4 * MIB, 2), Event(0, False, 1, 0, 2, True)],
    [Event(0, True, 0, 64 * MIB, 1), Event(0, False, 0, 0, 2),
     Event(-1, False, 0, 0, 3)],
    (10, 20), (2, 4 * MIB), -1, [0],
)  # fmt: skip


def test_a_stage_is_put_together_of_its_parts():
    its = replay.program([FIRST, LAYER, LAYER], has_head=False)
    first, *layers = [0, 1], [2, 3, 4, 5], [6, 7, 8, 9]
    gradient = its.places - 1
    assert gradient == 10 and its.launches == (22, 42)
    assert its.weights == [first[1], layers[0][3], layers[1][3]]
    *_, sent = its.forward
    assert sent == (layers[1][2], 0, 22, True)  # what the next stage is given
    assert its.backward == [
        (gradient, 4 * MIB, 0, False),
        (layers[1][3], 64 * MIB, 1, False), (layers[1][0], 0, 2, False),
        (layers[0][2], 0, 3, False),  # the input of the second is of the first
        (layers[0][3], 64 * MIB, 21, False), (layers[0][0], 0, 22, False),
        (first[0], 0, 23, False),
        (first[1], 64 * MIB, 41, False), (gradient, 0, 41, False),
    ]  # fmt: skip


@pytest.mark.parametrize(("pace", "most", "late"), [
    (Pass(1.0, 1.0), 1, 1), (Pass(2.0, 1.0), 2, 2), (replay.STALLED, 4, 4),
], ids=["in step", "the card is late", "the card does not come"])  # fmt: skip
def test_what_a_collective_has_had_stays_until_the_card_is_there(pace, most, late):
    run = replay.Replay(10**12)
    events = [
        event
        for i in range(4)
        for event in ((i, 2 * MIB, 4 * i + 1, False), (i, 0, 4 * i + 2, True))
    ]
    run.run(events, 16, [None] * 4, pace)
    assert (run.most, len(run.late)) == (most * 2 * MIB, late)
    run.waits()
    assert not run.late and run.memory.allocated == 0


def test_the_queue_bounds_how_far_the_host_is_ahead():
    run = replay.Replay(10**12)
    events = [(i, size, 100 * i + (not size), not size)
              for i in range(40) for size in (2 * MIB, 0)]  # fmt: skip
    run.run(events, 4000, [None] * 40, replay.STALLED)
    assert len(run.late) == replay.QUEUE // 100 + 1


def test_buckets_are_closed_behind_the_tensor_that_fills_them():
    half = 12 * MIB // 2  # numbers that take 12 MiB
    assert replay.buckets([half] * 4) == [36 * MIB, 12 * MIB]
    assert replay.buckets([40 * MIB, 1]) == [80 * MIB + 2]


@pytest.mark.parametrize(("dp", "zero", "more"), [
    (1, 0, 0), (2, 0, 16), (2, 1, -48),
], ids=["alone", "buckets", "zero"])  # fmt: skip
def test_a_step_takes_parameters_gradients_and_states(dp, zero, more):
    numbers = [8 * MIB]
    its = replay.Program([(0, 512 * MIB, 0, False)], [(0, 0, 1, False)], (1, 1), 1, [])
    pace = Pass(1.0, 1.0)
    run = replay.steps(its, numbers, [True, False], (pace, pace), False, dp, zero, 0,
                       10**12)  # fmt: skip
    # 2 bytes a parameter, 4 for sums; 12 for states, of which ranks of ZeRO have a part
    static = 6 * 8 + 12 * 8 + more
    assert run.memory.allocated == (static + 64) * MIB
    assert run.most == (static + 64 + 512) * MIB
    # the moments lie where the first step's activations did, so the second needs more
    moments = 8 * 8 // (dp if zero else 1)
    assert run.reserved == (static - moments + 64 + 512 + 512) * MIB


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
