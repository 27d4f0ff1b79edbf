"""PyTorch's `EventHandler`, with a launch of a kernel that takes less time.

PyTorch's extracts the whole stack of every kernel, which takes longer than all else
that the simulator does; this one notes the program's own lines alone. PyTorch's makes
an `Access` for each piece of memory; here, those of an argument share one.
"""

import sys
import traceback
from functools import cache

from simgpu._frames import is_program_code


def program_stack(frame) -> list[traceback.FrameSummary]:
    """The lines of the program in a stack, the last call last, as in a traceback."""
    found, last = [], frame
    while frame is not None:
        if is_program_code(frame.f_code.co_filename):
            found.append(_summary(frame))
        last, frame = frame, frame.f_back
    return found[::-1] or [_summary(last)]


def _summary(frame) -> traceback.FrameSummary:
    code = frame.f_code
    return traceback.FrameSummary(
        code.co_filename, frame.f_lineno, code.co_name, lookup_line=False
    )


@cache
def _handler_class() -> type:
    from simgpu._compat import (
        Access,
        AccessType,
        EventHandler,
        UnsynchronizedAccessError,
    )

    class Handler(EventHandler):
        def launch(self, stream: int, operator: str, read: dict, written: dict,
                   new: bool) -> list:  # fmt: skip
            """What `_handle_kernel_launch` does: the accesses that race with earlier.

            A read takes the place of the stream's read before it, as what follows the
            one follows the other.

            Args:
                stream: its name.
                operator: the schema of the operation.
                read, written: first address of a piece -> the arguments it is of, the
                    same list for all pieces that have the same ones.
                new: whether the writes are to outputs that did not exist before.
            """
            self.seq_num += 1
            self.syncs.update_seq_num(stream, self.seq_num)
            known = self.syncs.current_sync_states[stream]
            history = self.tensors_accessed.accesses
            stack = program_stack(sys._getframe(1))
            errors = []
            for kind, accessed in (
                (AccessType.READ, read),
                (AccessType.WRITE, written),
            ):
                is_write, access, names = kind is AccessType.WRITE, None, None
                for piece, arguments in accessed.items():
                    if not is_write and piece in written:
                        continue
                    if arguments is not names:
                        names = arguments
                        access = Access(kind, self.seq_num, stream, operator, names,
                                        is_write and new, stack)  # fmt: skip
                    info = history[piece]
                    others = info.reads
                    if others:
                        others = [r for r in others if r.stream != stream]
                    for other in is_write and others or (info.write,):
                        if other and other.seq_num > known.get(other.stream, -1):
                            error = UnsynchronizedAccessError(
                                piece, info.allocation_stack_trace, access, other
                            )
                            errors.append(error)
                    if is_write:
                        info.write, info.reads = access, []
                    else:
                        info.reads = [*others, access]
            return errors

    return Handler


def new_handler():
    """A handler that knows of no access yet."""
    return _handler_class()()
