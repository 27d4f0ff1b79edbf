"""What the simulator runs by itself, which no profile of the program shows.

PyTorch's profiler sees every operation. Those inside `unseen` stand in a range of ours,
by which `_api/profiler.py` finds them and leaves them out.
"""

import contextlib

from simgpu._compat import RecordFunctionFast, profiler_enabled

RANGE = "simgpu"
_NOTHING = contextlib.nullcontext()


def unseen():
    """A context; only a profile that runs makes it more than nothing."""
    return RecordFunctionFast(RANGE) if profiler_enabled() else _NOTHING
