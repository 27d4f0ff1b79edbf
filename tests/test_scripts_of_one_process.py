"""Scripts of lessons 00 to 14: what `test_take_home.py` has no table for.

Each lesson's part says what its script measures, counts or saves.
"""

import difflib
import json
import os
import re
import subprocess
import sys
import warnings
from collections import UserDict
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
)

import simgpu
from helpers import count_copies, explore
from scripts.recorded_matmuls import FILE, recorded
from support.limits import JOB, SHORT
from tests import take_home
from tests.launching import ROOT, SCRIPTS, load, simulated, text_of
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
    """By the device, how many samples it says it has scored."""
    found = re.findall(r"^(cpu|cuda:\d) .*: ([\d,]+) samples", printed, re.M)
    return {device: int(count.replace(",", "")) for device, count in found}


def test_four_gpus_share_all_samples(ran):
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


class ByName(nn.Module):
    """Scores what a dictionary holds."""

    def __init__(self, features: int):
        super().__init__()
        self.layer = nn.Linear(features, 3)

    def forward(self, x, mask, name):
        return self.layer(x) * mask


def loader_of_dictionaries(features: int, **options) -> DataLoader:
    rows = [
        {"x": torch.randn(features), "mask": torch.ones(1), "name": f"sample {i}"}
        for i in range(10)
    ]
    return DataLoader(rows, **{"batch_size": 3, **options})


AT_RANDOM = BatchSampler(RandomSampler(range(10)), 3, drop_last=False)
BY_LENGTH = [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]  # as a sampler of texts gives them


def test_gpus_score_a_loader_of_dictionaries_as_the_model_does():
    script = load("score_all.py")
    model, loader = ByName(4), loader_of_dictionaries(4)
    with simulated(2):
        gpus = [torch.device("cuda", index) for index in range(2)]
        scores, taken, first = script.score_all(model, loader, gpus)
    assert taken == {"cuda:0": 6, "cuda:1": 4}
    assert first["name"] == ["sample 0", "sample 1", "sample 2"]
    expected = torch.cat([script.scores_of(model, batch) for batch in loader])
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-6)


def test_four_gpus_score_at_the_same_time():
    script, seconds = load("score_all.py"), {}
    model, batches = script.your_model(), torch.randn(64 * 1024, 64).split(1024)
    with simulated(4, card="T4"):
        for count in (1, 4):
            gpus = [torch.device("cuda", index) for index in range(count)]
            simgpu.timeline().clear()
            script.score_all(model, batches, gpus)
            seconds[count] = simgpu.timeline().seconds
    assert seconds[4] < seconds[1] / 3


@pytest.mark.parametrize(
    "features, options, why",
    [
        (4, {"shuffle": True}, "changes the order"),
        (4, {"batch_size": 1, "batch_sampler": AT_RANDOM}, "changes the order"),
        (4, {"batch_size": 1, "batch_sampler": BY_LENGTH}, "no batch sampler of your"),
        (1_000_000, {}, "GiB, more than is free on cuda:0"),
    ],
)
def test_score_all_refuses_what_it_cannot_do(features, options, why):
    script = load("score_all.py")
    model, loader = ByName(features), loader_of_dictionaries(4, **options)
    with simulated(1, memory="8MB"):
        with pytest.raises(SystemExit, match=why):
            script.score_all(model, loader, [torch.device("cuda", 0)])


