"""The project's files are told from those of who works in the checkout."""

import subprocess
from pathlib import Path

import pytest

from support import checkout

OURS = ("a.py", "deep/b.py", "deep/c.ipynb")
OTHERS = (
    ".ipynb_checkpoints/a-checkpoint.py", "deep/.ipynb_checkpoints/b-checkpoint.py",
    "Untitled.ipynb", "deep/untitled1.py", "deep/c-Copy1.ipynb", ".venv.old/lib/a.py",
    "venv/lib/site/a.py", "build/lib/a.py", "dist/a.py", "x.egg-info/a.py",
    "deep/__pycache__/a.py", ".nox/tests/a.py",
)  # fmt: skip


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture(params=["git", "no git", "another's git"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path / "outer" / "inner"
    for name in (*OURS, *OTHERS, "venv/pyvenv.cfg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    try:
        if request.param != "no git":
            place = folder if request.param == "git" else folder.parent
            git(place, "init")
        if request.param == "git":
            git(folder, "add", "--force", *OURS)
    except OSError:
        pytest.skip("git is not here")
    return folder


def test_files_are_the_projects(folder):
    found = [path.relative_to(folder).as_posix() for path in checkout.files(folder)]
    assert found == [*OURS]
    assert checkout.files(folder, "*.ipynb") == [folder / "deep" / "c.ipynb"]
    assert checkout.here(folder, "*.py", "*.ipynb") == [folder / "a.py"]
    assert checkout.here(folder / "deep", "b*") == [folder / "deep" / "b.py"]


def test_a_file_that_was_removed_is_none(folder):
    (folder / "a.py").unlink()
    assert folder / "a.py" not in checkout.files(folder)


def test_a_hook_of_git_does_not_lead_elsewhere(folder, monkeypatch):
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert len(checkout.files(folder)) == len(OURS)
