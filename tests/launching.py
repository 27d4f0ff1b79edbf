"""What the tests of the scripts share: they launch one, import it, and read it."""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import nbformat

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
SCRIPTS = NOTEBOOKS / "scripts"


def launch(name: str, ranks: int, *arguments: str) -> subprocess.CompletedProcess:
    """Run a script in ranks on the CPU, as torchrun does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(SCRIPTS / name), *arguments]
    settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **settings},
    )


def load(name: str) -> ModuleType:
    """The script as a module, from its file."""
    path = SCRIPTS / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_of(name: str) -> str:
    return (SCRIPTS / name).read_text(encoding="utf-8")


def last_calls(name: str) -> list[str]:
    """What a script does when it is launched: the calls of its last `if`."""
    return [ast.unparse(line) for line in ast.parse(text_of(name)).body[-1].body]


def prose_of(lesson: str) -> str:
    notebook = nbformat.read(NOTEBOOKS / lesson, as_version=4)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    return "\n".join(cells)


def shown(prose: str, code: str) -> bool:
    """Whether the prose has this code as a block."""
    return f"```python\n{code.strip()}\n```" in prose
