"""The README's page on scripts and tests of one's own: it works as it stands there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
PAGE = README.partition("## Your own scripts and tests")[2].partition("\n## ")[0]
FILES = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL)
CONSOLE = re.findall(r"```console\n\$ (.*?)\n(.*?)```", PAGE, re.DOTALL)
PROGRAMS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES:
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def run(folder: Path, command: str) -> subprocess.CompletedProcess:
    program, *rest = shlex.split(command)
    return subprocess.run(
        [*PROGRAMS[program], *rest],
        cwd=folder,
        env=os.environ | {"HELPERS_GPUS": "simulated", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_each_file_is_used():
    assert {name for name, _ in FILES} == {shlex.split(c)[-1] for c, _ in CONSOLE}


@pytest.mark.parametrize(("command", "shown"), CONSOLE, ids=[c for c, _ in CONSOLE])
def test_a_command_prints_what_the_page_says(folder, command, shown):
    done = run(folder, command)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    if "pytest" in command:  # it adds dots and seconds
        assert printed[-1].startswith(shown.strip()), done.stdout
    else:
        assert printed == shown.splitlines()


def test_four_ranks_print_what_one_does(folder):
    (command,) = (command for command, _ in CONSOLE if "=4" in command)
    alone = run(folder, command.replace("=4", "=1"))
    assert alone.stdout == dict(CONSOLE)[command], alone.stderr
