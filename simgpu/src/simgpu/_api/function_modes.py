"""The stack of function modes as a program sees it: without the simulator's own.

PyTorch's `TestCase` counts the modes on the stack after each test, and takes off those
that it does not know. `torch.overrides` itself goes on to see all.
"""

from simgpu._compat import (
    function_modes,
    push_on_function_stack,
    raw_pop_function_stack,
)
from simgpu._dispatch.function_mode import FunctionMode

_push = push_on_function_stack


def length() -> int:
    """How many modes the program has entered."""
    stack = function_modes()
    return sum(not isinstance(mode, FunctionMode) for mode in stack)


def pop():
    """Take off the last mode that the program has entered.

    Raises:
        RuntimeError: if it has entered none.
    """
    if not length():
        raise RuntimeError("Attempted to pop from empty mode stack")
    ours = []
    while isinstance(mode := raw_pop_function_stack(), FunctionMode):
        ours.append(mode)
    for other in reversed(ours):
        _push(other)
    return mode
