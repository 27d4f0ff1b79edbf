"""`split_gpt.py`: three ways to split a model, launched by torchrun."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
SPLIT = NOTEBOOKS / "scripts" / "split_gpt.py"


def launch_split(ranks: int, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(SPLIT), *arguments]
    settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120,
        env={**os.environ, **settings},
    )  # fmt: skip


@pytest.mark.parametrize(
    "ranks, arguments",
    [
        (1, ("--way=pipeline",)),
        (2, ("--way=slices",)),
        (4, ("--way=pipeline", "--schedule=gpipe")),
        (2, ("--way=tokens",)),
    ],
)
def test_each_way_of_splitting_has_the_loss_of_one_process(ranks, arguments):
    done = launch_split(ranks, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{ranks} ranks: loss 4.3525, after 12 steps 3.4029\n"


def test_a_split_that_does_not_come_out_even_is_refused():
    done = launch_split(3)
    assert done.returncode != 0 and "cannot be split in 3" in done.stderr


def test_split_gpt_leaves_at_once_and_is_shown_as_it_is():
    text = SPLIT.read_text(encoding="utf-8")
    calls = [ast.unparse(line) for line in ast.parse(text).body[-1].body]
    assert calls == ["main()", "sys.stdout.flush()", "os._exit(0)"]
    lesson = nbformat.read(NOTEBOOKS / "14-pipeline-and-slice.ipynb", as_version=4)
    prose = "\n".join(c.source for c in lesson.cells if c.cell_type == "markdown")
    shown = text[text.index("def ring_attend(") : text.index("def split_tokens(")]
    assert f"```python\n{shown.strip()}\n```" in prose
    head = r"def forward\(self, x\):  # \(batch, tokens, width\)\n"
    forward = re.search(head + r"(.*?)\n\n", text, re.DOTALL)[1]
    lines = [line.strip() for line in forward.splitlines()]
    block = prose[prose.index("h = self.norm1(x)") :].partition("```")[0]
    assert [
        line.strip().partition("  # x")[0] for line in block.strip().splitlines()
    ] == lines