def test_score_all_takes_a_model_that_is_on_a_gpu(tmp_path, monkeypatch, capsys):
    script = load("score_all.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "your_model", lambda: nn.Linear(64, 3).cuda())
    with simulated(2):
        script.main()
    assert "20,000 samples scored, saved" in capsys.readouterr().out


X = torch.arange(20, 120.0).reshape(20, 5)


def first_columns(x: torch.Tensor) -> torch.Tensor:
    """Rows whose length is another in each batch."""
    return x[:, : 1 + int(x[0, 0]) // 20 % 3]


@pytest.mark.parametrize(
    "scores_of, why",
    [
        (lambda model, batch: {"logits": batch}, "returned a dict; it must return a t"),
        (
            lambda model, batch: batch.sum(),
            "returned a number; it must return a tensor",
        ),
        (
            lambda model, batch: first_columns(batch),
            r"\(2,\), but \(3,\) in batch 1: pad",
        ),
    ],
)
def test_score_all_wants_rows_of_one_length(scores_of, why, monkeypatch):
    script = load("score_all.py")
    monkeypatch.setattr(script, "scores_of", scores_of)
    with pytest.raises(SystemExit, match=why):
        script.score_all(nn.Identity(), X.split(4), [torch.device("cpu")])


def scored_in_main(script, model: nn.Module, folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(script, "your_model", lambda: model)
    monkeypatch.setattr(script, "your_batches", lambda: X.split(4))
    monkeypatch.chdir(folder)
    with simulated(2):
        script.main()


class Masked(nn.Module):
    """Says `cuda` without an index, and scores the last column -inf."""

    def forward(self, x):
        here = "cuda" if x.is_cuda else "cpu"
        hidden = torch.tensor([0.0, 0, 0, 0, float("inf")], device=here)
        return x - hidden


class Otherwise(nn.Module):
    """Has other scores on a GPU, by 4 % of the largest."""

    def forward(self, x):
        return x + 5 * x.is_cuda


class Labels(nn.Module):
    def forward(self, x):
        return x.argmax(1) > 2


@pytest.mark.parametrize("model", [Masked(), Labels()])
def test_scores_may_be_infinite_or_labels(model, tmp_path, monkeypatch, capsys):
    script = load("score_all.py")
    scored_in_main(script, model, tmp_path, monkeypatch)
    assert "in the first batch: 0e+00\n20 samples" in capsys.readouterr().out
    assert torch.equal(torch.load(tmp_path / "scores.pt"), model(X))


@pytest.mark.parametrize("model", [Otherwise(), nn.Threshold(1e9, float("nan"))])
def test_scores_that_differ_from_the_cpus_are_refused(model, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="the scores differ: is one nan, is the model"):
        scored_in_main(load("score_all.py"), model, tmp_path, monkeypatch)


# -- 01, train_anywhere.py -------------------------------------------------------------


def test_the_cpu_learns_the_same_weights(ran):
    cpu = ran("01", "4 gpus --device cpu")
    assert cpu.text.startswith("training on cpu, the CPU")
    gpu, alone = torch.load(ran("01").folder / "model.pt"), saved(cpu)
    assert {weight.device.type for weight in gpu.values()} == {"cpu"}
    fits_the_bare_model(gpu)
    for name, weight in gpu.items():
        torch.testing.assert_close(weight, alone[name], rtol=0, atol=1e-4)


def test_a_model_that_says_cuda_trains_on_the_gpu_that_was_named(own):
    says_cuda = {"(model(x), y)": "(model(x), y.cpu().cuda())"}
    printed = own("train_anywhere.py", says_cuda, "2 gpus --device cuda:1")
    assert "epoch 2: mean loss" in printed


# -- 02, lean_loop.py ------------------------------------------------------------------


def test_the_mean_loss_falls_from_one_reading_to_the_next(ran):
    means = numbers(r"mean of 8: (\d\.\d{4})", ran("02").text)
    assert means == sorted(means, reverse=True) and means[-1] < 1
    assert numbers(r"step (\d+):", ran("02").text) == [8, 16, 24, 32, 40, 48]


def test_losses_are_read_eight_at_a_time_and_no_step_waits(capsys, monkeypatch):
    script = load("lean_loop.py")
    monkeypatch.setattr(sys, "argv", ["lean_loop.py"])
    simgpu.start(1)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with count_copies() as copies, warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            script.main()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        simgpu.stop()
    steps = script.EPOCHS * 2048 // script.BATCH
    read = [copy for copy in copies if copy.target == "cpu"]
    of_images = script.BATCH * 64 * 4
    assert [copy.nbytes for copy in copies].count(of_images) == steps
    assert read == [("cuda:0", "cpu", script.READ_EVERY * 4)] * (steps // 8)
    moved = 6  # parameters and buffers, before the first step
    assert len(waits) == moved + len(read)
    assert len(capsys.readouterr().out.splitlines()) == len(read)


def test_the_lines_that_wait_are_printed(own):
    line = "        x, y = batch\n"
    waits = {line: f"{line}        x[0, 0].item()\n"}
    place, total = own("lean_loop.py", waits, "1 gpus --find-waits").splitlines()
    assert re.fullmatch(r"\S+lean_loop.py:\d+: x\[0, 0\]\.item\(\)", place)
    assert total == "waits in one step: 1"


def test_a_batch_may_be_nested_and_an_array_in_it_is_refused():
    send, x, here = load("lean_loop.py").send, torch.ones(2), torch.device("cpu")
    batch = {"x": x, "more": (x, [x]), "text": "a", "number": 3, "mask": None}
    assert send(batch, here) == batch | {"more": [x, [x]]}
    with pytest.raises(TypeError, match="a batch holds a ndarray"):
        send({"x": x, "labels": x.numpy()}, here)


def test_a_batch_outside_of_pinned_memory_is_told():
    send, x, there = load("lean_loop.py").send, torch.ones(2), torch.device("cuda")
    with simulated(1):
        with pytest.warns(UserWarning, match=r"pin_memory=True"):
            send([x], there)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            send([x.pin_memory(), x.cuda()], there)
            send([x], torch.device("cpu"))


def test_a_loss_that_is_not_a_number_ends_the_training():
    losses = [torch.tensor(value) for value in (1.0, torch.nan, 1.0)]
    with pytest.raises(SystemExit, match="step 9: the loss is nan"):
        load("lean_loop.py").read(losses, 10)


# -- 03, one_gpu.py and four_gpus.py ---------------------------------------------------


def code_of(name: str) -> list[str]:
    return text_of(name).partition('"""\n\n')[2].splitlines()


def test_four_ranks_reach_the_weights_of_one(ran):
    one, four = saved(ran("03", "1 ranks")), saved(ran("03"))
    fits_the_bare_model(four)
    assert list(one) == list(four)
    for name in one:
        torch.testing.assert_close(four[name], one[name], rtol=0, atol=1e-5)


def test_ranks_leave_out_what_they_cannot_share(own):
    edits = {"(2048, 64)": "(131, 64)", "+= loss": "+= len(x) + 0 * loss"}
    printed = own("four_gpus.py", edits, "2 ranks")
    assert numbers(r"loss ([\d.]+)", printed) == [65 / 2] * 3  # 64 and 1 of 131 // 2


def test_one_gpu_trains_and_saves(tmp_path: Path):
    command = "python -m simgpu --gpus 1 one_gpu.py"
    losses = numbers(r"loss ([\d.]+)", take_home.run_command(command, tmp_path))
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)
    assert (tmp_path / "model.pt").is_file()


def test_fifteen_lines_and_four_imports_make_the_difference():
    lines = difflib.ndiff(code_of("one_gpu.py"), code_of("four_gpus.py"))
    new = [line[2:] for line in lines if line[:2] == "+ " and line[2:]]
    imports = [line for line in new if re.match("import |from ", line)]
    assert (len(imports), len(new) - len(imports)) == (4, 15)


@pytest.mark.parametrize(
    "name, way",
    [
        ("one_gpu.py", "1 gpus"),
        ("four_gpus.py", "2 ranks"),
        pytest.param("train_anywhere.py", "1 gpus", marks=pytest.mark.long),
        pytest.param("split_batch.py", "2 gpus", marks=pytest.mark.long),
        pytest.param("split_model.py", "2 gpus", marks=pytest.mark.long),
    ],
)
def test_workers_of_a_loader_that_start_the_script_anew(own, tmp_path, name, way):
    """As macOS and Windows start them, and Python 3.14 on Linux."""
    (loader,) = re.findall("^from torch.utils.data import.*$", text_of(name), re.M)
    workers = (
        "DataLoader = __import__('functools').partial("
        "DataLoader, num_workers=1, multiprocessing_context='spawn')"
    )
    printed = own(name, {loader: f"{loader}\n{workers}"}, way)
    plain = take_home.run_command(take_home.command_of(name, way), tmp_path)
    assert printed == plain != ""


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
        ("workspaces, others", 16.25, {"abs": 1.5}),  # two workspaces
        # what the hidden layers return
        ("activations", 2 * 1000 * 1024 * 4 / MIB, {"rel": 0.2}),
    ],
)
def test_parts_of_memory_are_bytes_of_the_model(table, name, expected, tolerance):
    assert table[name] == pytest.approx(expected, **tolerance)


def test_the_peaks_are_those_of_the_lesson(table):
    hidden = 1000 * 1024 * 4 / MIB
    always = 3 * MODEL + table["batch"] + table["workspaces, others"]
    assert table["peak in forward"] == pytest.approx(always + 3 * hidden, rel=0.05)
    assert table["peak in step"] == pytest.approx(always + 2 * MODEL, rel=0.05)
    assert table["peak in backward"] > table["peak in forward"]
    assert table["reserved by PyTorch"] >= table["peak in backward"]


def kept_of(printed: str) -> dict[str, float]:
    """MiB that autograd keeps, by the name of the module."""
    _, _, modules = printed.partition("ten kinds of modules")
    found = re.findall(r"^  (\S.*?) +([\d.]+) MiB$", modules, re.M)
    return {name: float(size) for name, size in found}


def test_what_autograd_keeps_is_that_of_the_relus(ran, table):
    kept = kept_of(ran("04").text)
    hidden = 1000 * 1024 * 4 / MIB
    assert [*kept] == ["1", "3", "(loss)", "others"]
    assert kept["1"] == kept["3"] == pytest.approx(hidden, abs=0.01)
    assert sum(kept.values()) == pytest.approx(table["activations"], abs=0.03)


OWN_MODEL = """class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.like = nn.ReLU()
        self.unlike = nn.Sequential(nn.Tanh(), nn.Sigmoid())

    def forward(self, x):
        return self.unlike(self.like(x))


class Own(nn.Sequential):
    def __init__(self, *layers):
        super().__init__(*layers)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x):
        return super().forward(x).sigmoid()


model = Own("""
OWN_BATCH = """
class Boxed:
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def to(self, device):
        return Boxed(self.images.to(device), self.labels.to(device))

    def __getitem__(self, name):
        return getattr(self, name)


batch = Boxed(images, images[:, :10].argmax(1))
"""


def test_a_forward_repeated_layers_and_a_batch_of_ones_own_have_rows(own):
    (line,) = re.findall("^batch = {.*$", text_of("memory_table.py"), re.M)
    edits = {"model = nn.Sequential(": OWN_MODEL, line: OWN_BATCH}
    printed = own("memory_table.py", edits, "1 gpus 1000")
    kept = kept_of(printed)
    rows = 1000 * (64 * 4 + 8) / MIB
    assert table_of(printed)["batch"] == pytest.approx(rows, abs=0.01)
    scores = 1000 * 40 / MIB
    assert kept["(model)"] == kept["(loss)"] == pytest.approx(scores, abs=0.01)
    for row in ("like", "unlike.* (Tanh)", "unlike.* (Sigmoid)"):  # of two blocks
        assert kept[f"blocks.*.{row}"] == pytest.approx(2 * scores, abs=0.01)


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
    assert "of the time saved" in ran("05").text
    copy = float(re.search(r"a copy takes ([\d.]+) ms", ran("05").text)[1])
    assert slow - fast < 7 * copy  # the first of eight is not hidden


@pytest.mark.parametrize(
    "copy, why",
    [(0.01, "a copy is short beside a step"), (0.5, "the GPU waits for Python")],
)
def test_prefetching_in_vain_has_a_reason(copy, why):
    assert why in load("prefetch.py").gained(8.2, 8.1, copy, 1.0)


def test_prefetching_has_no_race(tmp_path):
    """With `--races raise`, a race would end the script with an error."""
    command = "python -m simgpu --gpus 1 --races raise prefetch.py"
    assert "without prefetching" in take_home.run_command(command, tmp_path)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def batches_of_all_kinds() -> list:
    """Pinned: a tensor, a pair, a dictionary with a name, and Hugging Face's kind."""
    x, more = torch.arange(6.0).pin_memory(), torch.ones(2).pin_memory()
    nested = {"ids": x, "name": "a.png", "parts": (more, [x])}
    return [x, Pair(x, x), nested, UserDict(ids=x)]


def test_the_prefetcher_takes_tuples_and_dictionaries():
    with simulated(1, races="raise"):
        batches = batches_of_all_kinds()
        tensor, pair, nested, mapping = load("prefetch.py").Prefetcher(batches)
        assert isinstance(pair, Pair) and nested["name"] == "a.png"
        (first, (second,)) = nested["parts"]
        for found in (tensor, pair.x, pair.y, nested["ids"], second, mapping["ids"]):
            assert found.is_cuda and found.tolist() == list(range(6))
        assert first.is_cuda and first[0].item() == 1


class Own:
    """A batch of a class: what the scripts ask of it is `to`."""

    def __init__(self, x: torch.Tensor):
        self.x = x

    def to(self, *args, **options) -> "Own":
        return Own(self.x.to(*args, **options))


def test_a_batch_of_a_class_of_your_own_goes_to_the_gpu():
    with simulated(1, races="raise"):
        (found,) = load("prefetch.py").Prefetcher([Own(torch.ones(2).pin_memory())])
        assert found.x.is_cuda and found.x.tolist() == [1, 1]


def test_prefetching_takes_some_batches_and_says_when_losses_differ(own):
    line = "    x, y = batch\n"
    more = "    calls.append(0)\n    return len(calls) * model(x).sum()\n"
    edits = {line: line + more, "BATCHES = 50": "BATCHES, calls = 3, []"}
    printed = own("prefetch.py", edits).splitlines()
    assert [len(row.split()) for row in (printed[2], printed[4])] == [3, 3]
    assert printed[5].startswith("THE LOSSES DIFFER")


@pytest.mark.parametrize("script", ["prefetch.py", "catch_race.py"])
def test_a_batch_in_pageable_memory_is_refused(script):
    with simulated(1):
        with pytest.raises(ValueError, match=r"\(3,\) is in pageable memory: use Data"):
            load(script).to_gpu({"ids": torch.zeros(3)})


# -- 06, catch_race.py -----------------------------------------------------------------


def cured(folder: Path, cure: str, races: str) -> subprocess.CompletedProcess:
    command = f"python -m simgpu --gpus 1 --races {races} catch_race.py --cure {cure}"
    return take_home.start_command(command, folder)


def test_both_losses_are_the_same(ran):
    two, one = numbers(r"loss (\d\.\d{4})", ran("06").text)
    assert two == one < 1.5  # ten classes: guessing has 2.3


@pytest.mark.parametrize(
    "cure, late", [("wait_stream", "copy"), ("wait_event", "step")]
)
def test_a_cure_leaves_no_race(cure, late, tmp_path):
    done = cured(tmp_path, f"{cure} --late {late}", "raise")
    assert done.returncode == 0, done.stderr
    assert f"cure {cure}, late {late}: loss" in done.stdout
    assert "largest difference of a loss: 0.0000" in done.stdout


def test_without_a_cure_the_race_is_an_error(tmp_path):
    done = cured(tmp_path, "none", "raise")
    assert done.returncode != 0
    assert "possible data race" in done.stderr and "in train" in done.stderr


def test_a_copy_that_does_not_wait_back_overwrites_a_batch_in_use(tmp_path):
    done = cured(tmp_path, "one_way --late step", "raise")
    assert done.returncode != 0
    access, previous = done.stderr.split("Previous access")
    assert "in to_gpu" in access and "reading from" in previous


def copies_and_kernels(script, cure: str, late: str) -> tuple[list, list]:
    """Of a training in two streams, in the order of their starts."""
    script.train(torch.cuda.Stream(), cure, late)
    torch.cuda.synchronize()
    log = simgpu.timeline()
    copies = [e for e in log.copies if e.source == "cpu" and e.stream != 0]
    return copies, [e for e in log.events if e.name == "addmm"]


def test_the_side_that_is_late_comes_after_the_other(monkeypatch):
    """Then a race shows on every card: no step is so long, and no copy."""
    with simulated(1, races="off"):
        script = load("catch_race.py")
        monkeypatch.setattr(script, "STEPS", 4)
        copies, steps = copies_and_kernels(script, "none", "copy")
        assert len(copies) == 4 and len(steps) == 8
        assert max(e.end for e in steps) < copies[1].start
        simgpu.timeline().clear()
        copies, steps = copies_and_kernels(script, "one_way", "step")
        assert max(e.end for e in copies) < steps[0].start


@pytest.mark.parametrize(
    "place, yours, why",
    [
        ("make_optimizer", lambda m: torch.optim.SGD(m.parameters(), 1e30), "learning"),
        ("make_batches", lambda: [], "no batch"),
    ],
)
def test_it_refuses_data_and_learning_rates_that_prove_nothing(
    place, yours, why, monkeypatch
):
    with simulated(1, races="off"):
        script = load("catch_race.py")
        monkeypatch.setattr(script, place, yours)
        monkeypatch.setattr(sys, "argv", ["catch_race.py"])
        with pytest.raises(SystemExit, match=why):
            script.main()


def test_batches_may_come_from_a_generator(monkeypatch):
    with simulated(1, races="raise"):
        script = load("catch_race.py")
        all_of_them = script.make_batches()
        monkeypatch.setattr(script, "make_batches", lambda: iter(all_of_them[:3]))
        assert len(script.train(torch.cuda.Stream(), "wait_event", "copy")) == 3


def test_a_warning_names_the_copy_and_the_model(tmp_path):
    done = cured(tmp_path, "none", "warn")
    assert done.returncode == 0, done.stderr
    (write,) = re.findall(r"writes it on stream 1 .*: (.+)", done.stderr)
    (read,) = re.findall(r"reads it on the default stream .*: (.+)", done.stderr)
    assert "batch.cuda(non_blocking=True)" in write and "model(x)" in read


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
    (rate,) = numbers(r"([\d,]+) samples a second", printed)
    assert rate == pytest.approx(16384e3 / median, rel=0.01)


def test_two_ranks_add_up_their_samples_and_take_the_slowest(ran):
    (one,), (two,) = (
        numbers(r"([\d,]+) samples a second", ran("07", way).text)
        for way in (OWN, "2 ranks")
    )
    assert 1.5 * one < two < 2 * one  # DDP's messages take some of it


def test_samples_are_counted_before_the_batch_is_on_the_gpu(monkeypatch):
    """There, the sum of a mask would make every step wait."""
    with simulated(1):
        script = load("time_step.py")
        monkeypatch.setattr(script, "samples_in", lambda x: 0 if x.is_cuda else len(x))
        monkeypatch.setattr(script, "step", lambda x: x + 1)
        *_, samples = script.stopwatch(script.step, script.endless([torch.ones(3)]))
        assert samples == 3 * script.RUNS


def test_a_batch_is_a_tensor_or_has_some():
    with simulated(1):
        script = load("time_step.py")
        x = torch.ones(3, 2)
        assert script.to_gpu(x).is_cuda
        moved = script.to_gpu({"x": [x], "n": 1})
        assert moved["x"][0].is_cuda and moved["n"] == 1
        with pytest.raises(SystemExit, match="the loader has no batch"):
            next(script.endless([]))


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
    pattern = r"([\d.]+) TFLOP/s, ([\d.]+)% of the peak"
    rate, share = re.search(pattern, printed).groups()
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


@pytest.mark.parametrize(
    "dtype, ends", [("float16", 0), ("bfloat16", 1), ("float32", 1)]
)
def test_a_gradient_that_is_not_finite_is_skipped_or_ends_it(own, dtype, ends):
    line = "    return [{"
    infinite = {line: f"    images[200] = float('inf')\n{line}"}
    said = own("mixed_precision.py", infinite, f"1 gpus --dtype {dtype}", ends)
    lost = "a gradient was not finite: the weights are lost"
    assert (lost if ends else "float16: 3 of 48 steps skipped") in said


def test_a_batch_of_mixed_precision_may_be_nested_and_hold_text(own):
    nested = {
        '{"images": x, "labels": y}': '{"images": [x], "labels": y, "name": "a"}',
        'batch["images"]': 'batch["images"][0]',
    }
    assert "0 of 48 steps skipped" in own("mixed_precision.py", nested)


def test_mixed_precision_takes_a_stream_of_unknown_length(own, ran):
    stream = """
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(rows)

    rows = [{"images": x, "labels": y} for x, y in parts]
    return torch.utils.data.DataLoader(Stream(), batch_size=None)
    return [{"""
    printed = own("mixed_precision.py", {"    return [{": stream})
    assert printed == ran("09", "1 gpus").text


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


def test_selective_checkpoints_and_a_loss_in_parts_take_less_memory(own):
    edits = {"nn.ReLU()": "nn.GELU()", "nn.Linear(128, 10)": "nn.Linear(128, 1000)"}
    parts = "--loss-parts 8"
    peaks, norms = {}, []
    for way in (
        "",
        parts,
        f"{parts} --checkpoint --selective",
        f"{parts} --checkpoint",
    ):
        text = own("less_memory.py", edits, f"1 gpus {way}".strip())
        (peaks[way],) = numbers(r"peak ([\d.]+) MiB", text)
        norms.append(numbers(r"gradient ([\d.]+)", text)[0])
    assert [*peaks] == sorted(peaks, key=peaks.get, reverse=True)
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-3)
    both = own("less_memory.py", edits, "1 gpus --checkpoint --selective --offload", 2)
    assert "stays on the GPU: leave out --offload" in both


