"""Which files are the project's, where somebody has worked: theirs are nobody's fault.

A checkout fills up: checkpoints of JupyterLab, copies and notebooks of one's own, saved
weights, environments, builds. Tests that go through a folder ask here, so that they
judge what is the project's and nothing else.

With git, the project's files are those that it knows: `git add` a new one and it is
judged. Without (a download, a source distribution), names decide.
"""

import functools
import os
import re
import subprocess
from pathlib import Path

# folders that hold no source, wherever they are; and those with a dot in front
_FOLDERS = re.compile(r"\..*|__pycache__|build|dist|node_modules|.*\.egg-info")
# what JupyterLab calls new files and copies
_OWN = re.compile(r"[Uu]ntitled\d*\..*|.*-Copy\d+\..*")


def files(folder: Path, *patterns: str) -> list[Path]:
    """The project's files in a folder and those below, sorted.

    Args:
        folder: where to look.
        patterns: of names, such as "*.py"; none: all files.
    """
    known = _known_to_git(folder)
    found = known if known is not None else _by_name(folder)
    return [p for p in found if not patterns or any(map(p.match, patterns))]


def here(folder: Path, *patterns: str) -> list[Path]:
    """The same, without those in folders below."""
    return [path for path in files(folder, *patterns) if path.parent == folder]


@functools.cache
def _known_to_git(folder: Path) -> list[Path] | None:
    """None where git is missing, or knows nothing of this folder."""
    # a hook of git says by variables where it works, which need not be here
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=folder, env=environ, capture_output=True
        )
    except OSError:
        return None
    paths = {folder / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name}
    return sorted(path for path in paths if path.is_file()) if paths else None


def _by_name(folder: Path) -> list[Path]:
    found = []
    for at, folders, names in os.walk(folder):
        if Path(at, "pyvenv.cfg").exists() and at != str(folder):  # an environment
            folders.clear()
            continue
        folders[:] = [name for name in folders if not _FOLDERS.fullmatch(name)]
        found += [Path(at, name) for name in names if not _OWN.fullmatch(name)]
    return sorted(found)
