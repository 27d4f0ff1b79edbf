"""What the notebooks import.

Importing this package costs nothing and needs the standard library only, because
`python3 -m helpers lab` must run before anything is installed. Each name below is
loaded when it is first used.
"""

import importlib.util
import os

# public name -> the module of this package that defines it
_HOMES = {
    "Job": "elastic",
    "count_copies": "gpus",
    "digits": "data",
    "gpu_seconds": "gpus",
    "host_seconds": "gpus",
    "kind_of_time": "gpus",
    "need_gpus": "gpus",
    "progress": "solved",
    "text": "data",
    "time_stages": "stages",
    "timeline": "gpus",
}
_MODULES = ("check", "draw", "explore", "gpus")
# and what comes from simgpu, so that a lesson has one line of imports
_SIMGPU = ("Messages", "RankError", "Ranks")


def _need_simgpu() -> None:
    """In this folder `simgpu` is found without being installed: as an empty package."""
    found = importlib.util.find_spec("simgpu")
    if found is None or found.origin is None:
        raise ImportError(
            "the simulator is not installed in this Python: `python3 -m helpers lab` "
            "installs it, and so does `pip install -r requirements.txt`"
        )


def __getattr__(name: str):
    if name in (*_MODULES, *_HOMES, *_SIMGPU):
        _need_simgpu()
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in _SIMGPU:
        if os.environ.get("HELPERS_GPUS") == "real":
            os.environ["SIMGPU"] = "off"
        return getattr(importlib.import_module("simgpu"), name)
    raise AttributeError(f"module 'helpers' has no attribute {name!r}")


def __dir__() -> "list[str]":
    return sorted([*globals(), *_HOMES, *_MODULES])
