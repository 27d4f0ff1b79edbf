"""The report of a race: PyTorch's text with the program's lines alone; or short."""

import os
import traceback
from pathlib import Path

import torch

from simgpu import _frames as frames
from simgpu._compat import AccessType, CUDASanitizerErrors

_TORCH = str(Path(torch.__file__).parent)
_STREAMS = 1000  # the name of a stream: of its GPU, and so many times its number


class RaceError(CUDASanitizerErrors):
    """Two streams use the same memory, and nothing puts them in order.

    PyTorch's own error, with the whole report.
    """

    def __init__(self, errors):
        super().__init__(errors)
        for error in errors:
            for access in (error.current_access, error.previous_access):
                access.stack_trace = lines_of_program(access.stack_trace)

    def __str__(self):
        return "\n".join(map(str, self.errors))


RaceError.__module__ = "simgpu"  # under this name it is known


def lines_of_program(stack) -> traceback.StackSummary:
    """A stack without the lines of Python's and PyTorch's own files."""
    kept = [frame for frame in stack if not _is_foreign(frame.filename)]
    return traceback.StackSummary.from_list(
        [
            (
                frames.shown(frame.filename),
                frame.lineno,
                frame.name,
                frames.text(frame.filename, frame.lineno),
            )
            for frame in kept or stack[-1:]
        ]
    )


def _is_foreign(filename: str) -> bool:
    return not frames.is_program_code(filename) or filename.startswith(_TORCH)


# -- short -----------------------------------------------------------------------------


def stream_name(gpu: int, number: int) -> int:
    """A stream's name for the sanitizer: unlike CUDA's, its own on each GPU."""
    return gpu + _STREAMS * number


def place(error) -> tuple:
    """The two lines of the program that race, whichever comes first."""
    accesses = (error.previous_access, error.current_access)
    lines = [lines_of_program(access.stack_trace)[-1] for access in accesses]
    return tuple(sorted((line.filename, line.lineno) for line in lines))


def warning(error) -> str:
    """A race in a few lines: what, where, on which streams, and what to do."""
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    current, previous = error.current_access, error.previous_access
    return "\n".join(
        (
            f"simgpu: {rank}a race: two streams of cuda:{current.stream % _STREAMS} "
            "use the same memory in no order",
            _line(previous),
            _line(current),
            "  Let one stream wait for the other in between: one.wait_stream(other).",
            "  The program goes on with the right values; a real GPU may not have "
            "them. (races: raise, warn, show or off)",
        )
    )


def _line(access) -> str:
    line = lines_of_program(access.stack_trace)[-1]
    number = access.stream // _STREAMS
    stream = f"stream {number}" if number else "the default stream"
    verb = "writes" if access.type is AccessType.WRITE else "reads"
    name = line.filename.replace("\\", "/").rpartition("/")[2]
    operation = access.operator.split("(")[0].removeprefix("aten::")
    return f"    {name}:{line.lineno} {verb} it on {stream} ({operation}): {line.line}"
