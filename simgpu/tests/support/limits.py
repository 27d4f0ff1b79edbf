"""Every limit of time in the tests, longer on a machine that is slow.

Each is `seconds * SLOWNESS`. `SLOWNESS` is at least 1 and is measured once in a run, by
the first process that imports this; the workers of a run, and what tests start, find it
in their environment. To choose one, set it there: `TESTS_SLOWNESS=5 python -m pytest`.

A limit is what nothing takes that works; it is there so that what hangs ends, and
costs nothing where nothing hangs. How fast something is, benchmarks say, not tests. A
rank may import this, so it imports next to nothing.
"""

import os
import time
import warnings

NAME = "TESTS_SLOWNESS"  # the variable that hands `SLOWNESS` down
# What two processes take that are forked and do a little work at the same time, on the
# reference: 2 cores of a Xeon, quiet. They compute for 0.052 s.
REFERENCE = 0.055
MOST = 20.0  # what is slower has stalled for a moment


def _work() -> int:
    """About 50 ms of Python on the machine of the reference."""
    return sum(i * i % 7 for i in range(1_200_000))


def _two_processes() -> float:
    """How long two processes take to come up, to do a little work, and to end."""
    begin = time.perf_counter()
    if not hasattr(os, "fork"):
        _work()
        return time.perf_counter() - begin
    pids = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there may be threads
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                try:
                    _work()
                finally:
                    os._exit(0)
            pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    return time.perf_counter() - begin


def slowness(took: float) -> float:
    """How many times as slow as the reference: from 1 to `MOST`, to one place."""
    return round(min(max(took / REFERENCE, 1.0), MOST), 1)


def _of_this_run() -> float:
    if NAME not in os.environ:
        took = max(_two_processes() for _ in range(2))
        os.environ[NAME] = str(slowness(took))
    return max(1.0, float(os.environ[NAME]))


SLOWNESS = _of_this_run()


def note() -> str:
    """What the head of a run says of it."""
    if SLOWNESS == 1:
        return "limits: this machine is as fast as the reference"
    return (
        f"limits: this machine is {SLOWNESS:g} times as slow as the reference; "
        "limits are longer by that"
    )


# -- the limits, in seconds ------------------------------------------------------------

MOMENT = 2 * SLOWNESS  # for an answer that is asked for again if it does not come
GRACE = 10 * SLOWNESS  # until a process that has been told so has ended
SHORT = 60 * SLOWNESS  # for a thread, a process that computes little, a page
JOB = 300 * SLOWNESS  # for a program that trains, alone or in ranks, beside others
INSTALL = 300 * SLOWNESS  # for pip, or another program that writes many files
LESSON = 420 * SLOWNESS  # for all cells of a lesson; one has CELL
CELL = 400 * SLOWNESS
LONG = 900 * SLOWNESS  # for a program that runs others, one after another
TEST = 1200 * SLOWNESS  # for a test with its fixtures: more than all it waits for
