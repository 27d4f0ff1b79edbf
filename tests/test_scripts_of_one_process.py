"""Scripts of lessons 00 to 14: what `test_take_home.py` has no table for.

Each lesson's part says what its script measures, counts or saves.
"""

import difflib
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import simgpu
from helpers import count_copies, explore
from scripts.recorded_matmuls import FILE, recorded
from tests import take_home
from tests.launching import ROOT, SCRIPTS, load, text_of
from tests.take_home import OWN, Ran

pytestmark = pytest.mark.slow

MIB = 2**20


def saved(run: Ran) -> dict:
    """The weights; those of some scripts are on a GPU."""
    return torch.load(run.folder / "model.pt", map_location="cpu")


def numbers(pattern: str, text: str) -> list[float]:
    """What the pattern's only group finds."""
    return [float(number.replace(",", "")) for number in re.findall(pattern, text)]


def fits_the_bare_model(weights: dict) -> None:
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    model.load_state_dict(weights)


# -- 00, score_all.py ------------------------------------------------------------------


def shares(printed: str) -> dict[str, int]:
    """By the device, how many images it says it has scored."""
    found = re.findall(r"^(cpu|cuda:\d) .*: ([\d,]+) images", printed, re.M)
    return {device: int(count.replace(",", "")) for device, count in found}


def test_four_gpus_share_all_images(ran):
    found = shares(ran("00").text)
    assert list(found) == [f"cuda:{index}" for index in range(4)]
    assert sum(found.values()) == 20_000
    assert max(found.values()) - min(found.values()) <= 1024  # a batch
    assert numbers(r"in the first batch: (\S+)", ran("00").text)[0] < 1e-5


@pytest.mark.parametrize("visible, device", [("0", "cuda:0"), ("", "cpu")])
def test_one_device_gives_the_scores_of_four(
    ran, visible, device, tmp_path, monkeypatch
):
    four = torch.load(ran("00").folder / "scores.pt")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    printed = take_home.run("00", tmp_path)
    assert shares(printed) == {device: 20_000}
    alone = torch.load(tmp_path / "scores.pt")
    torch.testing.assert_close(four, alone, rtol=0, atol=1e-5)


# -- 01, train_anywhere.py -------------------------------------------------------------


def test_the_cpu_learns_the_same_weights(ran):
    cpu = ran("01", "4 gpus --device cpu")
    assert cpu.text.startswith("training on cpu, the CPU")
    gpu, alone = torch.load(ran("01").folder / "model.pt"), saved(cpu)
    assert {weight.device.type for weight in gpu.values()} == {"cpu"}
    fits_the_bare_model(gpu)
    for name, weight in gpu.items():
        torch.testing.assert_close(weight, alone[name], rtol=0, atol=1e-4)


# -- 02, lean_loop.py ------------------------------------------------------------------


def test_the_last_loss_falls_from_epoch_to_epoch(ran):
    last = numbers(r"(\d\.\d{4}) last", ran("02").text)
    assert last == sorted(last, reverse=True) and last[-1] < 1
    assert re.findall(r"epoch (\d)", ran("02").text) == ["0", "1", "2"]


