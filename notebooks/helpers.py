"""Lets a lesson import the package `helpers`, which stands beside this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
del sys.modules[__name__]

import helpers  # noqa: E402, F401 - `import helpers` gives what stands here now
