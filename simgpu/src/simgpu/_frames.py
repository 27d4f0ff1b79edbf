"""Which lines of a stack are the program's own, and how to show them.

Standard library only, because ranks use it before PyTorch is there.
"""

import contextlib
import importlib.util
import linecache
import os
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType


def _of_torch() -> list[str]:
    """Where PyTorch is: a build from source lies outside site-packages."""
    found = None
    with contextlib.suppress(ValueError):  # a stand-in that has no spec
        found = importlib.util.find_spec("torch")  # imports nothing
    places = found and found.submodule_search_locations
    return [str(Path(place)) + os.sep for place in places or ()]


_FOREIGN = [
    *_of_torch(),
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
    str(Path(__file__).parent) + os.sep,
    "<frozen",
    "<string>",
]
CELL = "<ranks cell"  # how the file name of a `%%ranks` cell begins
_running = ""  # the file name of the cell that runs


def add_foreign(folder: Path) -> None:
    """Whatever is in `folder` is not the program's either."""
    if (path := str(folder) + os.sep) not in _FOREIGN:
        _FOREIGN.append(path)
        is_program_code.cache_clear()


@cache
def is_program_code(filename: str) -> bool:
    """Whether a file is neither Python's, nor a package's, nor the course's."""
    packages = {"site-packages", "dist-packages"} & set(Path(filename).parts)
    return not packages and not filename.startswith(tuple(_FOREIGN))


def run_cell(filename: str = "") -> None:
    """From here on, "this cell" is this one; without a name, none is."""
    global _running
    _running = filename


def shown(filename: str) -> str:
    """The name of a file, the same on every machine if it is a notebook's cell."""
    if filename.startswith(CELL):
        return "this cell" if filename == _running else "an earlier cell"
    return "this notebook" if "ipykernel_" in filename else filename


def text(filename: str, line: int) -> str:
    """What stands in a line, as far as it is known."""
    return linecache.getline(filename, line).strip()


def called_from() -> str:
    """The line of the program that runs: "train.py:12"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_program_code(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "PyTorch"
    name = shown(frame.f_code.co_filename).replace("\\", "/").rpartition("/")[2]
    return f"{name}:{frame.f_lineno}"
