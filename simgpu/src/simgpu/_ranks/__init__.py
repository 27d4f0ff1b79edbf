"""Ranks for a notebook: N processes with a process group, ready in about a second.

    with Ranks(4) as ranks:
        sums = ranks.run(function, 1, 2)     # sums[r] came from rank r

`%%ranks` runs a cell in every rank's own namespace and prints in rank order. A rank is
what `torchrun -m simgpu` starts: the process group is over NCCL, on simulated GPUs, or
with SIMGPU=off on the machine's own. `Ranks(4, device="cpu")` simulates nothing:
gloo, on the CPU.

To follow `ranks.run(function)` from the notebook to a rank and back, read:

    notebook.py        Ranks: pickles the function, sends it, returns or raises
    remote_call.py     RemoteCall: sends it to every rank and collects the answers
    which_gpus.py      which GPUs the ranks have, if any
    worker.py          what a rank does: starts up, receives calls, runs them, answers
    output.py          shows what each rank prints, under its number
    rank_error.py      what went wrong: RankError, the program's lines of each stack
    magic.py           the cell magic %%ranks

`run_ranks.py` calls a function once on ranks that have no process group yet, as a
script under torchrun. The processes of both come to be in:

    rank_processes.py  RankProcesses: starts them, knows how each ends, ends them all
    worker_group.py    WorkerGroup: those of a notebook, in one process group
    fork_server.py     the process that has imported PyTorch and forks them (on Linux)
    python_process.py  a new Python process, which ends when its parent ends
    store.py           the process at which ranks on GPUs meet
    listener.py        the socket where new processes report, each with the key

Leaves out: ranks on several real machines, and pictures drawn by a rank (return the
numbers and draw in the notebook). Run on Linux, on simulated GPUs and with gloo; macOS,
Windows and NCCL are written for and were not run.
"""

from simgpu._ranks import magic
from simgpu._ranks.notebook import Ranks, close, current
from simgpu._ranks.rank_error import RankError

__all__ = ["RankError", "Ranks", "close", "current"]

magic.register()
