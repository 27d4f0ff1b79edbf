"""The simulator against real GPUs: every golden file that was recorded on one.

`tests/record_on_gpu.py` records them; here it rehearses on the simulator, whose own
recording it must predict exactly.
"""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import simgpu
from tests import fidelity
from tests.fidelity import GOLDEN

ROOT = Path(__file__).resolve().parents[1]
FILES = fidelity.read()
NONE_YET = "no golden file yet: run tests/record_on_gpu.py on a CUDA machine"
golden_files = pytest.mark.parametrize(
    "name", FILES or [pytest.param("none", marks=pytest.mark.skip(reason=NONE_YET))]
)


@golden_files
def test_the_allocator_has_the_measured_figures_at_every_step(name):
    golden = FILES[name]
    for trace in golden["traces"]:
        assert fidelity.faults_of_trace(trace) == []
    for training in golden["training"]:
        assert fidelity.faults_of_events(training) == []


@golden_files
def test_peaks_and_times_are_near_the_measured_ones(name):
    assert fidelity.faults_of(fidelity.predict(FILES[name])) == []


@golden_files
def test_a_golden_file_was_measured(name):
    golden = FILES[name]
    assert golden["driver"] != "simulated" and "simulated" not in golden["name"]
    assert set(golden["milliseconds"]) <= set(fidelity.TIMED)
    assert not [key for key in golden if "date" in key or "host" in key]


