"""What stands beside the lessons, in the folder `notebooks`: exercises, for example.

A lesson runs in that folder and finds the packages in it. Whatever runs elsewhere
(`python3 -m helpers check`, a test, a notebook in another folder) finds them because
`load` puts the folder where Python looks for packages.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


def load(name: str) -> ModuleType:
    """A package that stands beside the lessons, and not another of the same name.

    Args:
        name: of the package or of a module in it, such as "exercises.exercise".

    Raises:
        ImportError: if it is missing, or if the name belongs to somebody else's package
            in this Python; the message says what to do.
    """
    package = name.partition(".")[0]
    home = NOTEBOOKS / package
    if not home.is_dir():
        raise ImportError(
            f"the folder {home} is missing: this copy of the course is torn; fetch it "
            "again"
        )
    if str(NOTEBOOKS) not in sys.path:
        sys.path.insert(0, str(NOTEBOOKS))
    file = importlib.import_module(package).__file__
    if file is None or Path(file).resolve().parent != home:
        raise ImportError(
            f"`import {package}` gives {file or 'another folder'}, and the course "
            f"needs {home}: rename yours, or take its folder off sys.path, then restart"
        )
    return importlib.import_module(name)
