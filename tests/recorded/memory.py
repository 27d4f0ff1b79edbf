"""Recorded memory beside the model's: traces of the allocator, and peaks of steps."""

from typing import NamedTuple

from tests.recorded import allocator
from tests.recorded.comparison import Omission
from tests.recorded.files import Recording


class Replayed(NamedTuple):
    """A trace of the allocator, replayed."""

    name: str
    placed: int  # blocks that the model puts where the card's allocator did
    blocks: int
    reserved_error: int  # bytes, after the last event


class Peak(NamedTuple):
    """Bytes at the peak of a step."""

    what: str
    predicted: int
    recorded: int
