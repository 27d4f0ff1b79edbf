"""Which tensors of a dry run have values, and what the others look like.

A tensor has values ("known") if it is small and comes of known ones: token ids,
counters, random states, pickled objects, shapes that ranks exchange. Every other one is
"unknown": it has a shape, a type, a device and a block of memory. The mark is its
storage's, so that views share it.
"""

import math
import mmap
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from simgpu._compat import DisableTorchDispatch, DisableTorchFunction, TensorBase
from simgpu._dispatch import result_shapes
from simgpu._dispatch.host_is_full import CANNOT_ALLOCATE
from simgpu._dispatch.named_devices import META
from simgpu._dispatch.placement import over, storage_of, tensors_in
from simgpu._dispatch.result_shapes import Known, Part, Result, as_on_gpu, key_of
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

_known = Known()
_NEW: Any = object()  # what is not known yet


def result_of(func, args, kwargs) -> Result | None:
    """What an operation would return; None where PyTorch has no code to tell.

    None, too, for what the program makes on "meta" itself, which PyTorch does at once.

    Raises:
        NotSimulated: if the shape depends on values.
    """
    if _is_on_meta(args, kwargs):
        return None
    try:
        key = key_of(func, args, kwargs)
        found = _known.get(key, _NEW)
        if found is not _NEW:
            return found
    except TypeError:  # something that cannot be looked up by
        key = None
    args, kwargs = on_meta(args), on_meta(kwargs)
    kwargs.pop("generator", None)
    if kwargs.get("device") is not None:
        kwargs["device"] = META
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    try:
        with torch.no_grad():
            found = result_shapes.result_of(as_on_gpu(func)(*args, **kwargs))
    except NotImplementedError:
        found = None
    if key is not None:
        _known.keep(key, found)
    return found


def _is_on_meta(args, kwargs) -> bool:
    """Whether a program asks for a tensor on "meta"."""
    if (device := kwargs.get("device")) is not None:
        return torch.device(device).type == "meta"
    return any(tensor.is_meta for tensor in tensors_in(args))


def is_huge(result: Result) -> bool:
    """Whether the system may refuse the memory of a tensor in it."""
    return any(part.nbytes > _PROMISED for part in result.tensors())


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


def new(part: Part) -> torch.Tensor:
    """A tensor in memory that nobody touches; a small one is zeros."""
    try:
        made = torch.empty_strided(part.shape, part.strides, dtype=part.dtype)
    except RuntimeError:  # Linux refuses at once what is more than the machine has, ...
        if not _NO_RESERVE:
            raise
        # ... unless it is asked not to keep any for it
        memory = mmap.mmap(-1, part.nbytes, flags=_NO_RESERVE)
        storage = storage_of(torch.frombuffer(memory, dtype=torch.uint8))
        storage._simgpu_mapped = part.nbytes
        return forget(over(storage, part.dtype, 0, part.shape, part.strides))
    if part.nbytes <= _ZEROED:
        made.zero_()
    return forget(made)


# -- other sizes -----------------------------------------------------------------------


def resize(storage, nbytes: int, resize_: Callable) -> None:
    """Give a storage another size; what is large keeps no values, and copies none.

    Args:
        storage: of any device.
        nbytes: that it has from now on.
        resize_: PyTorch's own `UntypedStorage.resize_`.

    Raises:
        NotSimulated: if it grows to more than this machine has.
        RuntimeError: for what a program has made that cannot be resized.
    """
    mapped = getattr(storage, "_simgpu_mapped", None)
    if mapped is not None and nbytes <= mapped:
        # PyTorch cannot resize it, and it takes no memory: it only says another size
        storage.nbytes = lambda: nbytes
        return
    if mapped is None and not _has_values(storage, nbytes):
        resize_(storage, 0)  # or PyTorch would copy what is there, page by page
        storage._simgpu_unknown = _Unknown(None)
    try:
        resize_(storage, nbytes)
    except RuntimeError as error:
        if mapped is None and CANNOT_ALLOCATE not in str(error):
            raise
        raise NotSimulated(
            f"a storage that grows in place to {nbytes / 2**30:.1f} GiB, more than "
            "this machine has, in a dry run",
            "Make it that large, and shrink it: that takes no memory.",
        ) from None


def make_room(tensor: torch.Tensor, shape: Sequence[int]) -> None:
    """Before `tensor.resize_(shape)`: a large storage has room for it."""
    storage = storage_of(tensor)
    count = tensor.storage_offset() + math.prod(shape)
    nbytes = count * tensor.element_size()
    if nbytes <= storage.nbytes() or _has_values(storage, nbytes):
        return
    try:
        storage.resize_(nbytes)
    except NotSimulated:
        huge = new(Part((nbytes,), (1,), torch.uint8))
        with DisableTorchFunction(), DisableTorchDispatch(), torch.no_grad():
            TensorBase.set_(tensor, storage_of(huge), tensor.storage_offset(), (0,))


def reshape(tensors: list[torch.Tensor], result: Result | None) -> None:
    """Give what `out=` named the shapes of a result."""
    for tensor, part in zip(tensors, result.tensors() if result else (), strict=False):
        if tensor.shape != part.shape:
            make_room(tensor, part.shape)
            tensor.resize_(part.shape)


def _has_values(storage, nbytes: int) -> bool:
    """Whether a storage has values that one of so many bytes would keep."""
    known = getattr(storage, "_simgpu_unknown", None) is None
    return known and max(storage.nbytes(), nbytes) <= _SMALL_WHOLE


def tensors_of(args, kwargs) -> list[torch.Tensor]:
    """The tensors among arguments."""
    found = tensors_in(args)
    return found + tensors_in(kwargs.values()) if kwargs else found
