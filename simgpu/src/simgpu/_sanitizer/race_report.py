"""The report of a race: PyTorch's text with the program's lines alone; or short."""

import os
import traceback
from pathlib import Path

import torch

from simgpu import _frames as frames
from simgpu._compat import AccessType, CUDASanitizerErrors

_TORCH = str(Path(torch.__file__).parent)
_STREAMS = 1000  # the name of a stream: of its GPU, and so many times its number
HOST = -1  # the name of the host among streams
_ADVICE = "Let one stream wait for the other in between: one.wait_stream(other)."
_WAIT = (
    "Let the host wait in between: event.synchronize() with an event that follows the "
    "copy, or torch.cuda.synchronize()."
)


class RaceError(CUDASanitizerErrors):
    """Two streams, or a stream and the host, use the same memory in no order.

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


class HostRace:
    """A race over memory of the host, which a copy uses that nobody has waited for.

    Its attributes are those of PyTorch's `UnsynchronizedAccessError`.
    """

    def __init__(self, data_ptr: int, current_access, previous_access):
        self.data_ptr = data_ptr
        self.current_access = current_access
        self.previous_access = previous_access

    def __str__(self):
        current, previous = self.current_access, self.previous_access
        return "\n".join(
            (
                "=" * 28,
                "simgpu detected a possible data race on host memory with data pointer "
                f"{self.data_ptr}",
                f"Access by {_user(current.stream)} during:",
                _in_full(current),
                f"Previous access by {_user(previous.stream)} during a copy with "
                "non_blocking=True:",
                _in_full(previous),
                _WAIT if current.stream == HOST else _ADVICE,
            )
        )


def _user(stream: int) -> str:
    return "the host" if stream == HOST else f"stream {stream}"


def _in_full(access) -> str:
    """An access as PyTorch's report has it."""
    arguments = " argument(s) " + ", ".join(access.aliases) if access.aliases else ""
    output = " the output" if access.is_output else ""
    lines = "".join(access.stack_trace.format())
    return (
        f"{access.operator}\n{access.type}{arguments}{output}\nWith stack trace:\n"
        f"{lines}"
    )


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
    gpu = f"cuda:{previous.stream % _STREAMS}"
    by_host = current.stream == HOST
    who = f"the host and a copy of {gpu}" if by_host else f"two streams of {gpu}"
    return "\n".join(
        (
            f"simgpu: {rank}a race: {who} use the same memory in no order",
            _line(previous),
            _line(current),
            f"  {_WAIT if by_host else _ADVICE}",
            "  The program goes on with the right values; a real GPU may not have "
            "them. (races: raise, warn, show or off)",
        )
    )


def _line(access) -> str:
    line = lines_of_program(access.stack_trace)[-1]
    number = access.stream // _STREAMS
    stream = f"stream {number}" if number else "the default stream"
    if access.stream == HOST:
        stream = "the host"
    verb = "writes" if access.type is AccessType.WRITE else "reads"
    name = line.filename.replace("\\", "/").rpartition("/")[2]
    operation = access.operator.split("(")[0].removeprefix("aten::")
    return f"    {name}:{line.lineno} {verb} it on {stream} ({operation}): {line.line}"
