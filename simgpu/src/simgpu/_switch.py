"""Simulated GPUs or the machine's own: what the environment variable asks for.

`HELPERS_GPUS` is `simulated`, as where it is not set, or `real`.
"""

import os

_CHOICES = ("simulated", "real")


def wanted() -> str:
    """What the environment variable HELPERS_GPUS asks for.

    Raises:
        ValueError: if it is neither simulated nor real.
    """
    choice = os.environ.get("HELPERS_GPUS", "simulated")
    if choice not in _CHOICES:
        raise ValueError(f"HELPERS_GPUS={choice!r}; use {' or '.join(_CHOICES)}")
    return choice
