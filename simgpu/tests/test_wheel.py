"""The wheel that users install: its contents, and that it leaves projects alone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support import checkout
from support.limits import JOB

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).resolve().parents[1]
TEST = """
import helpers
import torch


def test_our_helpers_are_ours(simulated_gpus):
    assert helpers.answer() == 42
    assert torch.ones(1, device="cuda:3").get_device() == 3
    assert simulated_gpus.__version__ == "{version}"
    assert simulated_gpus.__file__.startswith("{target}")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel, built from a copy of the project."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, folder)
    for path in checkout.files(PROJECT / "src"):
        copy = folder / path.relative_to(PROJECT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-q", "-w", "dist", "."], cwd=folder, check=True, timeout=JOB)
    (built,) = (folder / "dist").glob("simgpu-*.whl")
    return built


def test_the_wheel_has_simgpu_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"simgpu"}
    source = PROJECT / "src"
    modules = {
        path.relative_to(source).as_posix() for path in checkout.files(source, "*.py")
    }
    assert {name for name in names if name.endswith(".py")} == modules
    assert "simgpu/py.typed" in names


def test_a_project_with_helpers_of_its_own_is_undisturbed(wheel, tmp_path):
    target, project = tmp_path / "installed", tmp_path / "project"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
    subprocess.run([*pip, target, wheel], check=True, timeout=JOB)
    version = wheel.name.split("-")[1]
    package = project / "src" / "helpers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def answer():\n    return 42\n")
    (project / "pytest.ini").write_text("[pytest]\npythonpath = src\n")
    test = TEST.format(version=version, target=target)
    (project / "test_ours.py").write_text(test)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=project,
        env=clean | {"PYTHONPATH": str(target)}, capture_output=True, text=True,
        timeout=JOB,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
