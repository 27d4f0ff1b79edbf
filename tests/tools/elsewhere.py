"""Runs the lessons as their hosts do: in Colab's versions, by Binder's steps.

    python -m tests.tools.elsewhere colab WORK    # each lesson from an empty folder
    python -m tests.tools.elsewhere binder WORK   # repo2docker's steps, without docker

Both clone what is committed here and build environments in WORK (8 GB, minutes, a
package index; Linux or macOS), so they are no part of the test suite. What they cannot
show: Colab's and Binder's own machines, Colab's own Python (the one that runs this
stands in) and PyTorch's index of CPU builds, which the replay leaves out.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.lessons import lessons
from tests.tools.badges import REPOSITORY

ROOT = Path(__file__).resolve().parents[2]
# Colab's packages in August 2026, as googlecolab/backend-info lists them.
COLAB = """torch==2.11.0 ipython==7.34.0 ipykernel==6.17.1 ipywidgets==7.7.1
traitlets==5.7.1 matplotlib==3.10.0 numpy==2.1.3 psutil==5.9.5 tornado==6.5.7
pyzmq==26.2.1 notebook==6.5.7 nbclient==0.10.4 setuptools""".split()
# The part of Binder's base environment that our requirements could touch.
BINDER = """jupyterlab notebook jupyter_server ipywidgets ipykernel ipython
jupyter-offlinenotebook jupyter-resource-usage nbconvert nbformat traitlets tornado
pyzmq jupyter_client pip""".split()
RUN = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=180, resources={"metadata": {"path": "."}}).execute()
print(sys.argv[1], "ran,", sum(c.cell_type == "code" for c in notebook.cells), "cells")
"""


def step(command: list, **options) -> None:
    """Runs one command, showing it and the seconds that it took."""
    print("$", *command, flush=True)
    start = time.monotonic()
    subprocess.run([str(part) for part in command], check=True, **options)
    print(f"  {time.monotonic() - start:.0f} s", flush=True)


def fresh(folder: Path) -> Path:
    """Returns an empty folder, whatever was there before."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def new_environment(folder: Path, packages: list[str]) -> Path:
    """Makes a virtual environment with these packages; returns its Python."""
    step([sys.executable, "-m", "venv", "--clear", folder])
    python = folder / "bin" / "python"
    step([python, "-m", "pip", "install", "-q", *packages])
    return python


def colab(work: Path) -> None:
    """Every lesson as a lone file, in Colab's versions, cloning the course itself."""
    python = new_environment(work / "env", COLAB)
    before = freeze(python)
    redirect = {  # the clone comes from here; the notebook does not know
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{ROOT}.insteadOf",
        "GIT_CONFIG_VALUE_0": f"https://github.com/{REPOSITORY}.git",
    }
    for lesson in lessons():
        alone = fresh(work / "content")
        shutil.copy(lesson, alone)
        environment = {**os.environ, **redirect, "HELPERS_GPUS": "simulated"}
        step([python, "-c", RUN, lesson.name], cwd=alone, env=environment)
    after = freeze(python)
    assert before <= after, f"packages of Colab were replaced: {before - after}"
    print("no package of Colab was replaced; added:", *sorted(after - before))


def freeze(python: Path) -> set[str]:
    """Returns the packages of an environment, as pip lists them."""
    listed = subprocess.check_output([python, "-m", "pip", "freeze"], text=True)
    return set(listed.split("\n"))


def binder(work: Path) -> None:
    """Does what repo2docker would: its Dockerfile, then its steps without docker."""
    if importlib.util.find_spec("repo2docker") is None:
        sys.exit("install jupyter-repo2docker beside the course first")
    home = fresh(work / "home")
    step(["git", "clone", "-q", ROOT, home])
    dockerfile = subprocess.run(
        [sys.executable, "-m", "repo2docker", "--no-build", "--debug", str(home)],
        capture_output=True,
        text=True,
        check=True,
    )
    recipe = dockerfile.stdout + dockerfile.stderr
    for line in (
        'pip install --no-cache-dir -r "binder/requirements.txt"',
        "RUN ./binder/postBuild",
        'R2D_ENTRYPOINT="${REPO_DIR}/binder/start"',
    ):
        assert line in recipe, f"the Dockerfile lacks {line}"
    print("the Dockerfile has the three lines it should have")
    python = new_environment(work / "env", base_of_binder(home))
    offline = home / "binder" / "requirements-offline.txt"
    lines = (home / "binder" / "requirements.txt").read_text().splitlines()
    kept = [line for line in lines if not line.startswith("--extra-index-url")]
    offline.write_text("\n".join(kept) + "\n")
    step([python, "-m", "pip", "install", "-q", "--no-cache-dir", "-r", offline],
         cwd=home)  # fmt: skip
    path = f"{python.parent}:/usr/bin:/bin"
    environment = {"HOME": str(home), "PATH": path, "LANG": "C.UTF-8"}
    step(["./binder/postBuild"], cwd=home, env=environment)
    tests = [python, "-m", "pytest", "-q", "--nbval", "notebooks"]
    step(["./binder/start", *tests], cwd=home, env=environment)


def base_of_binder(home: Path) -> list[str]:
    """The versions that Binder's image has before our requirements are installed."""
    import repo2docker

    version = (home / "binder" / "runtime.txt").read_text().strip()
    lock = f"environment.py-{version.removeprefix('python-')}-linux-64.lock"
    folder = Path(repo2docker.__file__).parent / "buildpacks" / "conda"
    pin = re.compile(r"/(?:noarch|linux-64)/([\w.\-]+)-([\d][\w.]*)-[^/-]+\.conda")
    pins = dict(pin.findall((folder / lock).read_text()))
    return [f"{name}=={pins[name]}" for name in BINDER if name in pins]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.elsewhere",
        description="Runs the lessons in Colab's versions, or by Binder's steps.",
    )
    parser.add_argument("host", choices=["colab", "binder"])
    parser.add_argument("work", type=Path, help="an empty folder")
    arguments = parser.parse_args(words)
    run = {"colab": colab, "binder": binder}[arguments.host]
    run(arguments.work.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
