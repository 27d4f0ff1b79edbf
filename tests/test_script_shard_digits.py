"""`shard_digits.py`: saved by 4 ranks, loaded by 2 and by 1."""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch.distributed as dist

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
SHARD = NOTEBOOKS / "scripts" / "shard_digits.py"


@pytest.fixture(scope="module")
def shard_script():
    spec = importlib.util.spec_from_file_location("shard_digits", SHARD)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch_shard(ranks: int, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(SHARD), *arguments]
    settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **settings},
    )


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    done = launch_shard(4, "--steps=10", f"--save={folder}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "4 ranks, steps 0 to 10: 85.56% right\n"
    return folder


def test_every_rank_writes(saved_by_four):
    names = {file.name for file in saved_by_four.iterdir()}
    assert names == {".metadata", *(f"__{rank}_0.distcp" for rank in range(4))}


@pytest.mark.parametrize("ranks", [1, 2])
def test_fewer_ranks_go_on(saved_by_four, ranks):
    done = launch_shard(ranks, "--steps=10", f"--load={saved_by_four}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{ranks} ranks, steps 10 to 20: 91.94% right\n"


def test_shard_refuses_wrong_arguments(shard_script, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit, match="2"):
        shard_script.main(["--batch=128"])
    assert not dist.is_initialized()


def test_the_end_of_shard_leaves_at_once():
    text = SHARD.read_text(encoding="utf-8")
    guard = ast.parse(text).body[-1]
    calls = [ast.unparse(line) for line in guard.body]
    assert calls == ["main()", "sys.stdout.flush()", "os._exit(0)"]
    assert "aborts" in text.partition("__main__")[2]
    assert "dist.destroy_process_group()" in text


@pytest.mark.parametrize(
    "first, behind", [("def shard(", "def rows_of"), ("def save(", "@torch.no_grad()")]
)
def test_lesson_15_shows_the_functions_as_they_are(first, behind):
    text = SHARD.read_text(encoding="utf-8")
    shown = text[text.index(first) : text.index(behind)].strip()
    lesson = nbformat.read(NOTEBOOKS / "15-shard-everything.ipynb", as_version=4)
    prose = [cell.source for cell in lesson.cells if cell.cell_type == "markdown"]
    assert any(f"```python\n{shown}\n```" in text for text in prose)
