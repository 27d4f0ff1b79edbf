"""PyTorch's native_functions.yaml: how each CUDA operation checks its devices."""

import functools
import re
from pathlib import Path


@functools.cache
def _declarations() -> dict[str, str]:
    """Operation and overload -> its entry in PyTorch's native_functions.yaml.

    It is read only when a program mixes devices.
    """
    import torchgen

    folder = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    text = (folder / "native_functions.yaml").read_text(encoding="utf-8")
    return {
        entry[: entry.index("(")].strip(): entry
        for entry in re.split(r"^- func: ", text, flags=re.MULTILINE)[1:]
    }


def declaration(func) -> str:
    """The entry of an overload; empty if it has none."""
    return _declarations().get(
        func._schema.name.removeprefix("aten::")
        + (f".{func._schema.overload_name}" if func._schema.overload_name else ""),
        "",
    )


def has_cuda_kernel(entry: str) -> bool:
    """Whether CUDA has a kernel of its own for the operation of this entry."""
    return "structured" in entry or bool(re.search(r"(?<!\w)CUDA\b.*: ", entry))
