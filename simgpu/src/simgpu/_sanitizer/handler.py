"""PyTorch's `EventHandler`, which notes the program's own lines of each stack alone.

It would extract the whole stack of every kernel, which takes longer than all else that
the simulator does.
"""

import traceback
from functools import cache
from types import FunctionType, SimpleNamespace

from simgpu._frames import is_program_code


def _lines(frame, lookup_lines: bool) -> list[traceback.FrameSummary]:
    """The lines of the program in a stack, the last call first."""
    found, last = [], frame
    while frame is not None:
        if is_program_code(frame.f_code.co_filename):
            found.append(_summary(frame))
        last, frame = frame, frame.f_back
    return found or [_summary(last)]


def program_stack(frame) -> list[traceback.FrameSummary]:
    """The same with the last call last, as a traceback has it."""
    return _lines(frame, False)[::-1]


def _summary(frame) -> traceback.FrameSummary:
    code = frame.f_code
    return traceback.FrameSummary(
        code.co_filename, frame.f_lineno, code.co_name, lookup_line=False
    )


_STACKS = SimpleNamespace(
    walk_stack=lambda frame: frame, StackSummary=SimpleNamespace(extract=_lines)
)


@cache
def _handler_class() -> type:
    from simgpu._compat import EventHandler

    raw = EventHandler._handle_kernel_launch
    names = {**raw.__globals__, "traceback": _STACKS}

    class Handler(EventHandler):
        _handle_kernel_launch = FunctionType(raw.__code__, names, raw.__name__)

    return Handler


def new_handler():
    """A handler that knows of no access yet."""
    return _handler_class()()
