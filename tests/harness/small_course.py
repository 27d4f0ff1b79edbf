"""A course of small notebooks, on which the harness and the tools are tested."""

import base64
import io
import re
import shutil
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook, new_output
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
# options of pytest: outcomes of all tests, and nothing that takes time to load
PLAIN = ["-rA", "--color=no", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
# a cell that leaves a process of another session, with a socket on all addresses
LEAVES_A_SERVER = """
import subprocess, sys
server = "import socket, time; s = socket.create_server(('', 0)); "
server += "print('listens', flush=True); time.sleep(170)"
words = [sys.executable, "-c", server]
child = subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE)
assert child.stdout.readline() == b"listens\\n"
"""
MIMES = {
    "plain": "text/plain",
    "html": "text/html",
    "svg": "image/svg+xml",
    "png": "image/png",
}


class SmallCourse:
    """This course's configuration and, in notebooks/, what a test puts there.

    Args:
        root: a folder without either.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "notebooks").mkdir()
        for name in ("conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / name, root)

    def copy_tests(self) -> None:
        """Adds the harness and the tools, for a process that must not use ours."""
        for name in ("harness", "tools"):
            shutil.copytree(ROOT / "tests" / name, self.root / "tests" / name)
        shared = Path("simgpu", "tests", "support")
        (self.root / shared).mkdir(parents=True)
        for name in ("checkout.py", "limits.py", "limits_plugin.py"):
            shutil.copy(ROOT / shared / name, self.root / shared)
        for name in ("__init__.py", "lesson_rules.py", "lessons.py"):
            shutil.copy(ROOT / "tests" / name, self.root / "tests")

    def add(self, name: str, *cells: str | NotebookNode) -> Path:
        """Stores a notebook that has been run, of cells or of their sources."""
        cells = [new_code_cell(c) if isinstance(c, str) else c for c in cells]
        for number, cell in enumerate(cells, 1):
            if cell.cell_type == "code":
                cell.execution_count = number
        path = self.root / "notebooks" / f"{name}.ipynb"
        path.parent.mkdir(exist_ok=True)
        nbformat.write(new_notebook(cells=cells), path)
        return path


def cell(source: str, *outputs: NotebookNode, tag: str | None = None) -> NotebookNode:
    """Returns a code cell with stored outputs."""
    metadata = {"tags": [tag]} if tag else {}
    return new_code_cell(source, metadata=metadata, outputs=list(outputs))


def stream(text: str, name: str = "stdout") -> NotebookNode:
    """Returns an output that was printed."""
    return new_output("stream", name=name, text=text)


def result(**data: str) -> NotebookNode:
    """Returns an output that was shown, of the kinds in `MIMES`."""
    mimes = {MIMES[kind]: value for kind, value in data.items()}
    return new_output("display_data", mimes)


def show(**data: str) -> str:
    """Returns the source of a cell whose output is `result(**data)`."""
    mimes = dict(result(**data).data)
    return f"from IPython.display import display\ndisplay({mimes!r}, raw=True)"


def png(grey: int) -> str:
    """Returns a picture of one grey, from 0 to 255, in base64."""
    file = io.BytesIO()
    Image.new("L", (64, 64), grey).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def outcomes(printed: str) -> dict[str, str]:
    """Returns the outcome of each test, `01 Cell 0` or `01 budget`, from `-rA`."""
    line = r"^([A-Z]+) \S*?([\w-]+)\.ipynb::(Cell \d+|budget)"
    found = re.findall(line, printed, re.M)
    return {f"{notebook} {test}": outcome for outcome, notebook, test in found}
