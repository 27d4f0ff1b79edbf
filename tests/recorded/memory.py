"""Recorded memory beside the model's: traces of the allocator, and peaks of steps."""

from typing import NamedTuple

from tests.recorded.allocator import agreeing_steps, placed_blocks
from tests.recorded.comparison import Omission
from tests.recorded.files import Recording


class Replayed(NamedTuple):
    """A trace of the allocator, replayed."""

    name: str
    placed: int  # blocks that the model puts where the card's allocator did
    blocks: int
    reserved_error: int = 0  # bytes after the last event that the model has too many


class Peak(NamedTuple):
    """Bytes at the peak of a step."""

    what: str
    predicted: int
    recorded: int


def compare(
    recording: Recording,
) -> tuple[list[Replayed], list[Peak], list[Omission]]:
    """What a recording of the allocator or of peaks comes to."""
    return COMPARE[recording.kind](recording)


def _programs(recording: Recording):
    """What `tests/record_on_gpu.py` recorded: random programs and steps of training."""
    replayed, omitted = [], []
    for row in recording.data["rows"]:
        try:
            judge = agreeing_steps if "steps" in row else placed_blocks
            right, of, faults = judge(row)
        except (KeyError, TypeError, ValueError) as error:
            omitted.append(Omission(recording.kind, str(row)[:80], repr(error)))
            continue
        off = "" if not faults else f"; {faults[0]}"
        replayed.append(Replayed(f"{row['name']}{off}", right, of))
    return replayed, [], omitted


COMPARE = {"allocator": _programs}