def test_an_epoch_reads_its_losses_in_one_copy_and_sends_nothing(capsys):
    script = load("lean_loop.py")
    simgpu.start(1)
    try:
        with count_copies() as copies:
            script.main()
    finally:
        simgpu.stop()
    sent, *read = copies
    assert (sent.source, sent.nbytes) == ("cpu", 2048 * 64 * 4)
    assert read == [("cuda:0", "cpu", 2048 // script.BATCH * 4)] * script.EPOCHS
    assert len(capsys.readouterr().out.splitlines()) == script.EPOCHS


# -- 03, one_gpu.py and four_gpus.py ---------------------------------------------------


def code_of(name: str) -> list[str]:
    return text_of(name).partition('"""\n\n')[2].splitlines()


def test_four_ranks_reach_the_weights_of_one(ran):
    one, four = saved(ran("03", "1 ranks")), saved(ran("03"))
    fits_the_bare_model(four)
    assert list(one) == list(four)
    for name in one:
        torch.testing.assert_close(four[name], one[name], rtol=0, atol=1e-5)


def test_one_gpu_trains_and_saves(tmp_path: Path):
    command = "python -m simgpu --gpus 1 one_gpu.py"
    losses = numbers(r"loss ([\d.]+)", take_home.run_command(command, tmp_path))
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)
    assert (tmp_path / "model.pt").is_file()


def test_eleven_lines_and_four_imports_make_the_difference():
    lines = difflib.ndiff(code_of("one_gpu.py"), code_of("four_gpus.py"))
    new = [line[2:] for line in lines if line[:2] == "+ " and line[2:]]
    imports = [line for line in new if re.match("import |from ", line)]
    assert (len(imports), len(new) - len(imports)) == (4, 11)


# -- 04, memory_table.py ---------------------------------------------------------------

LAYERS = (nn.Linear(64, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 10))
MODEL = sum(p.nbytes for layer in LAYERS for p in layer.parameters()) / MIB


@pytest.fixture
def table(ran) -> dict[str, float]:
    """MiB by the name of the part, with 1000 samples."""
    return table_of(ran("04").text)


def table_of(printed: str) -> dict[str, float]:
    rows = re.findall(r"^(\w[\w ,]+?) +([\d.]+) MiB$", printed, re.M)
    return {name: float(size) for name, size in rows}


@pytest.mark.parametrize(
    "name, expected, tolerance",
    [
        ("parameters and buffers", MODEL, {"abs": 0.006}),
        ("gradients", MODEL, {"abs": 0.006}),
        ("optimizer state", 2 * MODEL, {"abs": 0.006}),
        ("workspaces, rounding", 16.25, {"abs": 1.5}),  # two workspaces
        # what the hidden layers return
        ("activations", 2 * 1000 * 1024 * 4 / MIB, {"rel": 0.2}),
    ],
)
def test_parts_of_memory_are_bytes_of_the_model(table, name, expected, tolerance):
    assert table[name] == pytest.approx(expected, **tolerance)


def test_the_peaks_are_those_of_the_lesson(table):
    hidden = 1000 * 1024 * 4 / MIB
    always = 3 * MODEL + table["batch"] + table["workspaces, rounding"]
    assert table["peak in forward"] == pytest.approx(always + 3 * hidden, rel=0.05)
    assert table["peak in step"] == pytest.approx(always + 2 * MODEL, rel=0.05)
    assert table["peak in backward"] > table["peak in forward"]
    assert table["reserved by PyTorch"] >= table["peak in backward"]


def test_a_larger_batch_changes_activations_and_not_the_model(ran, table):
    large = table_of(ran("04", "1 gpus 2000").text)
    for name in ("parameters and buffers", "gradients", "optimizer state"):
        assert large[name] == table[name]
    ratio = large["activations"] / table["activations"]
    assert ratio == pytest.approx(2, rel=0.1)


# -- 05, prefetch.py -------------------------------------------------------------------


def test_prefetching_is_faster_and_changes_no_loss(ran):
    found = {}
    for name in ("without", "with"):
        pattern = rf"^{name} prefetching: ([\d.]+) ms, losses:\n(.+)$"
        ms, losses = re.search(pattern, ran("05").text, re.M).groups()
        found[name] = float(ms), [float(word) for word in losses.split()]
    (slow, losses), (fast, others) = found["without"], found["with"]
    assert others == losses and len(losses) == 8
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]
    assert fast < 0.8 * slow


def test_prefetching_has_no_race(tmp_path):
    """With `--races raise`, a race would end the script with an error."""
    command = "python -m simgpu --gpus 1 --races raise prefetch.py"
    assert "without prefetching" in take_home.run_command(command, tmp_path)


# -- 06, catch_race.py -----------------------------------------------------------------


def cured(folder: Path, cure: str, races: str) -> subprocess.CompletedProcess:
    command = f"python -m simgpu --gpus 1 --races {races} catch_race.py --cure {cure}"
    return take_home.start_command(command, folder)


