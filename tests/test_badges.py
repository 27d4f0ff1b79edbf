"""Every Binder, Colab and clone link names one repository, one branch, a real file.

Also tests `python3 -m helpers badges`, which moves them all to another repository.
Nothing here opens a link: that the services answer is not tested.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import __main__ as commands

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FILES = [ROOT / "README.md", *NOTEBOOKS]

HOME = (commands.REPOSITORY, commands.BRANCH)
NOTEBOOK = r"(?P<path>notebooks/[\w.-]+\.ipynb)"
BINDER = re.compile(
    r"https://mybinder\.org/v2/gh/(?P<repo>[\w.-]+/[\w.-]+)/(?P<branch>[\w.-]+)"
    r"\?urlpath=lab/tree/" + NOTEBOOK
)
COLAB = re.compile(
    r"https://colab\.research\.google\.com/github/(?P<repo>[\w.-]+/[\w.-]+)/blob/"
    r"(?P<branch>[\w.-]+)/" + NOTEBOOK
)
CLONE = re.compile(r"https://github\.com/(?P<repo>[\w.-]+/[\w.-]+)\.git")


def cells(notebook: Path, kind: str) -> str:
    """The sources of a notebook's cells of one kind, joined."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    chosen = [cell for cell in content["cells"] if cell["cell_type"] == kind]
    return "\n".join("".join(cell["source"]) for cell in chosen)


def text_with_links(file: Path) -> str:
    """What a reader sees of a file's prose."""
    if file.suffix == ".ipynb":
        return cells(file, "markdown")
    return file.read_text(encoding="utf-8")


def names(paths: list[Path]) -> list[str]:
    """Paths as test ids."""
    return [path.name for path in paths]


# --- The links that stand in this repository ---------------------------------------


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("file", FILES, ids=names(FILES))
def test_links_name_this_repository_and_existing_notebooks(file):
    text = text_with_links(file)
    for service, pattern in (("mybinder.org/v2", BINDER), ("/github/", COLAB)):
        found = list(pattern.finditer(text))
        assert found, f"no link to {service}"
        assert len(found) == text.count(service), "a link has an unknown form"
        for link in found:
            assert (link["repo"], link["branch"]) == HOME
            assert (ROOT / link["path"]).is_file(), link[0]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=names(NOTEBOOKS))
def test_own_badges_open_the_notebook_itself(notebook):
    title = cells(notebook, "markdown").split("\n## ")[0]
    for pattern in (BINDER, COLAB):
        assert f"notebooks/{notebook.name}" in [
            link["path"] for link in pattern.finditer(title)
        ]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=names(NOTEBOOKS))
def test_setup_cell_clones_this_repository(notebook):
    cloned = [link["repo"] for link in CLONE.finditer(cells(notebook, "code"))]
    assert set(cloned) <= {commands.REPOSITORY}


