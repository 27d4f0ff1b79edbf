"""What went wrong in which rank, in words that say what to do.

A rank that raises describes its error as plain data (`describe`). A rank that hangs has
its stack written by faulthandler (`parse_stack`). `failure_report` makes one text of
all, with the program's own lines only.
"""

import os
import re
import traceback
from pathlib import Path
from typing import NamedTuple

from simgpu import _frames as frames

frames.add_foreign(Path(__file__).parents[1])  # the course's own files

_LOST_CONNECTION = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe",
)  # fmt: skip
_PERHAPS_LOST_CONNECTION = (
    *_LOST_CONNECTION, "imeout", "imed out", "pair closure", "monitoredBarrier",
)  # fmt: skip
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")
MOST_LINES = 8  # of a stack; a recursion without end has a thousand
# a line that is there to its end: faulthandler may be in the middle of writing one
_STACK_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)\n', re.MULTILINE)
_ESCAPED = re.compile(r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8}")


class RankError(RuntimeError):
    """What went wrong in which rank."""

    __module__ = "simgpu._ranks"  # the name that a script's traceback shows

    def _render_traceback_(self) -> list[str]:
        """IPython shows this: the notebook's own stack says nothing about a rank."""
        return [f"RankError: {self}"]


class Frame(NamedTuple):
    """One entry of a stack."""

    file: str
    line: int
    function: str


class Failure(NamedTuple):
    """An error that a rank raised; stacks are outermost first."""

    message: str
    stack: list[Frame]


def describe(error: BaseException) -> Failure:
    """An error as plain data, in the rank that raised it."""
    if isinstance(error, SyntaxError) and error.filename:
        where = Frame(error.filename, error.lineno, "<module>")
        return Failure(f"{type(error).__name__}: {error.msg}", [where])
    stack = [
        Frame(entry.filename, entry.lineno, entry.name)
        for entry in traceback.extract_tb(error.__traceback__)
    ]
    return Failure("".join(traceback.format_exception_only(error)).strip(), stack)


def parse_stack(dump: str) -> list[Frame]:
    """The complete lines of a stack as faulthandler writes it, outermost first."""
    text = _ESCAPED.sub(lambda code: chr(int(code[0][2:], 16)), dump)  # it is ASCII
    found = [
        Frame(file, int(line), function)
        for file, line, function in _STACK_LINE.findall(text)
    ]
    return found[::-1]


def failure_report(
    ended: dict[int, str], hanging: dict[int, list[Frame]], failed: dict[int, Failure]
) -> str:
    """What went wrong, one paragraph for all ranks with the same trouble.

    Args:
        ended: rank -> how its process ended.
        hanging: rank -> where it is, for those that have not answered.
        failed: rank -> its error.

    Returns:
        The empty string if nothing went wrong.
    """
    troubles = {rank: f"the process {how}" for rank, how in ended.items()}
    for rank, stack in hanging.items():
        where = _program_lines(stack) or " in code of its own"
        troubles[rank] = f"did not finish; waiting{where}"
    for rank, failure in failed.items():
        # a collective on simulated GPUs begins with the rank that waits in it
        message = failure.message.replace(f"Error: rank {rank}: ", "Error: ", 1)
        if ended and any(words in message for words in _LOST_CONNECTION):
            message = "lost another rank"
        troubles[rank] = message + _program_lines(failure.stack)
    ranks_with: dict[str, list[int]] = {}
    for rank, trouble in sorted(troubles.items()):
        ranks_with.setdefault(trouble, []).append(rank)
    return "\n".join(f"{_names(r)}: {trouble}" for trouble, r in ranks_with.items())


def may_have_lost_connections(report: str) -> bool:
    """Whether the ranks may be unable to talk from now on, to judge by a report."""
    return any(words in report for words in _PERHAPS_LOST_CONNECTION)


def _names(ranks: list[int]) -> str:
    """ "rank 1", "ranks 0, 2, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _without_comprehensions(stack: list[Frame]) -> list[Frame]:
    """A stack as Python 3.12 has it: a comprehension is a line of its function."""
    found: list[Frame] = []
    for frame in stack:
        if found and frame.function in _COMPREHENSIONS:
            found[-1] = found[-1]._replace(line=frame.line)
        else:
            found.append(frame)
    return found


def _program_lines(stack: list[Frame]) -> str:
    """The program's own lines of a stack, outermost first."""
    lines = []
    for file, line, function in _without_comprehensions(stack):
        if frames.is_program_code(file):
            inside = "" if function == "<module>" else f", in {function}"
            code = frames.text(file, line)
            # a file from here has the same name on every machine
            name = frames.shown(file).removeprefix(os.getcwd() + os.sep)
            lines.append(f"\n  {name}, line {line}{inside}: {code}")
    if len(lines) > MOST_LINES:
        lines[3:-3] = [f"\n  ... {len(lines) - 6} more"]
    return "".join(lines)
