"""Of a job that fails: which rank was the first, and its traceback as the last word.

A rank that fails tells torchrun, whose summary then has the traceback, and
`python -m simgpu`, if that has started the launcher. A rank that only waited for one
that has failed says so in a line. Nothing here needs PyTorch.
"""

import json
import math
import os
import time
import traceback
from pathlib import Path
from types import TracebackType

from simgpu._lines import write_line

ENDED = " with an error"  # how a rank ends that fails, for those that wait for it
# errors that the simulator raises on purpose: they are the program's
_ON_PURPOSE = {
    "AcceleratorError", "DistBackendError", "NotSimulated", "OutOfMemoryError",
    "RaceError",
}  # fmt: skip
_NO_TRITON = (
    "simgpu: Triton compiles kernels for a GPU that is not there. TRITON_INTERPRET=1 "
    "in the environment runs them in its interpreter."
)
_OURS = str(Path(__file__).parent) + os.sep
_COMPILED = os.path.join(_OURS, "_fusing", "regions.py")  # through which errors pass


def report(kind, error, trace, show, folder: str | None = None) -> None:
    """An error ends this process: show it, and tell who started it.

    Args:
        kind, error, trace: as for `sys.excepthook`.
        show: what shows an error.
        folder: where `show_first` looks; None: nobody does.
    """
    if not issubclass(kind, Exception):  # Ctrl-C
        show(kind, error, trace)
        return
    if "libcuda.so cannot found" in str(error):
        error = kind(f"{error}\n{_NO_TRITON}").with_traceback(trace)
    follows = kind.__name__ == "DistBackendError" and f"ended{ENDED}" in str(error)
    rank = os.environ.get("RANK")
    if follows:
        text = str(error)  # which names the ranks, and this one's line
        write_line(text)
    else:
        hidden = _OURS if kind.__name__ in _ON_PURPOSE else _COMPILED
        error = error.with_traceback(trace := of_program(trace, hidden))
        show(kind, error, trace)
        text = "".join(traceback.format_exception(kind, error, trace)).rstrip()
    if rank is not None:
        _tell_torchrun(f"{kind.__name__}: {error}", text, follows)
        if folder is not None:
            restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
            order = (-restarts, follows, time.time())
            words = json.dumps((order, f"rank {rank}", text))
            Path(folder, f"{os.getpid()}").write_text(words, encoding="utf-8")
    _tell_other_ranks()


def of_program(trace, hidden: str = _OURS):
    """A traceback without the simulator's own lines, or those of a part of it."""
    steps = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(hidden):
            steps.append(trace)
        trace = trace.tb_next
    for step in reversed(steps):
        trace = TracebackType(trace, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return trace


def _tell_torchrun(message: str, text: str, follows: bool) -> None:
    """As `torch.distributed.elastic.multiprocessing.errors.record` does.

    torchrun takes the smallest of the times, in seconds, for the first failure.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):  # the program has told it itself
        return
    now = math.floor(time.time()) + follows
    more = {"py_callstack": text, "timestamp": str(now)}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": more}}, file)
    except OSError:
        pass


def _tell_other_ranks() -> None:
    from simgpu import _runtime as state

    if state.running is not None and state.running.cluster is not None:
        state.running.cluster.how = ENDED


def show_first(folder: Path) -> None:
    """The traceback of the rank that failed first, if one has left any."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.iterdir()]
    if found:
        _, rank, text = min(found)
        write_line(f"\nThe first error, of {rank}:\n{text}")
