"""The host's memory, as operations and copies use it that do not wait for each other.

`_sanitizer/host_copies.py` knows which uses are in order. Here it is told of them, and
where races are shown, host memory holds what it would: what a copy brings is kept back
until the host has waited, and a copy sees what the host has written too early.
"""

import functools

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from simgpu import _runtime as state
from simgpu._compat import DisableTorchDispatch, StorageBase, storage_of_weak_ref
from simgpu._dispatch.placement import (
    block_of,
    gpu_of,
    no_torch_function,
    over,
    storage_of,
    tensors_in,
)
from simgpu._sanitizer.host_copies import HostAccess

_COPIES = {"copy_", "_to_copy", "_foreach_copy_"}
_data_ptr = StorageBase.data_ptr


def address_of(tensor: torch.Tensor) -> int:
    """Where a host tensor's storage lies; 0 if it has none."""
    with no_torch_function():
        try:
            return _data_ptr(storage_of(tensor))
        except (NotImplementedError, RuntimeError):
            return 0


# -- the host --------------------------------------------------------------------------


def run_beside_copies(call):
    """Run an operation with host tensors, while there are unfinished copies.

    Raises:
        RaceError: if it uses what such a copy writes, or writes what it reads.
    """
    __tracebackhide__ = True
    operation = call.operation
    parts = operation.in_parts or operation.is_factory or operation.silent
    if parts or operation.name == "is_pinned" or _crosses(call):
        return operation.run(call)
    later = _use(call, call.named_arguments())
    out = operation.run(call)
    for again in later:
        again()
    return out


def _crosses(call) -> bool:
    """Whether it is a copy between devices, which speaks for itself."""
    if call.operation.name not in _COPIES:
        return False
    device = call.kwargs.get("device")
    return any(call.gpus) or device is not None and device.type == "cuda"


def _use(call, named) -> list:
    """The host uses those arguments that are on the host."""
    __tracebackhide__ = True
    accesses = [
        HostAccess(a.name, tensor, address, a.name in call.operation.writes)
        for a, value in named
        for tensor in tensors_in((value,))
        if (address := address_of(tensor)) in call.runtime.unfinished
        and gpu_of(tensor) is None
    ]
    if not accesses:
        return []
    copies = call.runtime.sanitizer.host_copies
    return copies.used_by_host(str(call.operation.func._schema), accesses)


def read_by_host(tensor: torch.Tensor, operator: str, whole: bool = False) -> None:
    """The host reads a tensor of its own behind PyTorch's back.

    Args:
        tensor: on the host.
        operator: what reads it.
        whole: whether it reads the whole storage.
    """
    __tracebackhide__ = True
    runtime = state.running
    if runtime is None:
        return
    if runtime.dry is not None and not whole:
        runtime.dry.note_read_by_host(tensor)
    if not runtime.unfinished:
        return
    address = address_of(tensor)
    if address not in runtime.unfinished:
        return
    if whole:
        storage = storage_of(tensor)
        tensor = _at(storage, (torch.uint8, 0, (storage.nbytes(),), (1,)))
    access = HostAccess("self", tensor, address, False)
    runtime.sanitizer.host_copies.used_by_host(operator, [access])


# -- copies between the host and a GPU -------------------------------------------------


def is_read_by_stream(tensor, dtype, wait: bool, into=None) -> bool:
    """Whether a copy reads pinned memory itself, or what the host has made of it.

    Source: copy_kernel_cuda in aten/src/ATen/native/cuda/Copy.cu of PyTorch.

    Args:
        tensor: on the host.
        dtype: of the copy; None is the tensor's.
        wait: whether the host waits: then it changes the type, else the GPU does.
        into: the tensor that is written, or None for a new one.
    """
    same = dtype is None or dtype is tensor.dtype
    if into is not None and into.shape != tensor.shape:
        return False
    if tensor.is_contiguous():
        return same or not wait
    return same and _is_dense(tensor) and _strides_agree(tensor, into)


def is_written_by_stream(into, tensor, wait: bool) -> bool:
    """Whether a copy writes to pinned memory itself, or the host does after it."""
    same = into.dtype is tensor.dtype
    if into.is_contiguous():
        return same or not wait
    agree = into.shape == tensor.shape and _strides_agree(into, tensor)
    return same and agree and _is_dense(into)


