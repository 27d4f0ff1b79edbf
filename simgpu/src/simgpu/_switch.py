"""Simulated GPUs or the machine's own: what the environment variable SIMGPU asks for.

`SIMGPU` is `on`, as where it is not set, or `off`: then `python -m simgpu` and `Ranks`
take the machine's own GPUs. `simgpu.start` simulates all the same.
"""

import os

_CHOICES = ("on", "off")


def wanted() -> str:
    """What SIMGPU asks for: "simulated" or "real".

    Raises:
        ValueError: if it is neither on nor off.
    """
    setting = os.environ.get("SIMGPU", "on")
    if setting not in _CHOICES:
        raise ValueError(f"SIMGPU={setting!r}; use {' or '.join(_CHOICES)}")
    return "simulated" if setting == "on" else "real"
