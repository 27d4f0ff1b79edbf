"""`torch.compile`: the same values, with fused kernels on the clock; or without these.

What it would make are kernels for a GPU that is not there. So operations run one by
one, and what it would fuse is counted as one kernel: see `_fusing`. With "eager" it
gives back the very module or function, as PyTorch does with `disable=True`; there is
no `_orig_mod` either way. With "refuse" a module is refused at once; a function when it
is called, because packages decorate functions that nobody calls. `flex_attention` is
fused wherever a program compiles it, or what calls it: `is_compiled()` says so.
"""

import functools
import os
import sys
import weakref
from types import CodeType, FrameType

from torch import nn

from simgpu import _runtime as state
from simgpu._compat import call_module
from simgpu._errors import NotSimulated
from simgpu._fusing import regions

_ADVICE = (
    'It makes kernels for a GPU that is not there. compile="fuse" counts what it would '
    'fuse, compile="eager" runs the program uncompiled: the same values.'
)
_SAYS = {
    "eager": "simgpu: torch.compile gives back what it is given: all runs uncompiled",
    "fuse": "simgpu: torch.compile: values are computed operation by operation, and "
    "timed as fused kernels (--no-compile: as without)",
}
_SWITCHES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")  # PyTorch's own
_FLEX = "_flex_attention_hop_wrapper"
_FLEX_MODULE = "torch.nn.attention.flex_attention"
_UNFUSED = "flex_attention_performance"  # PyTorch's warning about what is not compiled
_CALL_MODULE = call_module.__code__
_told = False
# what a program has compiled
_code: set[CodeType] = set()
_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def compile(model=None, *, disable: bool = False, **options):
    """`torch.compile`, as a function and as a decorator with or without arguments."""
    if model is None:
        return functools.partial(compile, disable=disable, **options)
    if disable or any(os.environ.get(name) == "1" for name in _SWITCHES):
        return model
    if getattr(model, "__name__", "") == _FLEX:  # what runs it uncompiled
        return model
    how = state.current().request.compile
    if how in ("fuse", "eager"):
        given, model = model, _noted(model)
        runtime = state.current()
        fuses = how == "fuse" and regions.begin(runtime)
        if runtime.dry is not None:
            runtime.dry.compiles = True
        elif model is given:
            _tell("fuse" if fuses else "eager")
        return regions.compiled(model) if fuses else model
    if isinstance(getattr(model, "__self__", model), nn.Module):
        raise NotSimulated("torch.compile", _ADVICE)

    @functools.wraps(model)
    def refused(*args, **kwargs):
        if state.running is None:
            return model(*args, **kwargs)
        raise NotSimulated(f"torch.compile of {model.__qualname__}", _ADVICE)

    return refused


def _tell(how: str) -> None:
    """Say once in a job what compiling is."""
    global _told
    if not _told and os.environ.get("RANK", "0") == "0":
        print(_SAYS[how], file=sys.stderr, flush=True)
    _told = True


# -- what is compiled ------------------------------------------------------------------


def is_compiled() -> bool:
    """Whether the code that asks is called by what the program has compiled."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _code:
            return True
        if frame.f_code is _CALL_MODULE and frame.f_locals["self"] in _modules:
            return True
        frame = frame.f_back
    return False


def _noted(model):
    """What is compiled, remembered; `flex_attention` itself as another function."""
    _hush()
    if isinstance(model, functools.partial):
        func = _noted(model.func)
        if func is model.func:
            return model
        return functools.partial(func, *model.args, **model.keywords)
    owner = getattr(model, "__self__", model)
    if isinstance(owner, nn.Module):
        _modules.add(owner)
        return model
    if getattr(model, "__module__", "") == _FLEX_MODULE:
        model = _apart(model)
    code = getattr(model, "__code__", None)  # of a method, its function's
    if code is not None:
        _code.add(code)
    return model


def _apart(function):
    """The same function, which is compiled when it is called by this name."""

    @functools.wraps(function)
    def compiled(*args, **kwargs):
        __tracebackhide__ = True
        return function(*args, **kwargs)

    return compiled


def _hush() -> None:
    """Compiled code is not told to compile `flex_attention`."""
    module = sys.modules.get(_FLEX_MODULE)
    warn = getattr(module, "_warn_once", None)
    if warn is None or hasattr(warn, "__wrapped__"):
        return

    @functools.wraps(warn)
    def warn_once(warning_id, *args, **kwargs):
        if warning_id != _UNFUSED or not is_compiled():
            warn(warning_id, *args, **kwargs)

    module._warn_once = warn_once
