"""Every Binder, Colab and clone link names one repository, one branch, a real file.

Also tests `python -m tests.tools.badges`, which moves them all to another repository.
Nothing here opens a link: that the services answer is not tested.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import checkout
from support.limits import SHORT
from tests.lessons import as_parameters, lessons
from tests.tools import badges

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = lessons()

TOOL = "tests/tools/badges.py"
HOME = (badges.REPOSITORY, badges.BRANCH)
LINKS = {  # part of a link: what stands in front of a notebook's name
    "mybinder.org/v2": "https://mybinder.org/v2/gh/{}/{}?urlpath=lab/tree/notebooks/",
    "/github/": "https://colab.research.google.com/github/{}/blob/{}/notebooks/",
}
CLONE = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)\.git")


def cells(notebook: Path, kind: str) -> str:
    """The sources of a notebook's cells of one kind, joined."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    chosen = [cell for cell in content["cells"] if cell["cell_type"] == kind]
    return "\n".join("".join(cell["source"]) for cell in chosen)


# --- The links that stand in this repository ---------------------------------------


@pytest.mark.parametrize(
    "file", [ROOT / "README.md", *as_parameters()], ids=lambda file: file.name
)
def test_links_name_this_repository_and_existing_notebooks(file):
    lesson = file.suffix == ".ipynb"
    text = cells(file, "markdown") if lesson else file.read_text(encoding="utf-8")
    for part, start in LINKS.items():
        names = re.findall(re.escape(start.format(*HOME)) + r"([\w.-]+)", text)
        assert len(names) == text.count(part) > 0, "none, or one of another form"
        assert all((ROOT / "notebooks" / name).is_file() for name in names)
    if lesson:  # its set-up for Colab
        assert set(CLONE.findall(cells(file, "code"))) == {badges.REPOSITORY}


def test_no_other_file_names_the_repository():
    """Else `badges` would leave it behind."""
    name = badges.REPOSITORY.encode()
    naming = [path for path in checkout.files(ROOT) if name in path.read_bytes()]
    moved = {"README.md", TOOL, *badges.PAGES}
    moved |= {f"notebooks/{notebook.name}" for notebook in NOTEBOOKS}
    assert {path.relative_to(ROOT).as_posix() for path in naming} <= moved


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
https://github.com/{repo}/tree/v1.0
Read it at {pages}, or its first page at {pages}00-start-here.html.
"""
OTHERS = f"""\
https://github.com/pytorch/pytorch/blob/main/README.md
https://github.com/{badges.REPOSITORY}-fork/blob/main/README.md
https://github.com/{badges.REPOSITORY}.github.io
https://github.com/other-{badges.REPOSITORY}
https://notgithub.com/{badges.REPOSITORY}
https://example.org/{badges.REPOSITORY}/{badges.BRANCH}
https://colab.research.google.com/github/pytorch/tutorials/blob/main/a.ipynb
the main branch of {badges.REPOSITORY}
"""


def readme_text(repo: str, branch: str) -> str:
    """Links of this course under a repository and branch, and other links."""
    pages = badges.pages_of(repo)
    return OURS.format(repo=repo, branch=branch, pages=pages) + OTHERS


def notebook_text(repo: str, branch: str) -> str:
    """A notebook in a layout of its own: tabs, an escape, no newline at the end."""
    source = json.dumps(readme_text(repo, branch).splitlines(keepends=True))
    cell = '{"cell_type": "markdown",   "source": ' + source
    return f'{{"cells":\t[{cell}, "metadata": "\\u00fc ü"}}],\r\n"nbformat": 4}}'


@pytest.fixture
def course(tmp_path) -> Path:
    """A copy of the command beside a README and notebooks made up here."""
    files = {"README.md": readme_text(*HOME)}
    files |= {
        f"notebooks/{name}.ipynb": notebook_text(*HOME) for name in ("01-a", "02-b")
    }
    for name in ("tests/__init__.py", "tests/tools/__init__.py", TOOL):
        files[name] = (ROOT / name).read_text()
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    return tmp_path


def move(course: Path, *arguments: str) -> str:
    """Run `python -m tests.tools.badges …` in a copy of the course."""
    command = [sys.executable, "-m", "tests.tools.badges", *arguments]
    return subprocess.run(
        command, cwd=course, capture_output=True, text=True, check=True, timeout=SHORT
    ).stdout


def contents(course: Path) -> dict[str, str]:
    """All files of the course, without what Python compiled."""
    files = (f for f in course.rglob("*") if f.is_file() and f.suffix != ".pyc")
    return {str(f.relative_to(course)): f.read_bytes().decode() for f in files}


@pytest.mark.parametrize(
    ("arguments", "repo", "branch"),
    [
        (["ada/fork"], "ada/fork", badges.BRANCH),
        (["ada/fork.js", "--branch", "v2.x"], "ada/fork.js", "v2.x"),
        ([badges.REPOSITORY, "--branch=dev"], badges.REPOSITORY, "dev"),
    ],
)
def test_badges_moves_all_links_and_no_other_there_and_back(
    course, arguments, repo, branch
):
    before = contents(course)
    constants = '\nREPOSITORY = "{}"\nBRANCH = "{}"\n'
    old, new = constants.format(*HOME), constants.format(repo, branch)
    assert old in before[TOOL]
    expected = before | {
        "README.md": readme_text(repo, branch),
        "notebooks/01-a.ipynb": notebook_text(repo, branch),
        "notebooks/02-b.ipynb": notebook_text(repo, branch),
        TOOL: before[TOOL].replace(old, new),
    }
    assert move(course, *arguments).count(": changed\n") == 4
    assert contents(course) == expected
    assert move(course, *arguments) == ""  # once more changes nothing
    assert contents(course) == expected
    move(course, badges.REPOSITORY, "--branch", badges.BRANCH)
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
def test_badges_refuses_bad_arguments(course, monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(badges, "ROOT", course)
    before = contents(course)
    with pytest.raises(SystemExit) as ended:
        badges.main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert contents(course) == before
