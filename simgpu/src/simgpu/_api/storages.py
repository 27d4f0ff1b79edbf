"""What storages say and do: device, address, size, copies."""

import torch
from torch.storage import UntypedStorage

from simgpu import _runtime as state
from simgpu._api.naming import as_device
from simgpu._compat import PythonStorageBase, StorageBase
from simgpu._dispatch.named_devices import find_gpu, kept_on
from simgpu._dispatch.placement import (
    PartMemory,
    gpu_of,
    gpu_of_storage,
    is_plain,
    memory_of_storage,
    place_storage,
)
from simgpu._dispatch.shared_memory import check_size
from simgpu._fusing import regions

_raw_device = UntypedStorage.device
_raw_data_ptr = UntypedStorage.data_ptr
_raw_resize = UntypedStorage.resize_
_raw_clone = PythonStorageBase.clone
_raw_to = PythonStorageBase.to
_raw_new = StorageBase.__new__
_raw_is_shared = UntypedStorage.is_shared
_raw_set = torch.Tensor.set_
_raw_getitem = UntypedStorage.__getitem__
_OTHER_DEVICE = (
    'Attempted to set the storage of a tensor on device "{}" to a storage on different '
    'device "{}".  This is no longer allowed; the devices must match.'
)


def new(cls, *args, device=None, **kwargs):
    """`torch.UntypedStorage(4, device="cuda")`, and the typed ones that are made so."""
    device = as_device(device)
    if device is None or device.type != "cuda":
        return _raw_new(cls, *args, device=device, **kwargs)
    gpu = find_gpu(device)
    made = _raw_new(cls, *args, device=kept_on(), **kwargs)
    place_storage(made, gpu)
    return made


def device(self):
    gpu = gpu_of_storage(self)
    return _raw_device.__get__(self) if gpu is None else gpu.device


def data_ptr(self):
    memory = regions.in_memory(memory_of_storage(self))
    if memory is None or memory.block is None:
        return _raw_data_ptr(self)
    return memory.block.address


def getitem(self, index):
    """`storage[i]`, which the host reads; `storage[a:b]`, the same memory."""
    found = _raw_getitem(self, index)
    if isinstance(index, slice):
        memory = memory_of_storage(self)
        if memory is not None:
            first = index.indices(self.nbytes())[0]
            found._simgpu = PartMemory(memory, first, found.nbytes())
            self._simgpu_sliced = True
        pinned = getattr(self, "_simgpu_pinned", None)
        if pinned is not None:
            found._simgpu_pinned = pinned
    return found


def new_like(self):
    """`storage.new()`: an empty one on the same device."""
    return type(self)(0, device=self.device)


def is_shared(self):
    """GPU memory can be mapped by other processes."""
    return gpu_of_storage(self) is not None or _raw_is_shared(self)


def resize_(self, size: int):
    """Also counts what the storage takes then."""
    memory = memory_of_storage(self)
    if memory is not None and memory.arriving is not None:
        memory.arriving.settle()  # it would write to what is gone
    check_size(memory, size)
    dry = state.current().dry
    if dry is None:
        _raw_resize(self, size)
    else:
        dry.resize(self, size, _raw_resize)
    if memory is not None and memory.nbytes != self.nbytes():
        memory.resize(self.nbytes())
    return self


def set_(self, source=None, *args, **kwargs):
    """`x.set_(storage)`: only memory of the same device."""
    __tracebackhide__ = True
    if source is not None and is_plain(self) and self.device.type != "meta":
        if isinstance(source, torch.Tensor):
            its = gpu_of(source)
        else:
            its = gpu_of_storage(getattr(source, "_untyped_storage", source))
        gpu = gpu_of(self)
        if gpu is not its:
            own, other = (g.device if g else "cpu" for g in (gpu, its))
            raise RuntimeError(_OTHER_DEVICE.format(own, other))
    given = () if source is None else (source,)
    return _raw_set(self, *given, *args, **kwargs)


def _as_bytes(storage) -> torch.Tensor:
    """The bytes of a storage as a tensor on the same device."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage)


def clone(self):
    if gpu_of_storage(self) is None:
        return _raw_clone(self)
    return _as_bytes(self).clone().untyped_storage()


def cpu(self):
    return to(self, device=torch.device("cpu"))


def cuda(self, device=None, non_blocking=False):
    return to(self, device="cuda" if device is None else device)


def to(self, *, device, non_blocking=False):
    device = as_device(device)
    if device.type not in ("cuda", "cpu"):
        return _raw_to(self, device=device, non_blocking=non_blocking)
    if find_gpu(device) is gpu_of_storage(self):
        return self
    return _as_bytes(self).to(device).untyped_storage()