def test_both_losses_are_the_same(ran):
    two, one = numbers(r"loss (\d\.\d{4})", ran("06").text)
    assert two == one < 1.5  # ten classes: guessing has 2.3


@pytest.mark.parametrize("cure", ["wait_stream", "wait_event"])
def test_a_cure_leaves_no_race(cure, tmp_path):
    done = cured(tmp_path, cure, "raise")
    assert done.returncode == 0, done.stderr
    assert f"cure {cure}: loss" in done.stdout


def test_without_a_cure_the_race_is_an_error(tmp_path):
    done = cured(tmp_path, "none", "raise")
    assert done.returncode != 0
    assert "possible data race" in done.stderr and "in train" in done.stderr


def test_a_warning_names_the_copy_and_the_model(tmp_path):
    done = cured(tmp_path, "none", "warn")
    assert done.returncode == 0, done.stderr
    (write,) = re.findall(r"writes it on stream 1 .*: (.+)", done.stderr)
    (read,) = re.findall(r"reads it on the default stream .*: (.+)", done.stderr)
    assert "x.cuda(non_blocking=True)" in write and "model(x)" in read


# -- 07, time_step.py ------------------------------------------------------------------


def kernel_milliseconds() -> float:
    """What the kernels of the script's step take."""

    def step(model, x, labels):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
        x, labels = torch.empty(16384, 64), torch.empty(16384, dtype=torch.int64)
    cost = simgpu.estimate(step, model, x, labels, card="A100")
    return 1e3 * cost.kernel_seconds


def test_it_says_median_least_and_most_and_the_rate(ran):
    printed = ran("07").text
    found = re.search(r"median ([\d.]+) ms, min ([\d.]+) ms, max ([\d.]+) ms", printed)
    median, least, most = map(float, found.groups())
    assert least <= median <= most
    # no marked step finds an idle GPU: each is launched while the one before computes
    assert least == most == pytest.approx(kernel_milliseconds(), rel=0.01)
    (rate,) = numbers(r"([\d,]+) samples a", printed)
    assert rate == pytest.approx(16384 / median, rel=0.01)


# -- 08, what_binds.py and the recorded matmuls ----------------------------------------


def test_it_says_how_long_the_step_and_its_kernels_take(ran):
    pattern = r"takes (\d+) µs; its (\d+) kernels run for (\d+)"
    took, count, busy = map(int, re.search(pattern, ran("08").text).groups())
    kernels = explore.step_kernels(1024)
    assert count == len(kernels)
    assert busy == round(1e6 * sum(kernel.seconds for kernel in kernels))
    assert busy < 10 * count < took


def test_it_names_the_longest_kernels_the_rate_and_the_share_of_the_peak(ran):
    printed = ran("08").text
    assert re.findall(r"^(\w+) +\d+ x", printed, re.M)[:2] == ["mm", "addmm"]
    rate, share = re.search(r"([\d.]+) TFLOP/s, ([\d.]+)% of PEAK", printed).groups()
    matmuls = [k for k in explore.step_kernels(1024) if k.name.endswith("mm")]
    flops = 1024 * 512 * (4 * 64 + 6 * 10)
    seconds = sum(kernel.seconds for kernel in matmuls)
    assert float(rate) == pytest.approx(flops / seconds / 1e12, rel=0.01)
    assert float(share) == pytest.approx(100 * float(rate) / 19.5, abs=0.1)


def test_the_lessons_matmuls_are_those_that_the_simulator_is_compared_with():
    theirs = ROOT / "simgpu" / "tests" / "recordings" / "gemm_fp16.json"
    assert FILE.read_bytes() == theirs.read_bytes()


def test_no_recorded_matmul_is_faster_than_its_roof():
    found = recorded()
    assert len(found) == 220
    assert all(matmul.seconds > matmul.roof_seconds for matmul in found)


def test_recorded_matmuls_are_found_by_card_and_size():
    found = recorded("H100", 8192)
    assert {(m.card, m.columns, m.inner) for m in found} == {("H100", 8192, 8192)}
    assert [m.rows for m in found] == sorted(m.rows for m in found)
    assert found[0].flops == 2 * 8192 * 8192
    assert found[0].nbytes == 2 * (8192 * 8192 + 2 * 8192)


