"""Compiled code: `torch.compile` runs what it is given, and counts its fused kernels.

    regions.py   where compiled code begins and ends
    call.py      an operation, which may be a part of it
    fusible.py   which operations are fused, and how they go through their elements
    fusing.py    what becomes one kernel, and when
    kernels.py   such kernels, and results that none has written yet

Values are computed operation by operation, as without compiling.
"""