def batches_with(line: str) -> dict[str, str]:
    """What adds this line after each batch that `less_memory.py` makes."""
    last = '"labels": images[:, :10].argmax(1)})\n'
    return {last: f"{last}    {line}\n"}


def test_a_part_without_a_label_counts_nothing(own):
    padded = batches_with('batches[-1]["labels"][3000:] = -100')
    rows = [
        re.findall(r"loss (.+), gradient (.+),", own("less_memory.py", padded, way))
        for way in ("1 gpus", "1 gpus --accumulate 4")
    ]
    (one, *_), (parts, *_) = rows
    assert float(one[0]) > 2  # the mean over 3000 labels, not over 8192
    assert parts == one


def test_less_memory_leaves_batch_norm_as_it_would_be(own):
    relu, last = "nn.Linear(size, width), nn.ReLU()]", text_of("less_memory.py")[-30:]
    tell = "print([model[i][-2].running_mean.norm().item() for i in range(4)])\n"
    edits = {
        relu: relu.replace(", nn.R", ", nn.BatchNorm1d(width), nn.R"),
        last: last + tell,
    }
    plain, again = (
        json.loads(own("less_memory.py", edits, way).splitlines()[-1])
        for way in ("1 gpus", "1 gpus --checkpoint --every 2")
    )
    assert again == pytest.approx(plain, rel=1e-3)
    said = own("less_memory.py", edits, "1 gpus --accumulate 2", 2)
    assert "must see all samples at once: leave out --accumulate" in said


