"""CUDA_VISIBLE_DEVICES: which of a machine's GPUs a process sees, in which order."""

import os
import re

from simgpu._errors import NotSimulated


def visible_ordinals(count: int) -> list[int]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves of `count`, in its order.

    As in CUDA, the list ends at the first entry that names no GPU.

    Raises:
        NotSimulated: for GPUs that are named by their UUID.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(range(count))
    ordinals: list[int] = []
    for entry in text.split(","):
        entry = entry.strip()
        if entry.startswith(("GPU-", "MIG-")):
            raise NotSimulated(f"CUDA_VISIBLE_DEVICES={entry}", "Use whole numbers.")
        if not re.fullmatch("[0-9]+", entry) or int(entry) >= count:
            break
        if int(entry) in ordinals:  # CUDA refuses a list that names one twice
            return []
        ordinals.append(int(entry))
    return ordinals
