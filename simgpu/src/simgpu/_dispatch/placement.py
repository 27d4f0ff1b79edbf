"""On which simulated GPU a tensor lives.

Each storage of a GPU tensor carries a `DeviceMemory`, which names its GPU and holds its
block of memory. So views and in-place operations need no code, and the block is given
back when the storage dies.
"""

import torch

from simgpu import _runtime as state
from simgpu._compat import (
    DisableTorchDispatch,
    DisableTorchFunction,
    FakeTensor,
    TensorBase,
    get_unwrapped,
    is_functorch_tensor,
    is_legacy_batchedtensor,
    remove_batch_dim,
)
from simgpu._device.gpu import Gpu
from simgpu._device.host_memory import PinnedBlock

_Base = TensorBase
_Tensor = torch.Tensor
storage_of = _Base.untyped_storage
no_torch_function = DisableTorchFunction
_PLAIN = torch.Tensor.__torch_dispatch__  # of tensors that PyTorch's own kernels run on


def over(storage, dtype: torch.dtype, *where) -> torch.Tensor:
    """A host tensor over a storage, wherever that lives; nobody compares devices.

    Args:
        storage: whose memory it is.
        dtype: of the elements.
        where: offset, shape and strides; all of it if they are left out.
    """
    return _Base.set_(torch.empty(0, dtype=dtype), storage, *where)


class DeviceMemory:
    """The mark of a storage on a GPU: its block is freed with the storage."""

    __slots__ = ("gpu", "nbytes", "block", "arriving", "awaited", "__weakref__")

    def __init__(self, gpu: Gpu, nbytes: int, stream: int):
        __tracebackhide__ = True
        self.block = None  # should malloc() refuse, __del__ has nothing to free
        self.gpu = gpu
        self.nbytes = nbytes
        self.arriving = None  # the collective that writes it, if one does
        self.awaited = None  # what `wait_tensor` waits for
        self.block = gpu.memory.malloc(nbytes, stream)

    def resize(self, nbytes: int) -> None:
        """The storage has grown or shrunk in place."""
        __tracebackhide__ = True
        stream = state.current().stream_of(self.gpu)
        block = self.gpu.memory.malloc(nbytes, stream)
        if self.block is not None:
            self.gpu.memory.free(self.block)
        self.block, self.nbytes = block, nbytes

    def __del__(self):
        if self.block is not None:
            self.gpu.memory.free(self.block)


class PartOfBlock:
    """A block from some byte on. As on CUDA, `record_stream` does nothing to it."""

    __slots__ = ("whole", "address", "stream", "stream_uses", "before", "written_since")

    def __init__(self, whole, first: int):
        self.whole, self.stream = whole, whole.stream
        self.address = whole.address + first
        self.stream_uses = self.before = self.written_since = None

    @property
    def writer(self):
        """The kernel that wrote the block last."""
        return self.whole.writer

    @writer.setter
    def writer(self, writer) -> None:
        self.whole.writer = writer


class PartMemory(DeviceMemory):
    """The mark of a slice of a storage, which lies in the block of the whole.

    Args:
        whole: the mark of the storage, kept for as long as the slice.
        first: byte of it at which the slice begins.
        nbytes: of the slice.
    """

    __slots__ = ("whole", "first", "_part")

    def __init__(self, whole: DeviceMemory, first: int, nbytes: int):
        self.whole, self.first, self.nbytes, self._part = whole, first, nbytes, None

    @property
    def gpu(self) -> Gpu:
        return self.whole.gpu

    @property
    def block(self) -> PartOfBlock | None:
        block = self.whole.block
        if block is None:
            return None
        if self._part is None or self._part.whole is not block:
            self._part = PartOfBlock(block, self.first)
        return self._part

    @property
    def arriving(self):
        return self.whole.arriving

    @arriving.setter
    def arriving(self, collective) -> None:
        self.whole.arriving = collective

    @property
    def awaited(self):
        return self.whole.awaited

    @awaited.setter
    def awaited(self, collective) -> None:
        self.whole.awaited = collective

    def resize(self, nbytes: int) -> None:
        raise RuntimeError("Trying to resize storage that is not resizable")

    def __del__(self):
        """The block is the whole's."""


def memory_of_storage(storage) -> DeviceMemory | None:
    """The mark of an UntypedStorage on a GPU that still runs."""
    memory = getattr(storage, "_simgpu", None)
    return memory if memory is not None and memory.gpu.alive else None


def gpu_of_storage(storage) -> Gpu | None:
    """The simulated GPU on which an UntypedStorage lives, or None."""
    memory = memory_of_storage(storage)
    return None if memory is None else memory.gpu


def memory_of(tensor: torch.Tensor) -> DeviceMemory | None:
    """The mark of a tensor on a GPU that still runs; None on the host."""
    with no_torch_function():  # no mode and no subclass need see this
        try:
            memory = storage_of(tensor)._simgpu
        except AttributeError:
            return None
        except (NotImplementedError, RuntimeError):  # it has no storage of its own
            parts = parts_of(tensor)
            return memory_of(parts[-1]) if parts else None
    return memory if memory.gpu.alive else None


def gpu_of(tensor: torch.Tensor) -> Gpu | None:
    """The simulated GPU on which `tensor` lives, or None."""
    memory = memory_of(tensor)
    if memory is not None:
        return memory.gpu
    if is_plain(tensor):
        return None
    return next(filter(None, map(gpu_of, inner_tensors(tensor))), None)


