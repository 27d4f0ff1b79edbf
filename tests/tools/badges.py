"""Points every badge and link of the course at another repository.

    python3 -m tests.tools.badges OWNER/REPO [--branch NAME]

Standard library only. What it changes: the Binder, Colab and GitHub links of this
course in the README and the notebooks, and the two constants below.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

# Where the course is published; every badge and clone address names these two.
REPOSITORY = "multi-gpu-course/multi-gpu-course"
BRANCH = "main"
PAGES = ("simgpu/README.md", "simgpu/pyproject.toml")  # that link here, too

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Move every badge, link and clone address to another repository or branch.

    This file comes last: it tells what the others name now, so a run that was
    interrupted can simply be repeated.

    Returns:
        0, the exit status.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.badges",
        description="Points the badges and links at another repository.",
    )
    parser.add_argument("repository", metavar="OWNER/REPO", type=repository_name)
    parser.add_argument("--branch", metavar="NAME", type=branch_name, default=BRANCH)
    new = parser.parse_args(arguments)
    pages = [ROOT / page for page in ("README.md", *PAGES) if (ROOT / page).exists()]
    for file in (*pages, *sorted((ROOT / "notebooks").glob("*.ipynb"))):
        rewrite(file, lambda text: move_links(text, new.repository, new.branch))
    rewrite(
        ROOT / "tests" / "tools" / "badges.py",
        lambda text: move_home(text, new.repository, new.branch),
    )
    return 0


def repository_name(text: str) -> str:
    """Check that a text has the shape OWNER/REPO of a GitHub repository."""
    if not re.fullmatch(r"[\w-]+/(?!\.)[\w.-]+(?<!\.git)", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form OWNER/REPO, such as ada/multi-gpu-course"
        )
    return text


def branch_name(text: str) -> str:
    """Check that a text can stand as a branch in every link, without escapes."""
    if not re.fullmatch(r"\w[\w.-]*", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a branch name of letters, digits, '.', '_' and '-'"
        )
    return text


def move_links(text: str, repository: str, branch: str) -> str:
    """Point the Binder, Colab, GitHub and site links of this course elsewhere.

    Links to other repositories stay, and so does a branch or tag that is not BRANCH.
    """
    name_ends = r"(?![\w-])(?!\.(?!git\b)\w)"  # .git may follow, .io may not
    link = re.compile(
        r"(?P<site>(?<![\w-])(?:mybinder\.org/v2/gh/|github\.com[/:]"
        r"|colab\.research\.google\.com/github/|raw\.githubusercontent\.com/))"
        rf"{re.escape(REPOSITORY)}{name_ends}"
        rf"(?:(?P<to_branch>/(?:(?:blob|tree|raw)/)?){re.escape(BRANCH)}{name_ends})?",
        re.ASCII,
    )

    def moved(found: re.Match[str]) -> str:
        named_branch = found["to_branch"] + branch if found["to_branch"] else ""
        return found["site"] + repository + named_branch

    return link.sub(moved, text).replace(pages_of(REPOSITORY), pages_of(repository))


def pages_of(repository: str) -> str:
    """The address of a repository's reading site, as GitHub Pages makes it."""
    owner, name = repository.split("/")
    return f"https://{owner.lower()}.github.io/{name}/"


def move_home(text: str, repository: str, branch: str) -> str:
    """Change the two constants at the top of this file."""
    for name, value in (("REPOSITORY", repository), ("BRANCH", branch)):
        text = re.sub(rf'(?m)^{name} = ".*"$', f'{name} = "{value}"', text, count=1)
    return text


def rewrite(file: Path, change: Callable[[str], str]) -> None:
    """Change a text file in one go, leaving its other bytes as they are."""
    old = file.read_bytes()
    new = change(old.decode("utf-8")).encode("utf-8")
    if new != old:
        whole = file.with_name(file.name + ".new")
        whole.write_bytes(new)
        whole.replace(file)
        print(f"{file.relative_to(ROOT).as_posix()}: changed")


if __name__ == "__main__":
    sys.exit(main())
