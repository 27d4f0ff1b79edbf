"""Launchers of ranks behind `python -m simgpu`, whose ranks need not import PyTorch.

    python -m simgpu --gpus 4 torchrun --nproc-per-node=4 train.py

torchrun starts a new Python for each rank, and each would import PyTorch: two seconds
of CPU a rank. On Linux the command therefore starts `launcher.py`, which imports it
once, forks a server, and becomes torchrun. Its own engine and options are all there;
only where it starts a Python that runs a script or a module, the server forks one.

    launcher.py   imports PyTorch, forks the server, becomes the launcher
    server.py     the server, and how the launcher asks it for a rank
    program.py    how a process that was forked becomes `python script.py`
    shown.py      what the system shows of a process: its arguments, its environment

A rank is the launcher's own child, in a session of its own, with the environment and
the files that the launcher gives it. As in a new Python, PyTorch seems not to be
imported, and the GPUs come when the program imports it.

Leaves out: the seed of Python's hashes, which all ranks share, so that their sets of
strings have one order (`--no-fork` gives each its own); `sitecustomize` of the machine,
which runs once; other systems and other launchers, where each rank is a new Python.
"""
