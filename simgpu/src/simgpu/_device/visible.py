"""CUDA_VISIBLE_DEVICES: which of a machine's GPUs a process sees, in which order.

Models: numbers, and UUIDs or their beginnings, as PyTorch reads them
(`_parse_visible_devices` in torch/cuda/__init__.py). Leaves out: parts of a card (MIG).
"""

import os
import re
import uuid

from simgpu._errors import NotSimulated

_GOLDEN = 0x9E3779B1  # spreads small numbers over 32 bits


def uuid_of(ordinal: int) -> uuid.UUID:
    """The UUID of the card with this number in its machine.

    It begins differently for each, so that its beginning names the card, and ends with
    the number.
    """
    beginning = (ordinal + 1) * _GOLDEN % 2**32
    return uuid.UUID(int=beginning << 96 | ordinal)


def visible_ordinals(count: int) -> list[int]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves of `count`, in its order.

    As in CUDA, the list ends at the first entry that names no GPU, and is empty if it
    names one twice. The first entry says whether they are numbers or UUIDs.

    Raises:
        NotSimulated: for parts of a card.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(range(count))
    if text.startswith("MIG-"):
        raise NotSimulated(f"CUDA_VISIBLE_DEVICES={text}", "Name whole GPUs.")
    by_uuid = text.startswith("GPU-")
    ordinals: list[int] = []
    for entry in text.split(","):
        found = _with_uuid(entry, count) if by_uuid else _number(entry.strip())
        if found in ordinals:
            return []
        if not 0 <= found < count:
            break
        ordinals.append(found)
    return ordinals


def _number(entry: str) -> int:
    """The number with which an entry begins ("1gpu" is 1), or -1."""
    match = re.match("[+]?[0-9]+", entry)
    return int(match.group()) if match else -1


def _with_uuid(entry: str, count: int) -> int:
    """The one GPU whose UUID begins so, or -1."""
    named = [n for n in range(count) if f"GPU-{uuid_of(n)}".startswith(entry)]
    return named[0] if entry.startswith("GPU-") and len(named) == 1 else -1
