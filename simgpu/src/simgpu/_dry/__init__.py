"""A dry run: a script runs unmodified as one rank of any number, without its values.

    values.py    which tensors have values, and the shapes of those that have none
    call.py      an operation: computed where its values are known, else not
    peers.py     the other ranks of the job, which give what this one gives
    wide.py      where PyTorch itself goes through all ranks, or keeps meshes
    files.py     checkpoints: their shapes
    steps.py     where a training step begins and ends
    memory.py    what the memory of the card held when it held most
    report.py    what came out of it
    words.py     the same in words
    command.py   `simgpu dry-run`
    kinds.py     which ranks run, and their processes
    run.py       one rank from its start to its report
    fed.py       how many tokens and samples a step has
    progress.py  the line on the screen meanwhile
    drawn.py     what a report keeps for its pictures, which are in `_pictures/`
    api.py       `simgpu.dry_run`, and pytest's `simulated_dry_run`
    fresh.py     a dry run of a script in a new Python
    axes.py      the layouts of a command with braces
    sweep.py     runs them side by side
    sweep_table.py, sweep_command.py   `simgpu sweep`
    launchers.py what stands behind torchrun and its like

A tensor is an ordinary one of the simulator: of the CPU, with a block of the
allocator. Only that nobody computes into its memory if it is large or comes of what is
large: pages that nobody touches cost nothing. So all else, DDP's reducer in C++ among
it, is what runs on simulated GPUs with values.
"""
