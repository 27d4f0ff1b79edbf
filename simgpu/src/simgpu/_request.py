"""What `start()` can be asked for, checked. Nothing here needs PyTorch."""

from numbers import Integral
from typing import NamedTuple

from simgpu._device.cards import Card, find_card
from simgpu._device.sizes import parse_memory

MOST_GPUS = 64
RACES = ("raise", "show", "warn", "off")
COMPILE = ("fuse", "eager", "refuse")


class Request(NamedTuple):
    """What `start()` was asked for."""

    number: int  # of GPUs in the machine
    card: Card
    total_memory: int  # bytes of each
    races: str  # one of RACES
    overhead: bool = False  # whether CUDA and its libraries take memory, too
    compile: str = "fuse"  # one of COMPILE
    host: str = "bare"  # as `cost.launches` takes it


def check_request(
    number: int, card: str, memory: int | str | None, races: str = "raise",
    overhead: bool | None = None, compile: str = "fuse",
) -> Request:  # fmt: skip
    """What `start()` is asked for, as a `Request`.

    Raises:
        ValueError: for a number, card, memory or way that cannot be.
    """
    if races not in RACES:
        raise ValueError(f"races={races!r}; use one of {', '.join(RACES)}")
    if compile not in COMPILE:
        raise ValueError(f"compile={compile!r}; use one of {', '.join(COMPILE)}")
    if not isinstance(number, Integral) or isinstance(number, bool):
        raise ValueError(f"the number of GPUs must be a whole number, not {number!r}")
    if not 1 <= number <= MOST_GPUS:
        raise ValueError(f"{number} GPUs cannot be simulated; choose 1 to {MOST_GPUS}")
    found = find_card(card)
    total = found.total_memory if memory is None else parse_memory(memory)
    if total > found.total_memory:
        raise ValueError(f"a {card} does not have {memory} of memory")
    if overhead is None:
        overhead = memory is None
    return Request(number, found, total, races, overhead, compile)