def _is_dense(tensor) -> bool:
    """Whether its elements lie together, in any order."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps) == tensor.numel()


def _strides_agree(tensor, other) -> bool:
    return other is None or tensor.stride() == other.stride()


def use(call, key, tensor, pinned: bool, source) -> None:
    """A copy between the host and a GPU is about to read or write a host tensor.

    Args:
        call: the copy.
        key: (GPU, stream) of its other end.
        tensor: on the host; None for a new one.
        pinned: whether the stream uses it, and not the host.
        source: the GPU that is copied from, or None.
    """
    __tracebackhide__ = True
    address = 0 if tensor is None else address_of(tensor)
    if address in call.runtime.unfinished:
        writes = source is not None
        access = HostAccess("self" if writes else "src", tensor, address, writes)
        copies = call.runtime.sanitizer.host_copies
        operator = str(call.operation.func._schema)
        if pinned:
            copies.used_by_stream(operator, key, access)
        else:
            for again in copies.used_by_host(operator, [access]):
                again()


def content(runtime, into: torch.Tensor) -> torch.Tensor | None:
    """Before a copy to the host: what the memory holds, where races are shown."""
    shown = runtime.sanitizer.mode == "show" and gpu_of(into) is None
    return _at(storage_of(into), _place_of(into)).clone() if shown else None


def hold(call, key, tensor, into, block, before) -> None:
    """A copy has been launched for which the host does not wait.

    Args:
        call: the copy.
        key: (GPU, stream) of its end on a GPU.
        tensor: what is copied.
        into: the copy.
        block: the pinned memory of the end on the host, if PyTorch has made it.
        before: what `into` held, where races are shown.
    """
    sanitizer = call.runtime.sanitizer
    writes = gpu_of(tensor) is not None
    host = into if writes else tensor
    address = address_of(host)
    if sanitizer.mode == "off" or not address or host.layout is not torch.strided:
        return
    if block is not None:
        block.address = address
    argument, land, again = "self", None, None
    if call.operation.name == "copy_" and not writes:
        argument = "src"
    elif call.operation.name != "copy_" and writes:
        argument = ""  # it is the result
    if sanitizer.mode == "show":
        if writes:
            land = _keep_back(into, before)
        else:
            sanitizer.watch_accesses()
            again = _repeated(sanitizer, tensor, into)
    access = HostAccess(argument, host, address, writes)
    operator = str(call.operation.func._schema)
    sanitizer.host_copies.begin(operator, key, access, land, again)


# -- where races are shown -------------------------------------------------------------


def _keep_back(into, before):
    """Host memory holds what it did before; returns what puts the copy there."""
    memory = _at(storage_of(into), _place_of(into))
    values = memory.clone()
    _write(memory, torch.zeros_like(memory) if before is None else before)
    return functools.partial(_write, memory, values)


def _repeated(sanitizer, tensor, into):
    """A copy to a GPU that can be done again, until somebody has used its result."""
    source, target = _place_of(tensor), _place_of(into)
    block, storage = block_of(into), StorageWeakRef(storage_of(into))

    def again(number: int, written):
        """What repeats the copy from the storage of `written`; None if it is late."""
        if storage.expired():
            return None
        memory = _at(storage_of_weak_ref(storage.cdata), target)
        if sanitizer.used_since(number, memory, block):
            return None
        return functools.partial(_write, memory, _at(storage_of(written), source))

    return again


def _place_of(tensor) -> tuple:
    where = (tensor.storage_offset(), tensor.shape, tensor.stride())
    return tensor.dtype, *where


def _at(storage, place: tuple) -> torch.Tensor:
    """The memory of a tensor, as one of its own: changing it counts as no change."""
    dtype, *where = place
    with no_torch_function(), DisableTorchDispatch(), torch.inference_mode(False):
        return over(storage, dtype, *where)


def _write(memory: torch.Tensor, values: torch.Tensor) -> None:
    with no_torch_function(), DisableTorchDispatch(), torch.no_grad():
        memory.copy_(values)
