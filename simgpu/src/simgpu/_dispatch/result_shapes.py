"""What the results of an operation look like where nothing is computed.

PyTorch's own code for tensors on "meta" works out shapes, strides and types. Where it
says something else than a GPU does, a function here says it in its place. A dry run and
`simgpu.estimate` both ask here, and keep what they were told: it depends on shapes,
strides, types and plain arguments alone.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from simgpu._compat import suggest_memory_format

_MOST_KNOWN = 100_000
_aten = torch.ops.aten


class Part:
    """A tensor among results.

    Attributes:
        shape: of it.
        strides: of it, in elements.
        dtype: of its elements.
        nbytes: of a storage that holds it.
    """

    __slots__ = ("shape", "strides", "dtype", "nbytes")

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ):
        self.shape, self.strides, self.dtype = shape, strides, dtype
        last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        self.nbytes = 0 if 0 in shape else (last + 1) * dtype.itemsize


class Result(NamedTuple):
    """The results of an operation: a `Part` for each tensor, all else as it is."""

    kind: type  # torch.Tensor, tuple or list
    parts: list

    def tensors(self) -> list[Part]:
        return [part for part in self.parts if type(part) is Part]

    def made(self, make: Callable[[Part], torch.Tensor]):
        """The same with new tensors."""
        made = [make(part) if type(part) is Part else part for part in self.parts]
        return made[0] if self.kind is torch.Tensor else self.kind(made)


def result_of(out) -> Result:
    """The description of what an operation has returned."""
    several = isinstance(out, (list, tuple))
    return Result(
        type(out) if several else torch.Tensor,
        [
            Part(tuple(p.shape), tuple(p.stride()), p.dtype)
            if isinstance(p, torch.Tensor)
            else p
            for p in (out if several else [out])
        ],
    )


class Known(dict[tuple, Result | None]):
    """Results that were worked out before, by what `key_of` gives."""

    def keep(self, key: tuple, result: Result | None) -> None:
        if len(self) >= _MOST_KNOWN:
            self.clear()
        self[key] = result


def key_of(func, args, kwargs) -> tuple:
    """All that the shapes of a result depend on.

    Raises:
        TypeError: if there is something that cannot be looked up by.
    """
    return func, torch.get_default_dtype(), _described(args), _described(kwargs)


def _described(value):
    """What a shape may depend on of an argument, as something to look up by."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.layout
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    if isinstance(value, dict):
        return tuple((name, _described(item)) for name, item in value.items())
    hash(value)
    return type(value), value  # 1, 1.0 and True are equal


# -- what a GPU lays out in another way ------------------------------------------------


def as_on_gpu(func) -> Callable:
    """An operation, or what says on "meta" the shapes that a GPU's results have."""
    special = _AS_ON_GPU.get(func)
    return func if special is None else functools.partial(special, func)


def _convolve(func, x, weight, *args):
    return _laid_out(func(x, weight, *args), x, weight)


def _convolve_backward(func, gradient, x, weight, *args):
    results = func(gradient, x, weight, *args)
    return tuple(r if r is None else _laid_out(r, x, weight) for r in results)


def _laid_out(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor):
    """In channels_last if one of the two is: `cudnn_conv_suggest_memory_format`."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(out.dim())
    if last is None or last not in map(suggest_memory_format, (x, weight)):
        return out
    return torch.empty_like(out, memory_format=last)


def _normalize_batch(func, x, weight, bias, mean, variance, training, *args):
    """In evaluation it keeps nothing for backward."""
    out, *kept = func(x, weight, bias, mean, variance, training, *args)
    return out, *(kept if training else [tensor.new_empty(0) for tensor in kept])


def _normalize_batch_backward(func, *args):
    """Only the gradients that are asked for, which the last argument says."""
    results = zip(func(*args), args[-1], strict=True)
    return tuple(gradient if wanted else None for gradient, wanted in results)


# each function takes PyTorch's own and its arguments
_AS_ON_GPU = {
    _aten.convolution.default: _convolve,
    _aten.convolution_backward.default: _convolve_backward,
    _aten.native_batch_norm.default: _normalize_batch,
    _aten.native_batch_norm_backward.default: _normalize_batch_backward,
}
