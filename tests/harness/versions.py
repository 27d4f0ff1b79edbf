"""Outputs that depend on the version of PyTorch, and why.

The outputs are those of `STORED_WITH`. With another PyTorch a cell of `SINCE` runs, and
what it prints is not compared if that PyTorch is older than the cell needs. All others
print the same: seen with 2.13 and 2.14; the one that 2.11 alone prints otherwise is
what its lesson says, and all cells are yet to be compared there.
"""

from importlib import metadata

STORED_WITH = "2.15"
# cell (its id in the notebook): the first PyTorch that prints what is stored, and what
# that one does otherwise
SINCE = {
    "18-36": (
        "2.15",
        "FSDP2 frees what it gathered last before it copies out the next layer; until "
        "then, a local variable of `wait_for_unshard` keeps it a layer longer",
    ),
    "20-30": (
        "2.12",
        "schedules of several stages post a receive just before its data is used; in "
        "2.11, early ones hold up other messages (the bubbles are 33 and 24 %)",
    ),
    "20-33": (
        "2.15",
        "a stage allocates a message's buffer as it arrives; until then, those of all "
        "micro-batches stay from the first step on",
    ),
    "23-25": ("2.15", "the buffers of stages, as in 20-33: TP x PP and DDP x PP"),
}


def installed() -> str:
    """Returns which PyTorch is here, such as "2.14"."""
    return ".".join(metadata.version("torch").split(".")[:2])


def reason(cell: str, torch: str) -> str | None:
    """Returns why the output of a cell is not that of this PyTorch; None if it is."""
    since, why = SINCE.get(cell, ("0.0", ""))
    return why if _number(torch) < _number(since) else None


def note(torch: str) -> str | None:
    """Returns a line about this PyTorch; None if the outputs were stored with it."""
    if torch == STORED_WITH:
        return None
    line = f"PyTorch {torch}; the outputs are those of {STORED_WITH}"
    if _number(torch) > _number(STORED_WITH):
        return f"{line}, and nothing newer was tested: a difference may be PyTorch's"
    cells = sorted(cell for cell in SINCE if reason(cell, torch))
    return f"{line}. Run and not compared: {', '.join(cells) or 'nothing'}"


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
