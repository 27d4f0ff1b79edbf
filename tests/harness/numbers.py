"""Numbers computed in floating point, compared to their last printed place.

Which sum a processor makes first is its own affair, so the last digit of a loss may
differ by one between two machines, or between one thread and two. A cell tagged
`floating-point` prints such numbers; whatever else it prints is compared exactly, as
everything is in all other cells.

Leaves out: numbers without a decimal point, which are counts and bytes, those before a
unit of bytes or of time, which the simulator counts, and those with fewer than three
significant digits, of which one is too much to give away.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal

TAG = "floating-point"
DIGITS = 3  # that a number needs to be compared to its last printed place
_NUMBER = re.compile(
    r"(?<![\w.])(-?\d+\.\d+(?:e[+-]?\d+)?)(?![\d.e])"
    r"(?!\s*(?:[KMGT]?i?B|bytes|[nµm]?s|a)\b)"  # a: activations of lesson 19
)


def outputs_as_stored(fresh: list, stored: list) -> list:
    """Returns the outputs of a cell, with the stored numbers where near enough."""
    fresh, then = copy.deepcopy(fresh), defaultdict(list)
    for kind, place, key in texts(stored):
        then[kind].append(place[key])
    for kind, place, key in texts(fresh):
        if then[kind]:
            place[key] = as_stored(place[key], then[kind].pop(0))
    return fresh


def texts(outputs: list) -> Iterator[tuple[str, dict, str]]:
    """Yields the kind of each text, and where it stands."""
    for output in outputs:
        if output.output_type == "stream":
            yield output.name, output, "text"
        for mime, value in output.get("data", {}).items():
            if isinstance(value, str):
                yield mime, output.data, mime


def as_stored(fresh: str, stored: str) -> str:
    """Returns what was printed, with the stored numbers where these are near enough.

    Args:
        fresh: what a cell prints now.
        stored: what it printed when its outputs were stored.
    """
    now, then = _NUMBER.split(fresh), _NUMBER.split(stored)
    if now[::2] != then[::2]:  # the words between
        return fresh
    now[1::2] = map(_nearest, now[1::2], then[1::2])
    return "".join(now)


def _nearest(now: str, then: str) -> str:
    new, old = Decimal(now), Decimal(then)
    place = old.as_tuple().exponent
    if len(old.as_tuple().digits) < DIGITS or new.as_tuple().exponent != place:
        return now
    return then if abs(new - old) <= Decimal(1).scaleb(place) else now
