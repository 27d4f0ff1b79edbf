"""Files that `simgpu measure` writes: a real card, and the network between machines.

    simgpu.start(2, card="my.json")

Such a file has the figures that were measured, in the formats of `tests/recordings`,
and the constants that were fitted to them (`_measure/fit.py`), which are read here.
Constants belong to the formulas of one version of simgpu, so another version asks for
them to be fitted anew, which needs no GPU.
"""

import json
import os
from typing import Any

from simgpu import __version__

KIND, VERSION = "simgpu measure", 1
_AGAIN = "`simgpu measure --fit {0}` fits its constants again, without a GPU"


def names_file(name: object) -> bool:
    """Whether a card or a network is named by a file."""
    return isinstance(name, os.PathLike) or (
        isinstance(name, str) and name.lower().endswith(".json")
    )


def absolute(name: Any) -> Any:
    """A name as another folder can read it: a file's whole path, any other as it is."""
    return os.path.abspath(name) if names_file(name) else name


def read(path: str | os.PathLike) -> dict[str, Any]:
    """What a file has, whichever version of simgpu fitted its constants.

    Raises:
        ValueError: if it is not there, of another kind, or of an unknown version.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except OSError as error:
        raise ValueError(f"{os.fspath(path)}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} is no JSON: {error}") from None
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise ValueError(
            f"{os.fspath(path)} is not a file that `simgpu measure` has written"
        )
    if found.get("version") != VERSION:
        raise ValueError(
            f"{os.fspath(path)} has version {found.get('version')!r} of its format; "
            f"simgpu {__version__} reads version {VERSION}"
        )
    return found


def constants(path: str | os.PathLike, part: str) -> dict[str, Any]:
    """The constants of one part: "card" or "network".

    Raises:
        ValueError: see `read`; also if it has no such part, or another version of
            simgpu has fitted it.
    """
    found, name = read(path), os.fspath(path)
    if not isinstance(found.get(part), dict):
        how = (
            "run `simgpu measure` on the machine"
            if part == "card"
            else "run `simgpu measure` under torchrun on several machines"
        )
        raise ValueError(f"{name} has no {part}: it was not measured; {how}")
    if found.get("simgpu") != __version__:
        raise ValueError(
            f"simgpu {found.get('simgpu')} has fitted {name}, and this is "
            f"{__version__}: {_AGAIN.format(name)}"
        )
    values: dict[str, Any] = found[part]
    return values


def damaged(path: str | os.PathLike, part: str, error: Exception) -> ValueError:
    """The error for constants that cannot be."""
    name = os.fspath(path)
    return ValueError(
        f"{name}: these are no constants of a {part} ({error}); {_AGAIN.format(name)}"
    )
