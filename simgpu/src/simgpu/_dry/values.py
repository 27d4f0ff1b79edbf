"""Which tensors of a dry run have values, and what the others look like.

A tensor has values ("known") if it is small and comes of known ones: token ids,
counters, random states, pickled objects, shapes that ranks exchange. Every other one is
"unknown": it has a shape, a type, a device and a block of memory. The mark is its
storage's, so that views share it.
"""

import mmap
import sys
from typing import Any, NamedTuple

import torch

from simgpu._compat import DisableTorchDispatch, DisableTorchFunction
from simgpu._dispatch.named_devices import META
from simgpu._dispatch.placement import over, storage_of, tensors_in
from simgpu._errors import NotSimulated

SMALL = 2**20  # bytes up to which values are computed, and travel between ranks
_ZEROED = 2**13  # bytes of results without values that are zeros
_REUSED = 2**25  # up to which malloc may give memory that was used before (glibc)
_PROMISED = 2**30  # from which on the system may refuse memory that it does not have
_NO_RESERVE = 0  # of mmap: memory that the machine need not have
if sys.platform == "linux":
    _NO_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
_SMALL_FLOATS = 2**10  # of floating-point numbers on a GPU: scales, rates, counts
_SMALL_WHOLE = 2**26  # of whole numbers: token ids, indices, offsets


def is_unknown(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values."""
    try:
        return getattr(storage_of(tensor), "_simgpu_unknown", None) is not None
    except (NotImplementedError, RuntimeError):  # it has no storage: sparse
        return False


def forget(tensor: torch.Tensor, assumed: object = None) -> torch.Tensor:
    """From now on a tensor has no values.

    Args:
        tensor: of which all of its storage is meant.
        assumed: what a read of it gives; None: whatever is plausible for its type.
    """
    storage_of(tensor)._simgpu_unknown = _Unknown(assumed)
    return tensor


def know(tensor: torch.Tensor) -> None:
    """All of a tensor's storage has been given values."""
    storage = storage_of(tensor)
    if hasattr(storage, "_simgpu_unknown") and tensor.nbytes == storage.nbytes():
        del storage._simgpu_unknown


def assumed_of(tensor: torch.Tensor) -> object:
    """What each element of an unknown tensor reads as, if an answer says so."""
    mark = getattr(storage_of(tensor), "_simgpu_unknown", None)
    return None if mark is None else mark.assumed


class _Unknown(NamedTuple):
    """The mark of a storage without values."""

    assumed: object


def read(tensor: torch.Tensor) -> Any:
    """What the host gets that reads one unknown value: finite, and no alarm."""
    mark = storage_of(tensor)._simgpu_unknown
    if mark.assumed is not None:
        return mark.assumed
    if tensor.dtype is torch.bool:
        return True
    if tensor.dtype.is_complex:
        return 1 + 0j
    return 1.0 if tensor.dtype.is_floating_point else 1


def make_plausible(tensor: torch.Tensor) -> Any:
    """Write into an unknown host tensor what a read of it gives: nobody meets a NaN.

    Returns:
        That value; zero for a large one, of whose memory nobody has touched a page.
    """
    with DisableTorchFunction(), DisableTorchDispatch(), torch.no_grad():
        value = read(tensor)
        if storage_of(tensor).nbytes() > _REUSED:
            return type(value)(0)
        tensor.detach().fill_(value)
    return value


def fits(nbytes: int, dtype: torch.dtype, on_host: bool) -> bool:
    """Whether a tensor of so many bytes is small enough to have values."""
    whole = not (dtype.is_floating_point or dtype.is_complex)
    if whole:
        return nbytes <= _SMALL_WHOLE
    return nbytes <= (SMALL if on_host else _SMALL_FLOATS)


# -- the shapes of results -------------------------------------------------------------


class _Part(NamedTuple):
    """A tensor among results."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        if 0 in self.shape:
            return 0
        last = sum(
            (n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)
        )
        return (last + 1) * self.dtype.itemsize


class Result(NamedTuple):
    """The results of an operation: `_Part` for each tensor, all else as it is."""

    kind: type  # torch.Tensor, tuple or list
    parts: list

    def tensors(self) -> list[_Part]:
        return [part for part in self.parts if type(part) is _Part]

    @property
    def is_huge(self) -> bool:
        """Whether the system may refuse the memory of one."""
        return any(part.nbytes > _PROMISED for part in self.tensors())

    def made(self):
        """New tensors of these shapes, without values."""
        made = [_without_values(p) if type(p) is _Part else p for p in self.parts]
        return made[0] if self.kind is torch.Tensor else self.kind(made)


_MOST_KNOWN = 100_000
_known: dict[tuple, Result | None] = {}


def result_of(func, args, kwargs) -> Result | None:
    """What an operation would return; None where PyTorch has no code to tell.

    Raises:
        NotSimulated: if the shape depends on values.
    """
    try:
        key = (func, torch.get_default_dtype(), described(args), described(kwargs))
        if key in _known:
            return _known[key]
    except TypeError:  # something that cannot be looked up by
        key = None
    args, kwargs = on_meta(args), on_meta(kwargs)
    kwargs.pop("generator", None)
    if kwargs.get("device") is not None:
        kwargs["device"] = META
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    try:
        out = func(*args, **kwargs)
    except NotImplementedError:
        found = None
    else:
        found = _result(out)
    if key is not None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = found
    return found


def described(value):
    """What a shape may depend on of an argument, as something to look up by."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.layout
    if isinstance(value, (list, tuple)):
        return tuple(map(described, value))
    if isinstance(value, dict):
        return tuple((name, described(item)) for name, item in value.items())
    hash(value)
    return type(value), value  # 1, 1.0 and True are equal


def on_meta(value):
    """The same with tensors that have a shape alone."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise NotSimulated(f"a {value.layout} tensor in a dry run")
        if value.is_meta:
            return value
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=META
        )
    if isinstance(value, (list, tuple)):
        return type(value)(map(on_meta, value))
    if isinstance(value, dict):
        return {name: on_meta(item) for name, item in value.items()}
    return value


def _result(out) -> Result:
    parts = [out] if isinstance(out, torch.Tensor) else out
    if not isinstance(parts, (list, tuple)):
        parts = [parts]
    return Result(
        type(out) if isinstance(out, (list, tuple)) else torch.Tensor,
        [
            _Part(tuple(p.shape), tuple(p.stride()), p.dtype)
            if isinstance(p, torch.Tensor)
            else p
            for p in parts
        ],
    )


def _without_values(part: _Part) -> torch.Tensor:
    """A tensor in memory that nobody touches; a small one is zeros."""
    try:
        made = torch.empty_strided(part.shape, part.strides, dtype=part.dtype)
    except RuntimeError:  # Linux refuses at once what is more than the machine has, ...
        if not _NO_RESERVE:
            raise
        # ... unless it is asked not to keep any for it; this cannot be resized
        memory = mmap.mmap(-1, part.nbytes, flags=_NO_RESERVE)
        storage = storage_of(torch.frombuffer(memory, dtype=torch.uint8))
        return forget(over(storage, part.dtype, 0, part.shape, part.strides))
    if part.nbytes <= _ZEROED:
        made.zero_()
    return forget(made)


def tensors_of(args, kwargs) -> list[torch.Tensor]:
    """The tensors among arguments."""
    found = tensors_in(args)
    return found + tensors_in(kwargs.values()) if kwargs else found