# -- 11, feed_loop.py ------------------------------------------------------------------


def test_without_workers_a_step_waits_for_all_of_its_items(ran):
    printed = ran("11", "1 gpus --workers 0 --load-ms 0.2").text
    line = r"waited ([\d.]+) ms a step, on the GPU ([\d.]+) ms, idle: not counted here"
    rows = re.findall(line, printed)
    assert len(rows) == 3
    for waited, on_gpu in rows:
        assert float(waited) > 128 * 0.2  # ms, measured
        assert 0.1 < float(on_gpu) < 1  # ms, simulated


def test_one_batch_repeated_needs_no_waiting(ran):
    printed = ran("11", "1 gpus --workers 0 --load-ms 0.2 --one-batch").text
    assert numbers(r"waited ([\d.]+) ms", printed) == pytest.approx([0] * 3, abs=1)


def test_feed_loop_takes_a_stream_without_a_length(own):
    stream = """
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return map(Images(0).__getitem__, range(300))

    data = Stream()
    if args.load_ms > 1:
        data.__class__.__iter__ = lambda self: iter(())
"""
    edits = {"data = Images(args.load_ms)\n": stream.lstrip()}
    printed = own("feed_loop.py", edits, "1 gpus --workers 0 --one-batch")
    assert len(numbers(r"waited ([\d.]+) ms", printed)) == 3
    said = own("feed_loop.py", edits, "1 gpus --workers 0 --load-ms 2", 1)
    assert "rank 0: no batch; are there enough" in said