# -- the rehearsal ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> dict:
    """What the recorder writes, run as its own process on the simulator."""
    folder = tmp_path_factory.mktemp("golden")
    script = ROOT / "tests" / "record_on_gpu.py"
    command = [sys.executable, str(script), "--simulated", str(folder)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    version = torch.__version__.split("+")[0]
    assert done.stdout.strip() == str(path)
    assert path.name == f"A100-torch{version}.json"
    (golden,) = fidelity.read(folder).values()
    assert golden == json.loads(path.read_text())
    return golden


def test_a_rehearsal_never_becomes_a_golden_file(tmp_path, monkeypatch):
    from tests import record_on_gpu

    monkeypatch.setattr(record_on_gpu.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fidelity, "record", lambda **options: {"options": options})
    path = record_on_gpu.main(["--simulated"])
    assert tmp_path in path.parents and GOLDEN not in path.parents
    assert json.loads(path.read_text())["options"]["quick"] is True
    assert simgpu.count() == 0


def test_without_a_gpu_the_recorder_says_how_to_rehearse(monkeypatch):
    from tests import record_on_gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--simulated"):
        record_on_gpu.main([])
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(SystemExit, match="unset it"):
        record_on_gpu.main([])


def test_a_file_says_what_it_was_recorded_with(rehearsal):
    assert rehearsal["card"] == "A100" and rehearsal["torch"] == torch.__version__
    assert set(rehearsal) == {
        "card", "name", "total_memory", "torch", "cuda", "driver", "traces",
        "training", "milliseconds",
    }  # fmt: skip
    assert set(rehearsal["milliseconds"]) == set(fidelity.QUICK)
    names = [training["name"] for training in rehearsal["training"]]
    assert names == ["small mlp float32", "small mlp float16", "small mlp bfloat16"]


def test_memory_and_seconds_of_training_come_in_three_types():
    names = {
        f"{model} {numbers}"
        for model in ("mlp", "transformer")
        for numbers in ("float32", "float16", "bfloat16")
    }
    assert set(fidelity.TRAINING) == names
    assert {f"step of {name}" for name in names} < set(fidelity.TIMED)


@pytest.mark.parametrize("numbers", fidelity.NUMBERS)
def test_a_step_has_its_type_and_float16_a_scaler(numbers, monkeypatch):
    seen, scaled = [], []
    scale = torch.amp.GradScaler.scale

    def watched(scaler, loss):
        scaled.append(scaler.is_enabled())
        return scale(scaler, loss)

    monkeypatch.setattr(torch.amp.GradScaler, "scale", watched)
    simgpu.start(1)
    try:
        model = torch.nn.Linear(8, 4).cuda()
        model.register_forward_hook(lambda *args: seen.append(args[2].dtype))
        x = torch.ones(2, 8, device="cuda")
        before = model.weight.tolist()
        fidelity.training_step(model, lambda: model(x).float().mean(), numbers)()
        assert model.weight.tolist() != before
        assert model.weight.dtype == torch.float32
    finally:
        simgpu.stop()
    assert seen == [fidelity.NUMBERS[numbers]]
    assert scaled == [numbers == "float16"]


@pytest.mark.parametrize("numbers", fidelity.NUMBERS)
def test_a_small_transformer_is_recorded_and_replayed(numbers, monkeypatch):
    def small():
        return fidelity.transformer(numbers, width=16, words=50)

    monkeypatch.setitem(fidelity.TRAINING, "small", small)
    simgpu.start(1)
    try:
        assert fidelity.faults_of_events(fidelity.record_training("small")) == []
    finally:
        simgpu.stop()


def test_the_traces_visit_every_rule(rehearsal):
    stats = {trace["name"]: trace["stats"] for trace in rehearsal["traces"]}
    assert set(stats) == set(fidelity.TRACES)
    assert stats["small"]["allocation.large_pool.allocated"] == 0
    assert stats["mixed"]["segment.small_pool.allocated"] > 1
    assert stats["mixed"]["inactive_split.all.peak"] > 5
    assert stats["mixed"]["num_device_free"] > 5
    assert stats["on a full card"]["num_alloc_retries"] > 5
    assert stats["on a full card"]["num_ooms"] > 5
    two = next(t for t in rehearsal["traces"] if t["name"] == "two streams")
    assert {step[2] for step in two["steps"] if step[0] == "alloc"} == {0, 1}
    assert any(step[0] == "record" for step in two["steps"])
    for trace in rehearsal["traces"]:
        assert len(trace["allocated"]) == len(trace["steps"]) == len(trace["reserved"])


def test_a_recording_of_the_simulator_is_replayed_exactly(rehearsal):
    for trace in rehearsal["traces"]:
        assert fidelity.faults_of_trace(trace) == []
    for training in rehearsal["training"]:
        assert len(training["events"]) > 100
        assert fidelity.faults_of_events(training) == []


@pytest.fixture(scope="module")
def predicted(rehearsal) -> list:
    return fidelity.predict(rehearsal)


def test_a_recording_of_the_simulator_is_predicted_exactly(rehearsal, predicted):
    assert len(predicted) == len(fidelity.QUICK_TRAINING) + len(fidelity.QUICK)
    for what, ours, measured in predicted:
        assert ours == measured > 0, what
    assert fidelity.faults_of(predicted) == []
    assert simgpu.count() == 0


def test_planted_figures_are_caught_in_a_trace(rehearsal):
    trace = copy.deepcopy(rehearsal["traces"][1])
    trace["reserved"][200] += 2 * fidelity.MIB
    (fault,) = fidelity.faults_of_trace(trace)
    assert fault.startswith("mixed, step 200 [") and "reserved" in fault
    trace = copy.deepcopy(rehearsal["traces"][1])
    trace["stats"]["inactive_split.all.peak"] += 1
    (fault,) = fidelity.faults_of_trace(trace)
    assert fault.startswith("mixed: inactive_split.all.peak")


def test_planted_figures_are_caught_in_training(rehearsal):
    training = copy.deepcopy(rehearsal["training"][0])
    training["peak_allocated"] += 512
    (fault,) = fidelity.faults_of_events(training)
    assert fault.startswith("small mlp float32: peak_allocated")
    training = copy.deepcopy(rehearsal["training"][0])
    event = next(e for e in training["events"][50:] if e[0] == "alloc")
    event[1] += 512
    (fault,) = fidelity.faults_of_events(training)
    assert "bytes are put elsewhere" in fault


def test_predictions_that_are_too_far_off_are_caught():
    rows = [
        ("peak of mlp, MiB", 100.0, 100.9),
        ("a, ms", 1.0, 1.25),
        ("b, ms", 1.3, 1.1),
        ("c, ms", 4.0, 4.0),
    ]
    assert fidelity.faults_of(rows) == []
    rows[0] = ("peak of mlp, MiB", 100.0, 101.5)
    rows[3] = ("c, ms", 0.9, 4.0)
    assert [fault.split(":")[0] for fault in fidelity.faults_of(rows)] == [
        "peak of mlp, MiB",
        "c, ms",
        "c, ms should take longer than a, ms",
        "c, ms should take longer than b, ms",
    ]


def test_the_report_has_each_prediction_beside_its_measurement(
    rehearsal, predicted, monkeypatch
):
    monkeypatch.setattr(fidelity, "predict", lambda golden: predicted)
    text = fidelity.report(rehearsal)
    assert text.startswith("NVIDIA A100-SXM4-80GB (simulated), torch 2.")
    assert "as measured, to the byte" in text
    for what, _, _ in predicted:
        (line,) = [line for line in text.splitlines() if what in line]
        assert line.split()[-1] == "1.00"


def test_the_report_says_where_nothing_was_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(fidelity, "read", lambda: {})
    fidelity.main()
    assert "not yet measured" in capsys.readouterr().out
    assert fidelity.report.__doc__ and not list(tmp_path.iterdir())


def test_an_unknown_card_has_no_predicted_times(rehearsal):
    golden = {**rehearsal, "card": None, "training": rehearsal["training"][:1]}
    (row,) = fidelity.predict(golden)
    assert row[0] == "peak of small mlp float32, MiB"
