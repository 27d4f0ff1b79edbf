"""The course's tests; what they share with the simulator's is found by tools, too."""

import sys
from pathlib import Path

_SHARED = str(Path(__file__).resolve().parents[1] / "simgpu" / "tests")
if _SHARED not in sys.path:  # pytest knows it from pyproject.toml
    sys.path.append(_SHARED)
