"""`simgpu sweep`: the axes of a command, and the table of what came of its layouts."""

import json
import os
import signal
import subprocess
import sys

import pytest
from psutil import process_iter

from simgpu._dry.axes import Layout, Sweep
from simgpu._dry.sweep import FAILED, FITS, FULL, SKIPPED, Row, Runs
from simgpu._dry.sweep_table import judge, table
from support import programs
from support.limits import SHORT
from support.waiting import wait

SCRIPT = """
import argparse
import torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
batch = parser.parse_args().batch
if batch == 3:
    raise ValueError("3 samples cannot be shared")
open(f"ran-{batch}", "a").write("x")
model = nn.Sequential(nn.Embedding(256, 512), nn.Linear(512, 256)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randint(0, 256, (batch, 128), device="cuda")
    nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SLOW = "import time\nopen('begun', 'a').write('x')\ntime.sleep(10_000)\n"
GIB = 2**30


@pytest.mark.parametrize(
    "command, axes, commands",
    [
        ("t.py --tp {1,2} --b={4..6}", {"tp": "12", "b": "456"},
         {0: "t.py --tp 1 --b=4", 5: "t.py --tp 2 --b=6"}),
        ("--kinds pp={pp} t.py --pp {1,2}", {"pp": "12"},
         {0: "--kinds pp=1 t.py --pp 1", 1: "--kinds pp=2 t.py --pp 2"}),
        ("{size:8B,70B} --l {size:32,80}", {"size": ["8B", "70B"]},
         {0: "8B --l 32", 1: "70B --l 80"}),
        ("t.py {--fp8,} -n {7}", {"fp8": ["--fp8", ""], "n": "7"},
         {0: "t.py --fp8 -n 7", 1: "t.py -n 7"}),
        ("--mesh {1,2}x{3,4} {{a}}", {"mesh": "12", "mesh-2": "34"},
         {3: "--mesh 2x4 {a}"}),
        ("t.py a.b={1,2} {c,d}", {"a.b": "12", "word 3": "cd"},
         {1: "t.py a.b=1 d"}),
    ],
)  # fmt: skip
def test_braces_are_axes(command, axes, commands):
    sweep = Sweep(command.split())
    assert sweep.axes == {axis: tuple(values) for axis, values in axes.items()}
    layouts = list(sweep.layouts())
    assert [layout.number for layout in layouts] == list(range(len(layouts)))
    assert {i: " ".join(layouts[i].words) for i in commands} == commands


@pytest.mark.parametrize(
    "command, words",
    [
        ("t.py --tp 2", "no braces"),
        ("t.py --tp {}", "nothing stands between the braces"),
        ("t.py --tp {,}", "nothing stands between the braces"),
        ("t.py --tp {1,2", "no other end"),
        ("t.py --tp {1,1}", "1 stands there twice"),
        ("t.py --tp {pp}", "no axis is called pp"),
        ("{a:1,2} {a:1,2,3}", "give as many at each place"),
        ("{1..200} {1..200}", "40,000 layouts, and at most 10,000"),
    ],
)
def test_braces_that_cannot_be_are_sentences(command, words):
    with pytest.raises(ValueError, match=words):
        Sweep(command.split())


def row(number: int, state: str, *, rate=None, peak=1.0, world=8, why="") -> Row:
    report = {
        "fits": state == FITS, "tokens_per_second": rate, "peak_bytes": peak * GIB,
        "world": world, "step_seconds": 0.5, "mfu": 0.25, "binds": "computing",
    }  # fmt: skip
    if state in (FAILED, SKIPPED):
        report = {}
    return Row(Layout(number, {"tp": str(number)}, []), state, report, why)


def test_the_table_has_the_fastest_first_and_what_it_costs():
    rows = [
        row(1, FITS, rate=1e5, peak=20),
        row(2, FITS, rate=4e5, peak=30),
        row(3, FITS, rate=2e5, peak=30),
        row(4, FULL, peak=79),
        row(5, FAILED, why="ValueError: no"),
        row(6, SKIPPED, why="does not fit, as tp 4 does not"),
        row(7, FITS, rate=5e5, peak=30, world=32),
    ]
    ordered = judge(rows, price=2.0)
    assert [its.layout.number for its in ordered] == [7, 2, 3, 1, 4, 6, 5]
    assert ordered[1].cost == pytest.approx(2.0 * 8 / 3600 / 4e5 * 1e9)
    assert [its.beaten_by for its in ordered[:4]] == [None, None, ordered[1], None]
    lines = table(ordered, ["tp"], 2.0).splitlines()
    assert lines[0].split()[:5] == ["tp", "fits", "peak", "GiB", "step"]
    assert lines[2].split() == ["2", "2", "yes", "30.00", "500.0", "400,000", "25.0%",
                                "computing", "11.11"]  # fmt: skip
    assert lines[3].split()[-1] == "2"
    assert lines[5].split()[:5] == ["5", "4", "no", ">", "79.00"]
    assert lines[6].endswith("does not fit, as tp 4 does not")
    assert lines[7].endswith("ValueError: no")
    assert lines[-2:] == ["fastest: tp 7", "cheapest: tp 2"]


def test_samples_are_the_rate_of_what_has_no_tokens():
    def of_images(number: int, rate: float) -> Row:
        its = row(number, FITS)
        its.report |= {"samples_per_second": rate, "samples_are": "images"}
        return its

    ordered = judge([of_images(1, 30.0), of_images(2, 40.0)], price=2.0)
    assert [its.layout.number for its in ordered] == [2, 1]
    head, first, *_ = table(ordered, ["tp"], None).splitlines()
    assert "images/s" in head and first.split()[5] == "40"
    assert ordered[0].cost is None


class Fake:
    """What a dry run of so many samples would leave; 4 do not fit."""

    ran: list[int] = []

    def __init__(self, words, json, threads):
        self.batch, self.path = int(words[2]), json
        Fake.ran.append(self.batch)

    def status(self):
        fits = self.batch < 4
        self.path.write_text(json.dumps({"fits": fits, "peak_bytes": self.batch}))
        return 0 if fits else 3

    def kill(self):
        pass


@pytest.mark.parametrize(
    "more, grows, ran",
    [
        ([], [], [8, 1, 4, 2]),
        ([], ["batch"], [1, 2, 4]),
        # as large as what does not fit along one axis, and larger along the other
        (["--length", "{1,2}"], ["batch", "length"], [1, 1, 2, 2, 4]),
    ],
)
def test_where_a_value_does_not_fit_larger_ones_are_not_run(
    tmp_path, monkeypatch, more, grows, ran
):
    monkeypatch.setattr("simgpu._dry.sweep.FreshRun", Fake)
    Fake.ran.clear()
    sweep = Sweep(["t.py", "--batch", "{8,1,4,2}", *more])
    runs = Runs(
        list(sweep.layouts()), sweep.axes, tmp_path, jobs=2, seconds=SHORT, grows=grows,
        done=lambda row: None, tick=lambda running: None,
    )  # fmt: skip
    rows = {its.layout.values["batch"]: its for its in runs.run()}
    assert Fake.ran == ran and len(runs.rows) == len(list(sweep.layouts()))
    assert {batch for batch, its in rows.items() if its.state == FITS} == {"1", "2"}
    if grows:
        assert rows["8"].why.startswith("does not fit, as batch 4")


@pytest.mark.slow
def test_a_sweep_has_rows_and_is_not_run_again(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = [
        "sweep", "--world", 64, "--price", 2.5, "--memory", "256MB", "--folder", "f",
    ]  # fmt: skip
    command = "train.py --batch {2,4,3,2048}"
    done = programs.simulated(tmp_path, *words, "--json", "found.json", command)
    assert done.status == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["axes"] == {"batch": ["2", "4", "3", "2048"]}
    by_batch = {its["layout"]["batch"]: its for its in found["layouts"]}
    states = {batch: its["state"] for batch, its in by_batch.items()}
    assert states == {"2": FITS, "4": FITS, "2048": FULL, "3": FAILED}
    assert by_batch["4"]["peak_bytes"] > by_batch["2"]["peak_bytes"]
    assert by_batch["4"]["tokens"] == 4 * 128 * 64
    rate = by_batch["4"]["tokens_per_second"]
    cost = by_batch["4"]["dollars_per_billion_tokens"]
    assert cost == pytest.approx(2.5 * 64 / 3600 / rate * 1e9)
    assert by_batch["3"]["why"] == "ValueError: 3 samples cannot be shared"
    assert "[4/4]" in done.stderr
    assert "ValueError: 3 samples cannot be shared" in done.stdout

    again = programs.simulated(tmp_path, *words, "train.py --batch {2,4}")
    assert again.status == 0, again.stderr
    assert again.stderr.count("(was there)") == 2
    assert (tmp_path / "ran-2").read_text() == "x"  # once
    none = programs.simulated(tmp_path, *words, "train.py --batch {2048}")
    assert none.status == 3, none.stderr


@pytest.mark.parametrize(
    "words, said",
    [
        (["train.py", "--batch", "1"], "no braces"),
        (["--grows", "tp", "train.py --batch {1,2}"], "no axis is called tp"),
        (["--timeline", "f", "train.py --batch {1,2}"], "is for one layout"),
        (["128", "train.py --batch {1,2}"], "no script 128"),
    ],
)
def test_a_command_that_cannot_be_is_a_sentence(tmp_path, words, said):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = programs.simulated(tmp_path, "sweep", "--world", 8, *words)
    assert done.status == 2 and said in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs POSIX signals")
def test_after_ctrl_c_nothing_runs_and_it_says_how_to_go_on(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    sweep = subprocess.Popen(
        [sys.executable, "-m", "simgpu", "sweep", "--world", "8", "--jobs", "1",
         "--folder", "f", "slow.py --batch {1,2}"],
        cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        wait((tmp_path / "begun").exists, "the start of a layout")
        sweep.send_signal(signal.SIGINT)
        _, said = sweep.communicate(timeout=SHORT)
    finally:
        sweep.kill()
    assert sweep.returncode == 130
    assert "stopped, 0 of 2 layouts are done; go on with --folder f" in said
    assert "Traceback" not in said
    assert os.listdir(tmp_path / "f") == []
    commands = [" ".join(it.info["cmdline"] or ()) for it in process_iter(["cmdline"])]
    assert commands and not [it for it in commands if str(tmp_path / "f") in it]
