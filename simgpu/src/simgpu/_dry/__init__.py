"""A dry run: a script runs unmodified as one rank of any number, without its values.

    values.py    which tensors have values, and the shapes of those that have none
    call.py      an operation: computed where its values are known, else not
    peers.py     the other ranks of the job, which give what this one gives
    steps.py     where a training step begins and ends
    memory.py    what the memory of the card held when it held most
    report.py    what came out of it
    command.py   `simgpu dry-run`
    launchers.py what stands behind torchrun and its like

A tensor is an ordinary one of the simulator: of the CPU, with a block of the
allocator. Only that nobody computes into its memory if it is large or comes of what is
large: pages that nobody touches cost nothing. So all else, DDP's reducer in C++ among
it, is what runs on simulated GPUs with values.
"""