# -- 09, mixed_precision.py ------------------------------------------------------------


def test_too_large_a_scale_skips_steps_until_it_fits(ran):
    printed = ran("09").text
    (skipped,) = numbers(r"float16: (\d+) of 48 steps skipped", printed)
    assert 1 <= skipped < 24
    first, *_, last = numbers(r"loss ([\d.]+)", printed)
    assert last < first < 2.4


def test_mixed_precision_skips_no_step_and_is_slower_in_narrow_ones(ran):
    """Casts are kernels, and this step is bound by launches."""
    ms = {}
    for dtype in ("float32", "float16", "bfloat16"):
        printed = ran("09", f"1 gpus --dtype {dtype}").text
        assert f"{dtype}: 0 of 48 steps skipped" in printed or dtype == "float32"
        (ms[dtype],) = numbers(r"([\d.]+) ms a step", printed)
    assert ms["float16"] > ms["bfloat16"] > ms["float32"]


# -- 10, less_memory.py ----------------------------------------------------------------


class Steps(NamedTuple):
    """What the script prints: a gradient and a time for each step, the peak in MiB."""

    norms: list[float]
    ms: list[float]
    peak: float


@pytest.fixture
def found(ran) -> dict[str, Steps]:
    """By the options: what the script prints."""
    texts = {"own": ran("10").text}
    for options in (
        "",
        "--offload",
        "--checkpoint --offload",
        "--accumulate 4 --checkpoint --offload",
    ):
        texts[options] = ran("10", f"1 gpus {options}".strip()).text
    found = {}
    for options, text in texts.items():
        (peak,) = numbers(r"peak ([\d.]+) MiB", text)
        norms, ms = numbers(r"gradient ([\d.]+)", text), numbers(r"([\d.]+) ms", text)
        found[options] = Steps(norms, ms, peak)
    return found


def test_less_memory_takes_more_time(found):
    plain, own, offload = found[""], found["own"], found["--offload"]
    assert own.peak < plain.peak / 2 and offload.peak < own.peak
    assert plain.ms[-1] < own.ms[-1] < offload.ms[-1]
    both = found["--checkpoint --offload"]
    assert both.ms[-1] < offload.ms[-1] / 2  # after checkpointing little travels
    for other in found.values():
        assert other.norms[0] == pytest.approx(plain.norms[0], rel=1e-3)


def test_a_card_of_64_mib_refuses_the_plain_step_only(tmp_path: Path):
    small = "python -m simgpu --gpus 1 --memory 64MB less_memory.py"
    with pytest.raises(AssertionError, match="OutOfMemoryError"):
        take_home.run_command(small, tmp_path)
    assert "step 4" in take_home.run_command(f"{small} --checkpoint", tmp_path)


# -- 11, feed_loop.py ------------------------------------------------------------------


def test_without_workers_a_step_waits_for_all_of_its_items(ran):
    printed = ran("11", "1 gpus --workers 0 --load-ms 0.2").text
    line = r"waited ([\d.]+) ms a step, computed ([\d.]+) ms, GPU idle ([\d.]+) ms"
    rows = re.findall(line, printed)
    assert len(rows) == 3
    for waited, computed, idle in rows:
        assert float(waited) > 128 * 0.2  # ms, measured
        assert 0.1 < float(computed) < 1  # ms, simulated
        assert float(idle) < 0.2  # simulated: your loader's time is not in it


# -- 12, split_batch.py ----------------------------------------------------------------


@pytest.mark.parametrize("gpus, way", [(1, "1 gpus"), (2, "2 gpus"), (4, OWN)])
def test_it_compares_the_first_batch_with_one_gpu(ran, gpus, way):
    printed = ran("12", way).text
    said = re.search(r"loss (\d\.\d{4}) on one GPU, (\d\.\d{4}) on (\d)", printed)
    assert said[1] == said[2] and int(said[3]) == gpus
    assert "4 gradients agree" in printed
    if gpus == 2:  # and says what DDP needs
        for word in ("torchrun", "LOCAL_RANK", "init_process_group"):
            assert word in printed
        assert "DistributedSampler" in printed


