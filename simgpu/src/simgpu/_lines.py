"""Lines on stderr that come from one of several processes."""

import sys


def write_line(text: str) -> None:
    """Writes a line in one piece, as C++ does.

    torchrun's ranks run in `python -u`, where `print` writes a text and its end one
    after the other: the line of another rank may come between.
    """
    print(f"{text}\n", end="", file=sys.stderr, flush=True)
