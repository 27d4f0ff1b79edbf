"""`torch.compile`: refused, or the program runs as it is, uncompiled.

What it would make are kernels for a GPU that is not there. A module is refused at once;
a function when it is called, because packages decorate functions that nobody calls.
Uncompiled means: `torch.compile` gives back the very module or function, as PyTorch
does with `disable=True`, so there is no `_orig_mod`. Leaves out: the time and memory
that compiling would save; the figures are those of eager PyTorch. A dry run may count
them, see `_dry/fusing.py`.
"""

import functools
import os
import sys

from torch import nn

from simgpu import _runtime as state
from simgpu._errors import NotSimulated

_ADVICE = (
    "It makes kernels for a GPU that is not there. --no-compile, or "
    'simgpu.start(compile="eager"), runs the program uncompiled: the same values.'
)
_DRY_ADVICE = (
    "It makes kernels for a GPU that is not there. --compile fuse counts what it would "
    "fuse, --compile eager runs the program uncompiled."
)
_SAYS = "simgpu: torch.compile gives back what it is given: all runs uncompiled"
_SWITCHES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")  # PyTorch's own
_FLEX = "_flex_attention_hop_wrapper"
_told = False


def compile(model=None, *, disable: bool = False, **options):
    """`torch.compile`, as a function and as a decorator with or without arguments."""
    if model is None:
        return functools.partial(compile, disable=disable, **options)
    if disable or any(os.environ.get(name) == "1" for name in _SWITCHES):
        return model
    if getattr(model, "__name__", "") == _FLEX:  # what runs it uncompiled
        return model
    how = state.current().request.compile
    if how == "fuse":
        return state.current().dry.compiled(model)
    if how == "eager":
        _tell()
        return model
    advice = _ADVICE if state.current().dry is None else _DRY_ADVICE
    if isinstance(getattr(model, "__self__", model), nn.Module):
        raise NotSimulated("torch.compile", advice)

    @functools.wraps(model)
    def refused(*args, **kwargs):
        if state.running is None:
            return model(*args, **kwargs)
        raise NotSimulated(f"torch.compile of {model.__qualname__}", advice)

    return refused


def _tell() -> None:
    """Say once in a job that nothing is compiled."""
    global _told
    if not _told and os.environ.get("RANK", "0") == "0":
        print(_SAYS, file=sys.stderr, flush=True)
    _told = True
