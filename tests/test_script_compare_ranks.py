"""`compare_ranks.py`: lesson 28's script, run unmodified, and with a mistake in it."""

import re
from pathlib import Path

import pytest

from tests import take_home
from tests.launching import SCRIPTS

pytestmark = pytest.mark.slow

OWN_COUNT = ("    dist.all_reduce(count)  # tokens of all ranks\n", "")
OWN_SHARE = ("/ count * dist.get_world_size()", "/ count")


def command(ranks: int, option: str, script: str = "compare_ranks.py") -> str:
    words = f"torchrun --standalone --nproc-per-node={ranks} {script} {option}"
    return f"python -m simgpu --gpus {ranks} {words}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where one rank has saved its steps."""
    folder = tmp_path_factory.mktemp("compare")
    said = take_home.run_command(command(1, "--save=one.pt"), folder)
    assert said == "3 steps of 1 rank are in one.pt\n"
    return folder


def test_the_lessons_command_finds_nothing_in_a_right_program(folder):
    said = take_home.run("28", folder)
    assert re.fullmatch(r"3 steps agree; the largest .* is \d+% of .*\n", said), said


def test_neither_do_two_ranks(folder):
    said = take_home.run_command(command(2, "--compare=one.pt"), folder)
    assert said.startswith("3 steps agree")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("edits", [[OWN_COUNT, OWN_SHARE], [OWN_SHARE]])
def test_a_wrong_program_is_named_at_its_first_step(folder, ranks, edits, monkeypatch):
    text = (SCRIPTS / "compare_ranks.py").read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "compare_ranks.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(take_home, "SCRIPTS", folder)
    said = take_home.run_command(command(ranks, "--compare=one.pt"), folder)
    assert re.match(r"step 0, loss: .* away from one rank", said), said
