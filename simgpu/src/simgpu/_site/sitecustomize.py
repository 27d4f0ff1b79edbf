"""Python imports this when it starts, in a command under `python -m simgpu`.

It takes its folder off the path again, runs the machine's own `sitecustomize` if there
is one, and lets the GPUs come with PyTorch (`_child_commands.py`). The simulator is the
command's own, also where this Python has another one.
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
    _init = os.path.join(_PACKAGE, "__init__.py")
    _spec = importlib.util.spec_from_file_location(
        "simgpu", _init, submodule_search_locations=[_PACKAGE]
    )
    sys.modules["simgpu"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["simgpu"])
    _other = PathFinder.find_spec("simgpu")
    _origin = os.path.realpath((_other and _other.origin) or _init)
    if _origin != os.path.realpath(_init):
        print(
            f"simgpu: the command's simulator is used, {_PACKAGE}, and not this "
            f"Python's, {os.path.dirname(_origin)}",
            file=sys.stderr,
        )
    from simgpu import _child_commands as child_commands

    child_commands.arm()
