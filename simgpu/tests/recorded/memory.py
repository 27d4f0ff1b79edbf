"""Recorded memory beside the model's: traces of the allocator, and peaks of steps."""

from typing import NamedTuple

from recorded.allocator import agreeing_steps, placed_blocks
from recorded.comparison import Omission
from recorded.files import Recording
from recorded.replay import replay
from recorded.step import predict


class Replayed(NamedTuple):
    """A trace of the allocator, replayed."""

    name: str
    placed: int  # blocks that the model puts where the card's allocator did
    blocks: int
    reserved_error: int = 0  # bytes after the last event that the model has too many


class Peak(NamedTuple):
    """What a step took: bytes at its peak, or how often it allocated."""

    what: str
    predicted: int
    recorded: int


def compare(
    recording: Recording,
) -> tuple[list[Replayed], list[Peak], list[Omission]]:
    """What a recording of the allocator or of peaks comes to."""
    return COMPARE[recording.kind](recording)


def _programs(recording: Recording):
    """Random programs and steps, as `recorded/allocator.py` records them."""
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


def _trace(recording: Recording):
    """Events of a real allocator."""
    try:
        placed, blocks, too_many = replay(recording.data)
    except (KeyError, TypeError, ValueError) as error:
        return [], [], [Omission(recording.kind, recording.name, str(error))]
    return [Replayed(recording.name, placed, blocks, too_many)], [], []


def _peaks(recording: Recording):
    """[tokens, kind, allocations, rise, peak allocated, ...] of a step of training."""
    peaks, omitted = [], []
    for row in recording.data["rows"]:
        try:
            tokens, kind, allocations, rise, peak, reserved, *_ = row
            ours = predict(kind, tokens)
        except (TypeError, ValueError) as error:
            omitted.append(Omission(recording.kind, str(row), str(error)))
            continue
        what = f"{kind}, {tokens} tokens"
        peaks.append(Peak(f"allocations of {what}", ours.allocations, allocations))
        peaks.append(Peak(f"bytes above the start of {what}", ours.rise, rise))
        peaks.append(Peak(f"peak bytes of {what}", ours.peak, peak))
        peaks.append(Peak(f"segments of {what}, bytes", ours.reserved, reserved))
    return [], peaks, omitted


COMPARE = {"allocator": _programs, "alloc": _trace, "training_memory": _peaks}
