"""Ranks for a notebook: N processes with a process group, ready in about a second.

    with Ranks(4) as ranks:
        sums = ranks.run(function, 1, 2)     # sums[r] came from rank r

`%%ranks` runs a cell in every rank's own namespace and prints in rank order. A rank is
what `torchrun -m simgpu` starts: the process group is over NCCL, on simulated GPUs, or
with SIMGPU=off on the machine's own. `Ranks(4, device="cpu")` simulates nothing:
gloo, on the CPU.

To follow `ranks.run(function)` from the notebook to a rank and back, read:

    ranks.py         Ranks: pickles the function, makes a Call of it, returns or raises
    call.py          Call: sends it to every rank and collects the answers
    gpus.py          which GPUs the ranks have, if any
    worker.py        what a rank does: starts up, receives calls, runs them, answers
    output.py        shows what each rank prints, under its number
    report.py        what went wrong: RankError and the program's lines of each stack
    magic.py         the cell magic %%ranks

and how the processes come to be:

    worker_group.py  WorkerGroup: starts all ranks, knows how each ends, ends them all
    fork_server.py   the process that has imported PyTorch and forks ranks (on Linux)
    process.py       starts a new Python process, and ends one when its parent ends
    store.py         the process at which ranks on GPUs meet
    listener.py      the socket where new processes report, each with the key

Leaves out: ranks on several real machines, and pictures drawn by a rank (return the
numbers and draw in the notebook). Run on Linux, on simulated GPUs and with gloo; macOS,
Windows and NCCL are written for and were not run.
"""

from simgpu._ranks import magic
from simgpu._ranks.notebook import Ranks, close, current
from simgpu._ranks.report import RankError

__all__ = ["RankError", "Ranks", "close", "current"]

magic.register()