def test_no_other_file_names_the_repository():
    """Else `badges` would leave it behind."""
    listed = subprocess.run(
        ["git", "grep", "-lF", "--untracked", commands.REPOSITORY],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if listed.returncode not in (0, 1):
        pytest.skip("not a git checkout")
    moved = {"README.md", "helpers/__main__.py"}
    moved |= {f"notebooks/{notebook.name}" for notebook in NOTEBOOKS}
    assert set(listed.stdout.splitlines()) <= moved


# --- Moving them -------------------------------------------------------------------

# Each line, with the repository and the branch it stands under left out.
OURS = """\
[b](https://mybinder.org/v2/gh/{repo}/{branch}?urlpath=lab/tree/notebooks/01-a.ipynb)
[c](https://colab.research.google.com/github/{repo}/blob/{branch}/notebooks/01-a.ipynb)
git clone https://github.com/{repo}.git
git clone git@github.com:{repo}.git
See https://github.com/{repo}. Or https://github.com/{repo}/tree/{branch}.
<https://github.com/{repo}/issues> "https://github.com/{repo}"
https://raw.githubusercontent.com/{repo}/{branch}/notebooks/01-a.ipynb
"""
OTHERS = f"""\
https://github.com/pytorch/pytorch/blob/main/README.md
https://github.com/{commands.REPOSITORY}-fork/blob/main/README.md
https://github.com/{commands.REPOSITORY}.github.io
https://github.com/other-{commands.REPOSITORY}
https://example.org/{commands.REPOSITORY}/{commands.BRANCH}
https://colab.research.google.com/github/pytorch/tutorials/blob/main/a.ipynb
the main branch of {commands.REPOSITORY}
"""


def course_text(repo: str, branch: str) -> str:
    """Links of this course under a repository and branch, and other links."""
    tagged = f"https://github.com/{repo}/tree/v1.0\n"
    return OURS.format(repo=repo, branch=branch) + tagged + OTHERS


def notebook_text(repo: str, branch: str) -> str:
    """A notebook in a layout of its own: tabs, an escape, no newline at the end."""
    source = json.dumps(course_text(repo, branch).splitlines(keepends=True))
    return (
        '{"cells":\t[{"cell_type": "markdown",   "source": '
        + source
        + ', "metadata": {"note": "\\u00fc ü"}}],\r\n"nbformat": 4}'
    )


@pytest.fixture
def course(tmp_path) -> Path:
    """A copy of the commands beside a README and notebooks made up here."""
    (tmp_path / "helpers").mkdir()
    (tmp_path / "notebooks").mkdir()
    for name in ("__init__.py", "__main__.py"):
        shutil.copy(ROOT / "helpers" / name, tmp_path / "helpers")
    (tmp_path / "README.md").write_text(course_text(*HOME), encoding="utf-8")
    for name in ("01-a.ipynb", "02-b.ipynb"):
        path = tmp_path / "notebooks" / name
        path.write_bytes(notebook_text(*HOME).encode("utf-8"))
    return tmp_path


def badges(course: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python3 -m helpers badges …` in a copy of the course."""
    return subprocess.run(
        [sys.executable, "-m", "helpers", "badges", *arguments],
        cwd=course,
        capture_output=True,
        text=True,
        timeout=60,
    )


def contents(course: Path) -> dict[str, bytes]:
    """All files of the course, without what Python compiled."""
    files = (f for f in course.rglob("*") if f.is_file() and f.suffix != ".pyc")
    return {str(file.relative_to(course)): file.read_bytes() for file in files}


@pytest.mark.parametrize(
    ("arguments", "repo", "branch"),
    [
        (["ada/fork"], "ada/fork", commands.BRANCH),
        (["ada/fork.js", "--branch", "v2.x"], "ada/fork.js", "v2.x"),
        ([commands.REPOSITORY, "--branch=dev"], commands.REPOSITORY, "dev"),
    ],
)
def test_badges_moves_all_links_of_the_course_and_no_other(
    course, arguments, repo, branch
):
    before = contents(course)
    result = badges(course, *arguments)
    assert result.returncode == 0, result
    after = contents(course)
    assert after.keys() == before.keys()
    assert after["README.md"].decode() == course_text(repo, branch)
    for name in ("01-a.ipynb", "02-b.ipynb"):
        assert after[f"notebooks/{name}"].decode() == notebook_text(repo, branch)
    source = after["helpers/__main__.py"].decode()
    assert f'\nREPOSITORY = "{repo}"\nBRANCH = "{branch}"\n' in source
    changed = [
        (old, new)
        for old, new in zip(
            before["helpers/__main__.py"].decode().splitlines(),
            source.splitlines(),
            strict=True,
        )
        if old != new
    ]
    assert 1 <= len(changed) <= 2

    again = badges(course, *arguments)
    assert (again.returncode, again.stdout) == (0, "")
    assert contents(course) == after


def test_badges_there_and_back_gives_the_same_bytes(course):
    before = contents(course)
    badges(course, "ada/fork", "--branch", "x")
    assert contents(course) != before
    badges(course, commands.REPOSITORY, "--branch", commands.BRANCH)
    assert contents(course) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "OWNER/REPO"),
        (["ada"], "'ada' is not of the form OWNER/REPO"),
        (["ada/fork/main"], "not of the form OWNER/REPO"),
        (["https://github.com/ada/fork"], "not of the form OWNER/REPO"),
        (["ada/fork.git"], "not of the form OWNER/REPO"),
        (["ada/.."], "not of the form OWNER/REPO"),
        (["ada /fork"], "not of the form OWNER/REPO"),
        (["ada/fork\n"], "not of the form OWNER/REPO"),
        (["ada/fork", "--branch", "a/b"], "'a/b' is not a branch name"),
        (["ada/fork", "--branch", ""], "not a branch name"),
        (["ada/fork", "main"], "unrecognized arguments"),
    ],
)
def test_badges_refuses_bad_arguments(course, arguments, words):
    before = contents(course)
    result = badges(course, *arguments)
    assert result.returncode == 2
    assert words in result.stderr and "Traceback" not in result.stderr
    assert contents(course) == before
