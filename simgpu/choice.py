"""Simulated GPUs or the machine's own: what the environment variable asks for.

`HELPERS_GPUS` is `auto` (real ones where there are enough), `simulated` or `real`.
"""

import os

_CHOICES = ("auto", "simulated", "real")


def wanted() -> str:
    """What the environment variable HELPERS_GPUS asks for.

    Raises:
        ValueError: if it is none of auto, simulated and real.
    """
    choice = os.environ.get("HELPERS_GPUS", "auto")
    if choice not in _CHOICES:
        raise ValueError(f"HELPERS_GPUS={choice!r}; use one of {', '.join(_CHOICES)}")
    return choice