def gpus_of(tensors: list[torch.Tensor]) -> list[Gpu | None]:
    """The same for several tensors."""
    gpus = []
    with no_torch_function():
        for tensor in tensors:
            try:
                memory = storage_of(tensor)._simgpu
                gpus.append(memory.gpu if memory.gpu.alive else None)
            except AttributeError:
                gpus.append(None if is_plain(tensor) else gpu_of(tensor))
            except (NotImplementedError, RuntimeError):
                gpus.append(gpu_of(tensor))
    return gpus


def block_of(tensor: torch.Tensor):
    """The allocator's block in which a GPU tensor lives, or None."""
    memory = memory_of(tensor)
    return None if memory is None else memory.block


def blocks_of(tensor: torch.Tensor) -> list[tuple]:
    """(tensor, block) of a GPU tensor, or of each part of a sparse one."""
    parts = [tensor] if tensor.layout is torch.strided else parts_of(tensor)
    found = [(part, block_of(part)) for part in parts]
    return [(part, block) for part, block in found if block is not None]


def parts_of(tensor) -> list[torch.Tensor]:
    """What a tensor without a storage is made of: sparse ones, and those of vmap."""
    if not is_plain(tensor):
        return []
    if is_legacy_batchedtensor(tensor):  # of is_grads_batched=True
        with DisableTorchDispatch(), torch.no_grad():
            return [remove_batch_dim(tensor, 1, 1, 0)]
    if is_functorch_tensor(tensor):
        return [get_unwrapped(tensor)]
    with DisableTorchDispatch(), torch.no_grad():
        return [part(tensor) for part in _PARTS.get(tensor.layout, ())]


def inner_tensors(tensor) -> list[torch.Tensor]:
    """What a subclass such as DTensor wraps."""
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None or type(tensor) is FakeTensor:
        return []
    parts = [getattr(tensor, name) for name in flatten(tensor)[0]]
    return [part for part in parts if isinstance(part, _Tensor)]


_BY_ROWS = (_Base.crow_indices, _Base.col_indices, _Base.values)
_BY_COLUMNS = (_Base.ccol_indices, _Base.row_indices, _Base.values)
_PARTS = {
    torch.sparse_coo: (_Base._indices, _Base._values),
    torch.sparse_csr: _BY_ROWS,
    torch.sparse_bsr: _BY_ROWS,
    torch.sparse_csc: _BY_COLUMNS,
    torch.sparse_bsc: _BY_COLUMNS,
}


def bytes_in(tensor) -> int:
    """Bytes of its elements; of a sparse one, also of its indices."""
    if tensor.layout is torch.strided:
        return tensor.numel() * tensor.element_size()
    return sum(part.numel() * part.element_size() for part in parts_of(tensor))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side in memory, in whatever order."""
    expected = 1
    ways = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(way for way in ways if way[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def is_plain(tensor) -> bool:
    """Whether PyTorch's own kernels run on it (no FakeTensor, DTensor, ...)."""
    return type(tensor).__torch_dispatch__ is _PLAIN


def place_storage(storage, gpu: Gpu) -> None:
    """Mark a new UntypedStorage as living on `gpu`."""
    __tracebackhide__ = True
    stream = state.running.stream_of(gpu)
    storage._simgpu = DeviceMemory(gpu, storage.nbytes(), stream)


def place(tensor: torch.Tensor, gpu: Gpu | None) -> torch.Tensor:
    """Mark a new tensor as living on `gpu`; one that is marked stays where it is."""
    __tracebackhide__ = True
    if gpu is not None:
        place_all([tensor], gpu)
    return tensor


def place_all(tensors: list[torch.Tensor], gpu: Gpu) -> list:
    """The same for several tensors; returns the blocks in which they live."""
    __tracebackhide__ = True
    blocks = []
    for tensor in tensors:
        try:
            storage = storage_of(tensor)
        except (NotImplementedError, RuntimeError):
            blocks += place_all(parts_of(tensor), gpu)
            continue
        nbytes = storage.nbytes()
        memory = getattr(storage, "_simgpu", None)
        if memory is None or not memory.gpu.alive:
            stream = state.running.stream_of(gpu)
            memory = storage._simgpu = DeviceMemory(gpu, nbytes, stream)
        elif memory.nbytes != nbytes:
            memory.resize(nbytes)
        if memory.block is not None:
            blocks.append(memory.block)
    return blocks


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a host tensor is in pinned memory, or all parts of a sparse one."""
    if tensor.layout is not torch.strided:
        parts = parts_of(tensor)
        return bool(parts) and all(map(is_pinned, parts))
    if getattr(storage_of(tensor), "_simgpu_pinned", None) is not None:
        return True
    registered = state.current().registered
    if not registered:
        return False
    address = _Base.data_ptr(tensor)
    return any(0 <= address - a < size for a, size in registered.copy().items())


def pin(tensor: torch.Tensor) -> None:
    """Mark a host tensor as lying in pinned memory, or all parts of a sparse one."""
    if tensor.layout is not torch.strided:
        for part in parts_of(tensor):
            pin(part)
        return
    storage = storage_of(tensor)
    if getattr(storage, "_simgpu_pinned", None) is None:
        memory = state.current().host_memory
        storage._simgpu_pinned = PinnedBlock(memory, storage.nbytes())


def pinned_block(tensor: torch.Tensor) -> PinnedBlock | None:
    """The block of pinned memory in which a host tensor lies, if it is PyTorch's."""
    if tensor.layout is not torch.strided:
        return None
    return getattr(storage_of(tensor), "_simgpu_pinned", None)


def tensors_in(values) -> list[torch.Tensor]:
    """The tensors among arguments or results, also inside lists."""
    found = []
    for value in values:
        if isinstance(value, _Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, _Tensor)]
    return found
