"""A checkout that somebody has worked in is as green as a fresh one.

The tests that go through folders run in a copy with what work leaves there: solved
lessons, notebooks and scripts of one's own, checkpoints of JupyterLab, saved weights,
environments, builds.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import simgpu
from support import checkout
from support.limits import LONG
from tests.lessons import ROOT

# the tests that go through folders, but for those that start ranks
TESTS = (
    "tests/test_badges.py", "tests/test_layers.py", "tests/test_lesson_rules.py",
    "tests/test_lint.py", "tests/test_package.py", "tests/test_pages.py",
    "tests/test_site.py", "tests/test_solved.py", "tests/harness/test_versions.py",
    "tests/tools/test_commands.py", "simgpu/tests/test_layers.py",
    "simgpu/tests/test_package.py",
)  # fmt: skip
NO_CODE = "import os ; from torch import *\nimport simgpu._runtime\ndef"
JUPYTERS = (  # what JupyterLab makes of an edited file, a new one, a copy
    "{folder}/.ipynb_checkpoints/{stem}-checkpoint{suffix}",
    "{folder}/{stem}-Copy1{suffix}",
)
SAVED = ("model.pt", "scores.pt", "split_model.pt", "saved/step-10/.metadata")
BUILT = (
    "site/index.html", "build/lib/simgpu/a.py", "simgpu/build/lib/simgpu/a.py",
    "simgpu/dist/a.py", "simgpu/src/simgpu.egg-info/a.py", ".nox/types/lib/a.py",
    ".venv.old/lib/a.py", "venv/pyvenv.cfg", "venv/lib/a.py",
)  # fmt: skip
OWN = ("my.py", "notebooks/scripts/my_train.py", "notebooks/notes.md")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def solve(path: Path) -> None:
    """As a reader leaves a lesson: an answer, an attempt, a cell, and Python's name."""
    nb = json.loads(path.read_text(encoding="utf-8"))
    nb["metadata"]["language_info"]["version"] = "3.11.2"
    exercises = [c for c in nb["cells"] if "exercise" in c["metadata"].get("tags", ())]
    for cell, verdict in zip(exercises, ("right", "wrong: 7"), strict=False):
        cell["source"] = ["x = 7 ;y=8\n", *cell["source"]]
        text = cell["outputs"][0]["data"]["text/plain"][0]
        said = text.partition(": ")[0] + f": {verdict}"
        cell["outputs"][0]["data"]["text/plain"] = [said]
    own = {"cell_type": "code", "id": "a1b2c3d4", "metadata": {}, "outputs": []}
    nb["cells"].append(own | {"execution_count": 3, "source": ["import os ; 1/0"]})
    write(path, json.dumps(nb))


def work_in(folder: Path) -> None:
    """Leave in a checkout what work leaves."""
    for path in checkout.files(folder, "*.py", "*.ipynb"):
        words = {"folder": path.parent, "stem": path.stem, "suffix": path.suffix}
        notebook = path.suffix == ".ipynb"
        text = path.read_text(encoding="utf-8") if notebook else NO_CODE
        for name in JUPYTERS:
            write(Path(name.format(**words)), text)
    write(folder / "notebooks" / "Untitled.ipynb", "{}")
    for name in SAVED:
        write(folder / "notebooks" / name, "")
        write(folder / "notebooks" / "scripts" / name, "")
    for name in BUILT:
        write(folder / name, NO_CODE)
    about = f"Metadata-Version: 2.1\nName: simgpu\nVersion: {simgpu.__version__}\n"
    write(folder / "simgpu" / "src" / "simgpu.egg-info" / "PKG-INFO", about)
    for number in ("04", "16"):
        (lesson,) = (folder / "notebooks").glob(f"{number}-*[a-z].ipynb")
        solve(lesson)


@pytest.fixture(params=["git", "a download"])
def course(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of this checkout in which somebody has worked."""
    if request.param == "git" and shutil.which("git") is None:
        pytest.skip("git is not here")
    folder = tmp_path / "course"
    for path in checkout.files(ROOT):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    if request.param == "git":
        who = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        for words in (["init"], ["add", "--all"], [*who, "commit", "-m", "all"]):
            subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)
    work_in(folder)
    if request.param == "git":  # whose names say nothing
        for name in OWN:
            write(folder / name, NO_CODE)
    return folder


@pytest.mark.slow
def test_a_checkout_that_was_worked_in_is_green(course):
    paths = (course / "simgpu" / "src", course, course / "notebooks")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "not slow", *TESTS],
        cwd=course, env=clean | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True, text=True, timeout=LONG,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert "somebody has worked in this lesson" in done.stdout
