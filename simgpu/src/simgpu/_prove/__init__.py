"""Whether a training program does the same on any number of ranks, or where not.

    simgpu prove train.py --worlds 1,2,4

    simgpu.prove(train, (1, 2))     # a function of a notebook, or a script

    def test_it_trains_the_same_on_two_ranks():
        simgpu.assert_same_on_worlds("train.py", (1, 2))

It runs the program on simulated GPUs with each number of ranks, aligns losses,
gradients, norms and updates by the names of the parameters, and names the first step
and place where they differ by more than rounding allows. In reading order: `run` starts
the runs, `recorder` notes what a rank does, `combine` makes one step of what all ranks
have noted, `noise` and `rounding` say how far right runs may differ, `compare` finds
the first difference, `within` what is wrong in any run. `command` is the command.
"""

from simgpu._prove.compare import Finding
from simgpu._prove.run import Report, assert_same_on_worlds, prove

__all__ = ["Finding", "Report", "assert_same_on_worlds", "prove"]
