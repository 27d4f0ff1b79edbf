"""Whether a training program does the same on any number of ranks, or where not.

    python -m simgpu._prove train.py --worlds 1,2,4

    from simgpu import _prove as prove
    prove.across_worlds(train, (1, 2))     # a function of a notebook, or a script

It runs the program on simulated GPUs with each number of ranks, aligns losses,
gradients, norms and updates by the names of the parameters, and names the first step
and place where they differ by more than rounding allows. In reading order: `run` starts
the runs, `recorder` notes what a rank does, `combine` makes one step of what all ranks
have noted, `noise` and `rounding` say how far right runs may differ, `compare` finds
the first difference, `within` what is wrong in any run.

Taught in 28-find-the-bug.
"""

from simgpu._prove.compare import Finding
from simgpu._prove.run import Report, across_worlds

__all__ = ["Finding", "Report", "across_worlds"]