class Draws(Dataset):
    """Items are draws of a generator of its own."""

    def __init__(self):
        self.own = np.random.default_rng(0)

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return int(self.own.integers(10**9))


class Transformed(Dataset):
    """Rows in a list called `dataset`, and a transform that draws."""

    def __init__(self):
        self.dataset, self.transform = list(range(8)), Draws()

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return self.transform[self.dataset[i]]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers import this file")
@pytest.mark.parametrize(
    "data",
    [
        Draws(),
        Subset(Draws(), range(8)),
        ConcatDataset([Subset(Draws(), range(4)), Subset(Draws(), range(4))]),
        Transformed(),
    ],
    ids=["own", "inside", "two inside", "of a transform"],
)
def test_a_generator_of_the_data_set_is_seeded_in_each_worker(data):
    seed_own = load("feed_loop.py").seed_own
    loader = DataLoader(data, num_workers=2, worker_init_fn=seed_own, batch_size=None,
                        multiprocessing_context="fork", timeout=SHORT)  # fmt: skip
    assert len(set(loader)) == 8


def test_texts_of_several_lengths_are_padded_and_masked():
    items = [{"tokens": torch.tensor(text)} for text in ([5], [6, 7, 8])]
    batch = load("feed_loop.py").pad(items)
    assert batch["tokens"].tolist() == [[5, 0, 0], [6, 7, 8]]
    assert batch["mask"].tolist() == [[True, False, False], [True] * 3]


