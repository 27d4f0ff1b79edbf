"""Where a warning of PyTorch points: the program's line, and not the simulator's.

Python names the frame that calls into C++, or that called the function that warns; here
that is one of the simulator's. Such a warning is given again for the frame behind, by
whose file and line Python also decides whether it was shown before. Nothing is done
until something warns.
"""

import sys
import warnings
from pathlib import Path

import torch

from simgpu._api.patch import Patch, patches
from simgpu._compat import torch_compile, torch_ops

_SIMULATOR = str(Path(__file__).parent.parent)
_MACHINERY = {
    torch_ops.__file__,
    torch_compile.__file__,
    str(Path(torch.__file__).parent / "_dynamo" / "eval_frame.py"),
}
_raw_show = warnings._showwarnmsg


def show(message: warnings.WarningMessage) -> None:
    """What Python calls for a warning that no filter has stopped."""
    if not message.filename.startswith(_SIMULATOR):
        return _raw_show(message)
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != message.filename:
        frame = frame.f_back
    if frame is not None:  # each is to come here: it is not to be remembered as shown
        frame.f_globals["__warningregistry__"] = None
    frame = _behind(frame)
    if frame is None:
        return _raw_show(message)
    warnings.warn_explicit(
        message.message,
        message.category,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
        source=message.source,
    )


def _behind(frame):
    """The frame that would be named without the simulator and PyTorch's overrides.

    Where a function of Python's was sent through `torch.overrides`, that is the frame
    that has called it, and not the function's own.
    """
    overridden = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file == torch.overrides.__file__:
            overridden = True
        elif not file.startswith(_SIMULATOR) and file not in _MACHINERY:
            return frame.f_back if overridden else frame
        frame = frame.f_back
    return None


def rows() -> list[Patch]:
    """Their part of the table of replacements."""
    return patches(warnings, "it would name a line of the simulator", _showwarnmsg=show)
