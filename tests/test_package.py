"""The course depends on simgpu like anybody else: on what is public."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import checkout
from support.limits import SHORT
from tests.launching import ROOT

_OF_THE_COURSE = ("helpers", "notebooks", "tests")
FILES = sorted(
    path
    for folder in _OF_THE_COURSE
    for path in checkout.files(ROOT / folder, "*.py", "*.ipynb")
)


def _programs(path: Path) -> Iterator[str]:
    """What of a file is Python: its text, or each cell, without magics."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield text
        return
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).splitlines()
            yield "\n".join(line for line in lines if line[:1] not in "%!")


def _private_names(program: str) -> Iterator[str]:
    """The names of simgpu with an underscore that a program imports or takes."""
    for node in ast.walk(ast.parse(program)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]  # for importlib, `python -m` and monkeypatch
        for name in names:
            package, *rest = name.split(".")
            if package == "simgpu" and any(_is_private(part) for part in rest):
                yield name


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def test_the_course_uses_public_names_of_simgpu():
    private = {
        str(path.relative_to(ROOT)): names
        for path in FILES
        if (names := [n for text in _programs(path) for n in _private_names(text)])
    }
    assert private == {}


@pytest.mark.parametrize(
    "program",
    [
        "import simgpu._startup",
        "from simgpu._timing.cost import LAUNCH",
        "from simgpu import _frames as frames",
        "import simgpu\nsimgpu._runtime",
        "sys.modules['simgpu._ranks']",
    ],
)
def test_a_private_name_is_noticed(program):
    assert len(set(_private_names(program))) == 1


def test_public_names_are_not_taken_for_private_ones():
    program = "import simgpu\nfrom simgpu.costs import LAUNCH\nsimgpu.__version__"
    assert list(_private_names(program)) == []


def test_the_newest_pytorch_is_the_same_wherever_it_is_named():
    def said(path: str, pattern: str) -> tuple[int, int]:
        found = re.search(pattern, (ROOT / path).read_text(encoding="utf-8"))
        assert found, f"{path} does not say {pattern}"
        major, minor = re.findall(r"\d+", found[1])
        return int(major), int(minor)

    newest = said("noxfile.py", r"NEWEST = .*\"([\d.]+)\"")
    major, minor = said("requirements.txt", r"(?m)^torch>=.*,<([\d.]+);.*>= \"3.11\"$")
    others = {
        "simgpu/src/simgpu/_compat.py": r"NEWEST = .*\((\d+, \d+)\)  #",
        "requirements.txt": r"(?m)^torch>=([\d.]+),.*>= \"3.11\"$",
        "simgpu/README.md": r"tested with .* and (\d+\.\d+);",
        "tests/harness/versions.py": r"STORED_WITH = \"([\d.]+)\"",
        ".github/workflows/tests.yml": r"session: \[.*tests-([\d.]+)\]",
    }
    named = {path: said(path, pattern) for path, pattern in others.items()}
    assert named == dict.fromkeys(others, newest)
    assert (major, minor - 1) == newest


def test_each_pytorch_that_the_readme_names_has_a_row_that_compares_the_lessons():
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    lines = re.findall(r"(?m)^(?:TORCHS|NEWEST) = .*", noxfile)
    tested = sorted(re.findall(r"\"([\d.]+)\"", " ".join(lines)))
    readme = (ROOT / "simgpu/README.md").read_text(encoding="utf-8")
    workflow = (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8")
    assert f"tested with {', '.join(tested[:-1])} and {tested[-1]};" in readme
    rows = ", ".join(f"tests-{version}" for version in tested)
    assert f"session: [{rows}]\n" in workflow
    assert "lax" not in noxfile


@pytest.mark.parametrize("name", ["Ranks", "need_gpus", "check"])
def test_without_the_simulator_a_sentence_says_how_to_install_it(name):
    """The folder `simgpu` is here, and Python takes it for an empty package."""
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import helpers; helpers.{name}"],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=SHORT,
    )  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: the simulator is not installed in this Python")
