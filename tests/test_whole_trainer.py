"""Lesson 28: its programs beside the trainers', its command, and what it reads.

That the trainers of `notebooks/scripts/trainer` equal one GPU in every layout is tested
by `test_trainers.py`.
"""

import difflib
import os
import signal
import textwrap
from argparse import Namespace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import helpers
import simgpu
from helpers import text
from tests import take_home
from tests.launching import load, prose_of, text_of
from tests.test_trainers import lines_of, module_of


def code_of(name: str) -> list[str]:
    """A script's lines, without its docstring."""
    return text_of(name).partition('"""\n\n')[2].splitlines()


def test_the_wrong_program_lacks_the_factor_only():
    right, wrong = code_of("trainer/ddp.py"), code_of("ddp_forgot.py")
    changed = [line for line in difflib.ndiff(right, wrong) if line[0] in "-+"]
    assert [line[2:].strip() for line in changed] == [
        "ranks, total = dist.get_world_size(), 0",
        "total = 0",
        "(loss * ranks).backward()  # DDP divides by the ranks",
        "loss.backward()",
    ]


def test_the_lesson_shows_the_sampler_as_it_is():
    sampler = text_of("trainer/common.py").partition("class Steps(")[2]
    method = "    def __iter__" + sampler.partition("    def __iter__")[2]
    shown = textwrap.dedent(method.partition("\n\n    def order_of")[0])
    prose = prose_of(take_home.lesson_of("28"))
    assert f"```python\n{shown}\n```" in prose


# -- the command that goes home --------------------------------------------------------


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    """A folder with a text."""
    folder = tmp_path_factory.mktemp("book")
    data = text()
    words = data.words(data.train[:40_000])
    (folder / "book.txt").write_text(words, encoding="ascii", newline="")
    return folder


@pytest.mark.slow
def test_the_lessons_own_command_trains_as_one_gpu_does(book):
    ran = lines_of(take_home.run("28", book))
    alone = "python -m simgpu --gpus 1 trainer/one.py --data=book.txt --steps=10"
    one = lines_of(take_home.run_command(f"{alone} --peak=312", book))
    for name, apart in (("loss", 0.02), ("norm", 0.05), ("test", 0.02)):
        found, expected = ([line[name] for line in log if name in line]
                           for log in (ran, one))  # fmt: skip
        assert found == pytest.approx(expected, abs=apart), name
    losses = [line["loss"] for line in ran if "loss" in line]
    assert len(losses) == 10 and losses[-1] < 0.8 * losses[0]
    assert (book / "saved" / "step-000010" / ".metadata").exists()
    mfu_is_that_of_the_flops(one[5])


def mfu_is_that_of_the_flops(line: dict) -> None:
    """Of "tiny", on one GPU whose peak is 312 TFLOP/s."""
    width, hidden, layers, context = 64, 192, 4, 64
    block = 2 * width**2 + 2 * width * width // 2 + 3 * width * hidden
    flops = 6 * (layers * block + 256 * width) + 12 * layers * context * width
    expected = line["tokens_per_s"] * flops / 312e12
    assert line["mfu"] == pytest.approx(expected, abs=1e-4)


# -- what all trainers share -----------------------------------------------------------


def steps(first: int, last: int, rank: int = 0, ranks: int = 1) -> list[list[int]]:
    """The rows that a rank takes of 100, in steps of 16."""
    args = Namespace(batch=16, accumulate=1)
    return [*module_of("common.py").Steps(100, first, last, args, rank, ranks)]


def test_an_epoch_has_each_row_once():
    epoch = steps(0, 6)
    assert len({row for rows in epoch for row in rows}) == 96
    assert steps(3, 4) == epoch[3:4]
    assert steps(6, 7) != epoch[:1]


def test_ranks_share_the_rows_of_a_step():
    shared = [row for rank in range(3) for row in steps(2, 3, rank, 3)[0]]
    assert sorted(shared) == sorted(steps(2, 3)[0])


def test_a_test_has_at_most_so_many_batches():
    args = Namespace(batch=4, accumulate=1, context=1, data=None, end=None, tests=2)
    common = module_of("common.py")
    with (
        mock.patch.object(common.data, "sets", lambda *_: [range(8), range(100)]),
        mock.patch.object(common.Data, "_batches", lambda _, rows, of: iter(of)),
    ):
        assert [*common.Data(args).tests()] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


