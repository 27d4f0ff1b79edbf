"""The report of a race: PyTorch's text, with the lines of the program alone."""

import traceback
from functools import cache
from pathlib import Path

import torch

from simgpu import frames

_TORCH = str(Path(torch.__file__).parent)


@cache
def race_error() -> type[Exception]:
    """The error that is raised at a race: PyTorch's, with the whole report."""
    from torch.cuda._sanitizer import CUDASanitizerErrors

    class RaceError(CUDASanitizerErrors):
        """Two streams use the same memory, and nothing puts them in order."""

        def __init__(self, errors):
            super().__init__(errors)
            for error in errors:
                for access in (error.current_access, error.previous_access):
                    access.stack_trace = lines_of_program(access.stack_trace)

        def __str__(self):
            return "\n".join(map(str, self.errors))

    return RaceError


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
    return not frames.is_learners(filename) or filename.startswith(_TORCH)
