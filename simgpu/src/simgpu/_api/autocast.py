"""`torch.autocast("cuda")` on simulated GPUs.

Models: CUDA's lists of operations (`autocast_lists.py`), its cache of weights that were
cast, and that only tensors on a GPU are cast. PyTorch's dispatcher does the rest: while
autocast is enabled, each of these operations goes to its kernel for AutocastCUDA, which
is ours while GPUs are simulated. This is above autograd, where no mode can be. Leaves
out: that `autocast("cpu")` does not cast tensors of GPUs (here it does).
"""

import functools
import warnings
import weakref

import torch

from simgpu import _runtime as state
from simgpu._api.autocast_lists import (
    FLOAT32,
    FLOAT32_BESIDE,
    FLOAT32_NORMS,
    FLOAT32_RESULT,
    LOWER_PRECISION,
    OF_CUDNN,
    RECURRENT,
    REFUSED,
    WIDEST,
)
from simgpu._compat import (
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    include_dispatch_key,
    registrations,
)
from simgpu._dispatch.placement import gpu_of

_KEY = DispatchKey.AutocastCUDA
_OFF = DispatchKeySet(_KEY)
_raw_set_enabled = torch.set_autocast_enabled
_raw_clear_cache = torch.clear_autocast_cache


def _lower() -> torch.dtype:
    return torch.get_autocast_dtype("cuda")


def _is_eligible(value) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and gpu_of(value) is not None
    )


def _cast(value, dtype: torch.dtype):
    """`value`, with the GPU tensors in it as `dtype`; weights are cast only once."""
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype) for item in value]
    if not _is_eligible(value) or value.dtype is dtype:
        return value
    is_weight = value.requires_grad and value.is_leaf and not value._is_view()
    lowers = value.dtype is torch.float32 and dtype is _lower()
    if not (is_weight and lowers and torch.is_autocast_cache_enabled()):
        return value.to(dtype)
    if torch.is_inference_mode_enabled():
        return value.to(dtype)
    cache = state.current().autocast_cache
    known = cache.get(id(value))
    if known is None or known[0]() is not value:
        with torch.enable_grad():  # who uses it next may need its gradient
            known = cache[id(value)] = (weakref.ref(value), value.to(dtype))
    return known[1]


def _tensors(values) -> list[torch.Tensor]:
    found = []
    for value in values:
        found += _tensors(value) if isinstance(value, (list, tuple)) else [value]
    return [value for value in found if _is_eligible(value)]


# -- the kernels -----------------------------------------------------------------------


def _in_lower_precision(func, args, kwargs):
    dtype = _lower()
    kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
    return func(*_cast(args, dtype), **kwargs)


def _in_float32(func, args, kwargs):
    kwargs = {name: _cast(value, torch.float32) for name, value in kwargs.items()}
    return func(*_cast(args, torch.float32), **kwargs)


def _with_float32_result(func, args, kwargs):
    if not _is_eligible(args[0]):
        return func(*args, **kwargs)
    place = [argument.name for argument in func._schema.arguments].index("dtype")
    if place < len(args):
        args = [*args]
        args[place] = args[place] or torch.float32
    elif kwargs.get("dtype") is None:
        kwargs = {**kwargs, "dtype": torch.float32}
    return func(*args, **kwargs)


def _norm_in_float32(func, args, kwargs):
    if not _is_eligible(args[0]):
        return func(*args, **kwargs)
    if func is torch.ops.aten.norm.Scalar:
        power = args[1] if len(args) > 1 else kwargs.get("p", 2)
        wider = torch.ops.aten.norm.ScalarOpt_dtype
        return wider(args[0], power, dtype=torch.float32)
    wider = torch.ops.aten.norm.ScalarOpt_dim_dtype
    return wider(*args, **kwargs, dtype=torch.float32)


def _in_the_widest(func, args, kwargs):
    types = {tensor.dtype for tensor in _tensors(args)}
    if types - {torch.float32, _lower()}:
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    dtype = torch.float32 if torch.float32 in types else _lower()
    kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
    return func(*_cast(args, dtype), **kwargs)


def _refuse(func, args, kwargs):
    if not _tensors(args):
        return func(*args, **kwargs)
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to "
        "autocast. Leave the sigmoid out and use binary_cross_entropy_with_logits or "
        "torch.nn.BCEWithLogitsLoss, which are safe."
    )


_KERNELS = {
    _in_lower_precision: (*LOWER_PRECISION, *OF_CUDNN, *RECURRENT),
    _in_float32: (*FLOAT32, *FLOAT32_BESIDE),
    _with_float32_result: FLOAT32_RESULT,
    _norm_in_float32: FLOAT32_NORMS,
    _in_the_widest: WIDEST,
    _refuse: REFUSED,
}


def _kernel(policy, func):
    @functools.wraps(policy)
    def run(*args, **kwargs):
        __tracebackhide__ = True
        with ExcludeDispatchKeyGuard(_OFF):
            return policy(func, args, kwargs)

    return run


def _register() -> torch.library.Library:
    """Put our kernels in the place of PyTorch's for AutocastCUDA."""
    library = torch.library.Library("aten", "IMPL")
    theirs = registrations(_KEY.name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that PyTorch's own are replaced
        for policy, names in _KERNELS.items():
            for name in names:  # not every version of PyTorch lists every one
                if f"aten::{name}" in theirs or name in RECURRENT:
                    packet, _, overload = name.partition(".")
                    func = getattr(torch.ops.aten, packet)
                    func = getattr(func, overload or "default")
                    library.impl(name, _kernel(policy, func), _KEY.name)
    return library


def for_lower_precision(values):
    """`values` as an operation in lower precision gets them in this thread."""
    return _cast(values, _lower()) if torch.is_autocast_enabled("cuda") else values


def without():
    """A block in which nothing is cast: the parts of an operation that was."""
    return ExcludeDispatchKeyGuard(_OFF)


# -- on and off ------------------------------------------------------------------------


def set_enabled(*args, **kwargs) -> None:
    """`torch.set_autocast_enabled`, also in its old form without a device."""
    _raw_set_enabled(*args, **kwargs)
    start()


def start() -> None:
    """Our kernels, if this thread has autocast enabled."""
    if torch.is_autocast_enabled("cuda"):
        runtime = state.current()
        with runtime.autocast_lock:
            if runtime.autocast_kernels is None:
                runtime.autocast_kernels = _register()
        include_dispatch_key(_KEY, True)


def clear_cache() -> None:
    """`torch.clear_autocast_cache`."""
    state.current().autocast_cache.clear()
    _raw_clear_cache()


def stop(runtime: state.Runtime) -> None:
    """PyTorch's own kernels again."""
    if runtime.autocast_kernels is not None:
        runtime.autocast_kernels._destroy()
        runtime.autocast_kernels = None
        include_dispatch_key(_KEY, False)
    runtime.autocast_cache.clear()
