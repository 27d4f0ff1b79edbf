"""The main module of a process that a program under `simgpu` spawns.

multiprocessing runs it in place of the program's own main module. It simulates the same
GPUs, and then becomes that module, so that what was pickled is found in it.
"""

import json
import os
import runpy

from simgpu import _child_commands as child_commands

child_commands.disarm()  # before PyTorch is imported

import simgpu  # noqa: E402
from simgpu import _runtime as state  # noqa: E402
from simgpu._distributed.children import TO_CHILDREN  # noqa: E402

if __name__ == "__mp_main__":
    child = json.loads(os.environ[TO_CHILDREN])
    simgpu.start(**child["gpus"])
    state.current().for_children = child["gpus"]
    if "path" in child:
        found = runpy.run_path(child["path"], run_name=__name__)
    else:
        found = runpy.run_module(child["name"], run_name=__name__)
    globals().update(found)
