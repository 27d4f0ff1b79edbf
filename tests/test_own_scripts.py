"""The simulator's manual: each program on its page prints what the page says."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "simgpu" / "README.md").read_text(encoding="utf-8")
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


def test_each_file_is_used():
    assert {name for name, _ in FILES} == {shlex.split(c)[-1] for c, _ in CONSOLE}


@pytest.mark.parametrize(("command", "shown"), CONSOLE, ids=[c for c, _ in CONSOLE])
def test_a_command_prints_what_the_page_says(folder, command, shown):
    program, *rest = shlex.split(command)
    # options of the pytest that runs this are not for one that the page starts
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(
        [*PROGRAMS[program], *rest],
        cwd=folder,
        env=clean | {"HELPERS_GPUS": "simulated", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    if "pytest" in command:  # it adds dots and seconds
        assert printed[-1].startswith(shown.strip()), done.stdout
    else:
        assert printed == shown.splitlines()


def test_one_rank_prints_what_four_do(folder, simulated_gpus, monkeypatch, capsys):
    (shown,) = (shown for command, shown in CONSOLE if "=4" in command)
    rank = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in {**rank, **meeting}.items():
        monkeypatch.setenv(name, str(value))
    runpy.run_path(str(folder / "ranks.py"))
    assert capsys.readouterr().out == shown