def test_the_first_gpu_holds_the_optimizer_too(ran):
    fits_the_bare_model(saved(ran("12")))
    line = r"cuda:(\d) holds ([\d.]+) MiB, at most ([\d.]+) MiB"
    held = re.findall(line, ran("12").text)
    assert [gpu for gpu, _, _ in held] == list("0123")
    now, peak = ([float(row[i]) for row in held] for i in (1, 2))
    weights = 4 * (64 * 512 + 512 + 512 * 10 + 10) / MIB
    # weights, gradients and Adam's two numbers; a replica is thrown away
    assert now[0] - now[1] >= 3.9 * weights
    assert now[1] == now[2] == now[3]
    assert peak[0] > peak[1] == peak[2] == peak[3]


# -- 13, split_model.py ----------------------------------------------------------------


@pytest.mark.parametrize("way, gpus, share", [(OWN, 2, 0.7), ("4 gpus", 4, 0.5)])
def test_more_gpus_learn_what_one_learns_in_less_memory_each(ran, way, gpus, share):
    printed = ran("13", way).text
    rows = re.findall(r"step \d: loss ([\d.]+), on one GPU ([\d.]+)", printed)
    losses = [(float(split), float(one)) for split, one in rows]
    assert len(losses) == 5 and losses[-1][0] < losses[0][0]
    for split, one in losses:
        assert split == pytest.approx(one, abs=2e-4)
    rows = re.findall(r"(cuda:\d|one GPU).*peak ([\d.]+) MiB", printed)
    peaks = {name: float(peak) for name, peak in rows}
    alone = peaks.pop("one GPU")
    assert list(peaks) == [f"cuda:{gpu}" for gpu in range(gpus)]
    assert max(peaks.values()) < share * alone
    if gpus == 2:
        assert peaks["cuda:0"] == pytest.approx(peaks["cuda:1"], rel=0.1)


def test_a_model_that_one_card_refuses_trains_on_two(tmp_path: Path):
    command = "python -m simgpu --gpus 2 --memory 64MB split_model.py"
    printed = take_home.run_command(command, tmp_path)
    assert "one GPU: out of memory" in printed
    losses = numbers(r"step \d: loss ([\d.]+), on one GPU nan", printed)
    assert len(losses) == 5 and losses[-1] < losses[0]


# -- 14, score_workers.py and the other scripts ----------------------------------------


def test_several_processes_score_as_one_does(ran):
    alone, several = ran("14", "1 gpus"), ran("14")
    scores = [torch.load(run.folder / "scores.pt") for run in (several, alone)]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-5)
    loss = r"20,000 images, loss (\d\.\d{4}), saved"
    assert numbers(loss, several.text) == numbers(loss, alone.text) != []


def test_a_dead_worker_is_named(tmp_path):
    text = text_of("score_workers.py")
    line = "    torch.cuda.set_device(rank)\n"
    assert line in text
    script = tmp_path / "dies.py"
    script.write_text(text.replace(line, f"    assert rank != 1, 'bad card'\n{line}"))
    command = f"python -m simgpu --gpus 2 {script}"
    done = take_home.start_command(command, tmp_path)
    assert done.returncode == 1
    assert "worker 1 on cuda:1 died: exit code 1" in done.stderr
    assert "AssertionError: bad card" in done.stderr


@pytest.mark.parametrize(
    "way, told", [("mp.spawn", "ProcessExitedException"), ("torchrun", "exit code 1")]
)
def test_after_a_kill_the_other_worker_is_ended(tmp_path, way, told):
    done = subprocess.run(
        [sys.executable, SCRIPTS / "launch_ways.py", way, "killed"],
        cwd=tmp_path, capture_output=True, text=True, timeout=take_home.SECONDS,
    )  # fmt: skip
    assert done.stdout.strip() == told, done.stderr
    assert not (tmp_path / "finished").exists()
