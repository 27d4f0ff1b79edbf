"""`simgpu.prove` finds and places every incident of lesson 29, and no right program.

The programs are those of `notebooks/incidents`, each incident after a public report.
At the end, the job that hangs: what the lesson says of its log, and of its lines.
"""

import re
from collections import UserDict

import pytest
import torch

from incidents import INCIDENTS, PROGRAMS, VARIANTS, Variant, evidence, write
from simgpu import prove
from tests.launching import load, prose_of


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


# -- incident A: a rank that does not come ---------------------------------------------

JOB = "python -m simgpu --gpus 4 torchrun --standalone --nproc-per-node=4 stuck_rank.py"


@pytest.mark.slow
def test_the_rank_without_a_line_is_the_stuck_one(tmp_path, capsys):
    done = evidence.start_job(JOB, str(tmp_path))
    assert set(re.findall(r"\[Rank (\d)\] Watchdog caught", done.stderr)) == set("013")
    root = re.search(r"Root Cause.*?rank +: (\d)", done.stderr, re.S)
    assert root[1] != "2", "torchrun names a rank that waited"
    assert re.search(r"rank +: 2 .*\n.*SIGTERM", done.stderr)
    evidence.analyse("rank_", str(tmp_path))
    said = capsys.readouterr().out
    assert "missing ranks: {2}" in said
    assert "main at stuck_rank.py:42" in said


def test_the_lesson_names_lines_that_the_program_has():
    program = evidence.PROGRAM.read_text(encoding="utf-8").splitlines()
    dump = re.findall(
        r"^ +\S+ \(stuck_rank.py:(\d+)\)$", prose_of("29-find-the-bug.ipynb"), re.M
    )
    lines = [program[int(number) - 1].strip() for number in dump]
    calls = ["baton.wait()", "images, labels = read(step, dist.get_rank())", "main()"]
    assert lines == calls
    assert program[41].strip() == "loss.backward()"


# -- compare_ranks.py ------------------------------------------------------------------


@pytest.mark.parametrize("kind", [tuple, list, dict, UserDict])
def test_a_batch_is_shared_in_any_container(kind, simulated_gpus):
    share = load("compare_ranks.py").share
    samples, name, one = torch.arange(8), "abc", torch.tensor(3)
    named = kind in (dict, UserDict)
    batch = {"x": samples, "y": name, "z": one} if named else (samples, name, one)
    for order, right in ((None, [1, 5]), (1, [5, 1])):
        mine = share(kind(batch), 1, 4, order)
        assert type(mine) is (dict if named else tuple)  # a tokenizer's is a UserDict
        x, y, z = mine.values() if named else mine
        assert (x.tolist(), y, z.item()) == (right, name, 3) and z.is_cuda


def test_samples_that_the_ranks_cannot_share_equally_are_refused(simulated_gpus):
    with pytest.raises(SystemExit, match="4 ranks cannot share 10 samples equally"):
        load("compare_ranks.py").share({"x": torch.zeros(10, 2)}, 0, 4)


def test_what_differs_from_itself_is_not_saved():
    script = load("compare_ranks.py")

    def noted(loss, gradient):
        values = {"loss": loss, "gradient of w": gradient, "norm of all gradients": 1.0}
        return [{name: torch.tensor([value]) for name, value in values.items()}]

    script.must_be_steady(noted(1.0, 1.0), [noted(1.0 + 1e-6, 1.0)])
    with pytest.raises(SystemExit, match="away from itself.*switch dropout"):
        script.must_be_steady(noted(1.0, 1.0), [noted(0.9, 0.8)])


def test_a_gradient_that_is_zero_or_only_rounding_raises_no_alarm():
    script = load("compare_ranks.py")

    def noted(zero, key, weight=1.0):
        values = {"up": zero, "key": key, "down": weight}
        values = {name: torch.tensor([value]) for name, value in values.items()}
        return [values | {"norm of all gradients": torch.tensor(1.0)}] * script.STEPS

    one, again = noted(0.0, 1e-8), [noted(0.0, -1e-8)] * script.ORDERS
    assert "steps agree" in script.compare(one, again, noted(0.0, 3e-8))
    said = script.compare(one, again, noted(1e-3, 1e-8))
    assert said == "step 0, up: zero on one rank, not zero on several"
    said = script.compare(one, again, noted(0.0, 1e-8, 1.01))
    assert said.startswith("step 0, down: 1.0e-02 away from one rank")