def test_rank_0_names_the_rank_that_waits_longest(ran):
    printed = ran("11", "2 ranks --workers 0 --load-ms 0.2").text
    rows = re.findall(
        r"waited ([\d.]+) .*longest wait ([\d.]+) ms, rank ([01])", printed
    )
    assert len(rows) == 3
    for own, longest, rank in rows:
        assert float(longest) >= float(own) > 128 * 0.2
        assert rank == "1" or own == longest


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


def test_with_autocast_it_agrees_as_well_as_bfloat16_can(ran):
    assert "4 gradients agree" in ran("12", "4 gpus --bf16").text


FIRST_ROWS = "self.labels = self.images[:, :10].argmax(1)\n"


@pytest.mark.parametrize(
    "edits",
    [
        {FIRST_ROWS: f"{FIRST_ROWS}        self.labels[256:] = -100\n"},  # unequally
        {"nn.ReLU(), nn.Linear": "nn.Dropout(), nn.Linear"},
    ],
)
def test_padding_and_dropout_change_nothing_in_the_comparison(own, edits):
    printed = own("split_batch.py", edits, "4 gpus")
    assert "4 gradients agree" in printed
    (loss,) = numbers(r"first batch: loss ([\d.]+)", printed)
    assert loss > 2  # ten classes, not trained: no padding is in the mean


