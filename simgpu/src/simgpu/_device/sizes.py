"""Numbers of bytes as text, read and written as PyTorch does."""

import re

KIB, MIB, GIB = 1024, 1024**2, 1024**3
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def parse_memory(size: int | str) -> int:
    """Bytes in `size`: a number of bytes, or text such as "512MB" or "1.5 GiB".

    As everywhere in PyTorch, MB and MiB both mean 1024 * 1024 bytes.

    Raises:
        ValueError: for what is not a size, and for less than 1 MiB.
    """
    if not isinstance(size, (int, str)):
        raise ValueError(f'cannot read {size!r} as memory; write "512MB" or "16GB"')
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        if not match:
            raise ValueError(f'cannot read {size!r} as memory; write "512MB" or "16GB"')
        unit = 1024 ** " KMGT".index(match[2].upper() or " ")
        size = int(float(match[1]) * unit)
    if size < MIB:
        raise ValueError(f"{size} bytes is too little memory for a GPU (at least 1 MB)")
    return size


def show_bytes(size: int) -> str:
    """`size` as PyTorch's allocator writes it: "512.00 MiB", but "1024.00 MiB"."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size > unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"