def test_a_text_ends_documents_with_zeros_and_numbers_with_the_token_given(tmp_path):
    numbers = np.array([5, 0, 9, 7, 8, 9, 1, 2, 3] * 20, np.uint16)
    np.save(tmp_path / "book.npy", numbers)
    (tmp_path / "book.txt").write_bytes(numbers.astype(np.uint8).tobytes())
    data = module_of("data.py")

    def documents(name, **more):
        return data.sets(tmp_path / name, 8, **more)[0][0].get("document", "none")

    assert documents("book.npy") == "none"
    assert documents("book.npy", end=9).tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert documents("book.txt").tolist() == [0, 0, 1, 1, 1, 1, 1, 1]


@pytest.fixture
def gpu():
    simgpu.start(1)
    yield
    simgpu.stop()


class Odd(nn.Module):
    """Has a table of truth values, and a parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(2, dtype=torch.bool))
        self.used, self.unused = (nn.Parameter(torch.ones(2)) for _ in "ab")


def test_a_parameter_without_a_gradient_is_named(gpu):
    model = Odd()
    model.used.grad = torch.ones(2)
    with pytest.raises(ValueError, match="unused has no gradient.*FIRST or LAST"):
        module_of("common.py").clip(model, 1.0)


def test_a_name_that_no_model_has_is_not_dropped():
    for name in ("useb", "blocks.used"):
        with pytest.raises(ValueError, match=f"has {name}, its model has not"):
            module_of("values.py").drop(Odd(), name)


def test_a_buffer_of_truth_values_that_nobody_fills_is_named(gpu):
    values, args = module_of("values.py"), Namespace(weights=None)
    model = Odd()
    model.fill_buffers = lambda: None
    with pytest.raises(ValueError, match="seen has no values; does fill_buffers"):
        values.allocate(model, [], args)
    model.fill_buffers = lambda: model.seen.copy_(torch.tensor([True, False]))
    values.allocate(model, [], args)


def test_all_names_that_a_model_file_lacks_are_told_at_once():
    with pytest.raises(SystemExit, match="has no counted, decayed, FIRST; see"):
        module_of("seam.py").check(Namespace(make=0, first_value=0), ["FIRST"])


def test_what_is_no_tensor_is_named_in_a_pipeline():
    parts = [{"tokens": torch.ones(2), "title": ["a", "b"]}]
    with pytest.raises(ValueError, match="title in a batch is no tensor"):
        module_of("common.py").joined(parts)


def test_the_learning_rate_rises_and_falls_to_a_tenth():
    args = Namespace(lr=1.0, warmup=4, steps=100)
    optimizer, rates = Namespace(param_groups=[{}]), []
    common = module_of("common.py")
    for step in range(101):
        common.set_rate(optimizer, step, args)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[100] == pytest.approx(0.1)


def test_the_signal_comes_in_its_step(monkeypatch):
    script, sent = load("kill_trainer.py"), []
    monkeypatch.setattr(script.os, "kill", lambda pid, number: sent.append(number))
    hook = script.Signal(9, 3)
    hook(Namespace(param_groups=[{"lr": 0.0}]))  # what `dcp.load` makes
    for step in range(5):
        hook(Namespace(param_groups=[{"lr": 0.1}]))
        assert sent == [9] * (step >= 2)


def test_a_cluster_sends_the_request_to_torchrun(monkeypatch):
    script, sent = load("kill_trainer.py"), []

    def passed_on(pid, number):
        sent.append(pid)
        signal.raise_signal(number)

    monkeypatch.setattr(script.os, "kill", passed_on)
    before = signal.signal(signal.SIGTERM, lambda *_: sent.append("asked"))
    try:
        script.send(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert sent == [os.getppid(), "asked"]


# -- the text --------------------------------------------------------------------------


def test_the_text():
    data = text()
    assert len(data.train) == 191_406 and len(data.test) == 10_074
    assert len(data.letters) == 94 and data.letters.isascii()
    assert data.words(data.train[:20]) == "Special method names"
    file = Path(helpers.__file__).with_name("language_reference.txt.gz")
    assert file.stat().st_size < 80_000