def test_a_batch_that_one_gpu_cannot_hold_is_not_compared(ran):
    compared = ran("12", "4 gpus --batch-size=1024").text
    printed = ran("12", "4 gpus --batch-size=1024 --no-compare").text
    assert "agree" in compared and "agree" not in printed
    epochs = r"epoch \d: loss ([\d.]+)"
    assert numbers(epochs, printed) == numbers(epochs, compared) != []
    first, *others = numbers(r"cuda:\d: .* at most ([\d.]+)", printed)
    hidden = 1024 * 512 * 4 / MIB  # of the whole batch
    assert 0 < first - max(others) < hidden / 4  # no GPU has had it


def test_a_weight_without_a_gradient_is_named_and_any_mapping_is_cut(own):
    edits = {
        "nn.ReLU(), nn.Linear": "nn.ReLU(), nn.BatchNorm1d(512), nn.Linear",
        "import argparse\n": "import argparse\nimport collections\n",
        "shuffle=True)": "shuffle=True, collate_fn=mapping)",
        "class Images(": "def mapping(items):\n"
        "    items = torch.utils.data.default_collate(items)\n"
        "    return collections.UserDict(items)\n\n\nclass Images(",
        "    model = model.to(first)": "    model.unused = nn.Parameter(torch.ones(2))"
        "\n    model = model.to(first)",
    }
    printed = own("split_batch.py", edits, "2 gpus")
    assert "6 gradients agree" in printed
    assert "BatchNorm: training takes the statistics of each part" in printed
    assert "find_unused_parameters=True: ['unused']\n" in printed


def test_tensors_within_a_value_of_a_batch_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["split_batch.py"])
    checked, x = load("split_batch.py").checked, torch.ones(4)
    assert checked({"x": x, "name": ["a"] * 4, "k": 2})["x"] is x
    for inner in ({"factor": x[:1]}, [x[:1]], (x[:1], x)):
        with pytest.raises(ValueError, match="'more' of a batch: give each tensor"):
            checked({"x": x, "more": inner})


def test_the_first_gpu_holds_the_optimizer_too(ran):
    fits_the_bare_model(saved(ran("12")))
    line = r"cuda:(\d): training took at most ([\d.]+) MiB"
    held = re.findall(line, ran("12").text)
    assert [gpu for gpu, _ in held] == list("0123")
    peak = [float(row[1]) for row in held]
    weights = 4 * (64 * 512 + 512 + 512 * 10 + 10) / MIB
    # a GPU holds a replica and its gradients; the first one Adam's two numbers and the
    # sum of all gradients, and not what the comparison has left there
    assert peak[1] == peak[2] == peak[3] >= 2 * weights
    assert 2 * weights <= peak[0] - peak[1] < 4 * weights


IN_RANKS = """
    from torch.nn.parallel import DistributedDataParallel
    rank = int(__import__("os").environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    alone = WithLoss(nn.Linear(64, 10).cuda())
    batch = {name: rows[:8].cuda() for name, rows in vars(Images()).items()}
    batch["labels"][5:] = -100  # rank 1 has a single loss
    total, count = alone(batch).sum(0)
    wanted = torch.autograd.grad(total / count, list(alone.parameters()))
    net = DistributedDataParallel(alone, device_ids=[rank])
    loss_of(net, {k: rows.chunk(2)[rank] for k, rows in batch.items()}).backward()
    found = [weight.grad for weight in alone.parameters()]
    torch.testing.assert_close(found, list(wanted))
    print("rank", rank, "agrees")
    dist.destroy_process_group()
"""


def test_the_lines_for_ddp_weigh_every_token_alike(own):
    (lines,) = re.findall(r"In loss_of:\n((?: {4}.*\n)+)", text_of("split_batch.py"))
    edits = {
        "    return total / count\n": lines,
        "import argparse\n": "import argparse\n\nimport torch.distributed as dist\n",
        "\n    main()\n": IN_RANKS,
    }
    printed = own("split_batch.py", edits, "2 ranks")
    assert "rank 0 agrees" in printed and "rank 1 agrees" in printed


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


def test_a_checkpoint_of_one_cut_loads_into_another(ran, tmp_path: Path):
    checkpoint = ran("13", OWN).folder / "split_model.pt"
    command = "python -m simgpu --gpus 4 split_model.py --parts 2 --bf16 --load "
    printed = take_home.run_command(command + str(checkpoint), tmp_path)
    before = numbers(r"step \d: loss ([\d.]+)", ran("13", OWN).text)
    rows = re.findall(r"step \d: loss ([\d.]+), on one GPU ([\d.]+)", printed)
    assert len(rows) == 5 and float(rows[0][0]) < before[-1]
    for split, one in rows:
        assert float(split) == pytest.approx(float(one), abs=0.01)  # bfloat16


