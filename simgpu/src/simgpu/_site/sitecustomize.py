"""Python imports this when it starts, in a command under `python -m simgpu`.

It takes its folder off the path again, runs the machine's own `sitecustomize` if there
is one, and lets the GPUs come with PyTorch (`_child_commands.py`).
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(_FOLDER)

sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _FOLDER]
_spec = PathFinder.find_spec("sitecustomize")
if _spec is not None:
    sys.modules["sitecustomize"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["sitecustomize"])
if "SIMGPU_CHILDREN" in os.environ:
    if importlib.util.find_spec("simgpu") is None:
        sys.path.append(os.path.dirname(_PACKAGE))
    from simgpu import _child_commands as inherit

    inherit.arm()
