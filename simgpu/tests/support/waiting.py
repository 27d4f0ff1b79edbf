"""What the tests wait with; a rank may import it, so it imports next to nothing."""

import time
from collections.abc import Callable

from support.limits import JOB


def wait(
    condition: Callable, what: str, seconds: float = JOB, words: Callable = str
) -> object:
    """Wait until `condition()`, and return it; `words()` are for the error."""
    late = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < late, f"{what} has not come. {words()}"
        time.sleep(0.02)
    return found