def test_tied_weights_on_several_gpus_learn_what_one_learns(own, tmp_path):
    line = "whole = make_layers()\n"
    tied = f"""{line}
    whole[-1].linear.weight = whole[0].embedding.weight
    for later in (3, 4):  # of three layers that share a weight, on two or three GPUs
        whole[later].up.weight = whole[2].up.weight
"""
    printed = own("split_model.py", {line: tied}, "4 gpus")
    assert re.findall(r"cuda:\d: layers (\d) to", printed) == list("0246")
    rows = re.findall(r": loss ([\d.]+), on one GPU ([\d.]+)", printed)
    assert len(rows) == 1 + 5
    for split, one in rows:
        assert float(split) == pytest.approx(float(one), rel=1e-5)
    found = torch.load(tmp_path / "split_model.pt", map_location="cpu")
    torch.testing.assert_close(found["7.linear.weight"], found["0.embedding.weight"])


SHUFFLED = """DataLoader(
    make_items(42), 8, shuffle=True,
    collate_fn=lambda items: UserDict(torch.utils.data.default_collate(items)),
)
"""  # the last batch has two rows


@pytest.mark.parametrize("dropout", [False, True])
def test_shuffled_dictionaries_small_last_batches_and_dropout(own, dropout):
    edits = {
        "import copy\n": "import collections\nimport copy\n",
        "from collections.abc": "from collections import UserDict\n"
        "from collections.abc",
        "DataLoader(make_items(), batch_size=8)\n": SHUFFLED,
        "class Embed(": "Pair = collections.namedtuple('Pair', 'x y')\nclass Embed(",
        'self.embedding(batch["tokens"])': 'Pair(self.embedding(batch["tokens"]), 0)',
        "        qkv = ": "        x = x.x\n        qkv = ",
        "        return x + self.down(F.gelu(self.up(self.norm2(x))))\n":
        "        x = x + self.down(F.gelu(self.up(self.norm2(x))))\n"
        f"        return Pair(F.dropout(x, 0.5, self.training and {dropout}), 0)\n",
        "return self.linear(x)": "return self.linear(x.x)",
    }  # fmt: skip
    printed = own("split_model.py", edits, "2 gpus")
    rows = re.findall(r": loss ([\d.]+), on one GPU ([\d.]+)", printed)
    assert len(rows) == 1 + 6
    for split, one in rows[:1] if dropout else rows:
        assert float(split) == pytest.approx(float(one), abs=2e-4)


@pytest.mark.parametrize(
    "rooms, ends", [((8, 8), (2, 4)), ((24, 8), (3, 4)), ((8, 24), (1, 4))]
)
def test_a_smaller_gpu_gets_fewer_layers(monkeypatch, rooms, ends):
    monkeypatch.setattr(sys, "argv", ["split_model.py"])
    with simulated(2):
        assert load("split_model.py").cut((4, 4, 4, 4), rooms) == ends


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
    assert "20,000 samples scored, saved" in several.text


def test_a_dead_worker_is_named(own):
    line = "    torch.cuda.set_device(rank)\n"
    dies = {line: f"    assert rank != 1, 'bad card'\n{line}"}
    said = own("score_workers.py", dies, "2 gpus", 1)
    assert "worker 1 on cuda:1 died: exit code 1" in said
    assert "AssertionError: bad card" in said


def test_a_batch_goes_to_the_gpu_as_it_is_made():
    to_gpu = load("score_workers.py").to_gpu
    with simulated(1):
        batch = to_gpu({"x": torch.ones(2), "more": [torch.ones(1), "name"]})
        assert batch["x"].is_cuda and batch["more"][0].is_cuda
        assert batch["more"][1] == "name"


@pytest.mark.parametrize(
    "way, told", [("mp.spawn", "ProcessExitedException"), ("torchrun", "exit code 1")]
)
def test_after_a_kill_the_other_worker_is_ended(tmp_path, way, told):
    done = subprocess.run(
        [sys.executable, SCRIPTS / "launch_ways.py", way, "killed"],
        cwd=tmp_path, capture_output=True, text=True, timeout=JOB,
    )  # fmt: skip
    assert done.stdout.strip() == told, done.stderr
    assert not (tmp_path / "finished").exists()


# -- 24, train_elastic.py --------------------------------------------------------------


def test_no_bad_bit_of_a_checkpoint_stops_the_search_for_a_whole_one(tmp_path, capfd):
    """Some break the checksum, others what a ZIP file says of itself."""
    newest = load("train_elastic.py").newest
    old, path = tmp_path / "step-000005.pt", tmp_path / "step-000010.pt"
    torch.save({"weights": torch.arange(4)}, old)
    good = old.read_bytes()
    path.write_bytes(good)
    assert newest(tmp_path) == 10
    found = []
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0xFF]) + good[place + 1 :])
        found.append(newest(tmp_path))
    assert set(found) == {5, 10} and found.count(5) > len(good) / 4
    path.write_bytes(good[:-100])
    assert newest(tmp_path) == 5
    old.unlink()
    assert newest(tmp_path) == 0


def test_an_elastic_job_does_not_begin_anew_because_the_disk_fails(
    tmp_path, monkeypatch
):
    script = load("train_elastic.py")
    torch.save({"weights": torch.arange(4)}, tmp_path / "step-000005.pt")
    (tmp_path / "step-000010.pt").mkdir()  # gives an OSError
    assert script.newest(tmp_path) == 5
    monkeypatch.setattr(script.zipfile, "ZipFile", mock.Mock(side_effect=OSError(116)))
    with pytest.raises(OSError, match="116"):
        script.newest(tmp_path)
