"""What the stream sanitizer is told of a call, and what a racy read sees."""

import functools

import torch

from simgpu._compat import DisableTorchFunction, conj, neg_view
from simgpu._dispatch.placement import (
    DeviceMemory,
    block_of,
    blocks_of,
    gpu_of,
    memory_of,
    over,
    storage_of,
    tensors_in,
)


def access(sanitizer, operator: str, key, reads: list, writes: list) -> list[int]:
    """Tell the sanitizer of a kernel; returns which of its reads find older values.

    While races are warned of, none does: what a collective still has to bring to this
    memory comes first, as in the order of the program.

    Raises:
        CUDASanitizerErrors: at a race, while races raise.
    """
    __tracebackhide__ = True
    racy = sanitizer.access(operator, key, reads, writes)
    if sanitizer.mode != "warn":
        return racy
    for position in racy:
        memory = memory_of([*reads, *writes][position][1])
        if memory is not None and memory.arriving is not None:
            memory.arriving.settle()
    return []


def keep_old_values(sanitizer, key, writes: list) -> None:
    """Before a write, while races are shown: keep what the memory holds."""
    if sanitizer.mode == "show":
        for _, tensor, block in writes:
            copy = functools.partial(_copy_of_bytes, tensor)
            sanitizer.keep_old_value(key, block, copy)


def before_kernel(call, gpu) -> None:
    """Say what `call` is about to read and write.

    A racy read, while races are shown, gets what the memory held before.

    Raises:
        CUDASanitizerErrors: at a race, while races raise.
    """
    __tracebackhide__ = True
    if call.is_captured:
        return
    sanitizer = call.runtime.sanitizer
    reads, writes = _accesses(call)
    key = (gpu.index, call.runtime.stream_of(gpu))
    racy = access(sanitizer, str(call.operation.func._schema), key, reads, writes)
    old = {id(reads[i][1]): as_before(*reads[i][1:]) for i in racy}
    keep_old_values(sanitizer, key, writes)
    if old:
        call.args = [_swap(value, old) for value in call.args]
        call.kwargs = {name: _swap(v, old) for name, v in call.kwargs.items()}


def after_kernel(call, key, outputs: list[torch.Tensor], blocks: list) -> None:
    """Say that a stream has made outputs, or changed some of the arguments.

    Args:
        call: the operation.
        key: (GPU, stream).
        outputs: its results, which are the changed arguments where it makes none.
        blocks: of the outputs.
    """
    __tracebackhide__ = True
    sanitizer, operation = call.runtime.sanitizer, call.operation
    if sanitizer.mode == "off" or call.is_captured:
        return
    if not sanitizer.watching:
        if not outputs:  # it returns nothing of what it changes
            named = call.named_arguments()
            written = tensors_in([v for a, v in named if a.name in operation.writes])
            blocks = [block for tensor in written for _, block in blocks_of(tensor)]
        sanitizer.note_writer(operation.func, key, blocks)
    elif operation.makes:
        made = [("", *place) for tensor in outputs for place in blocks_of(tensor)]
        for _, _, block in made:
            sanitizer.keep_old_value(key, block, None)
        sanitizer.access(str(operation.func._schema), key, [], made, new=True)


class _Compiled:
    """What the sanitizer calls compiled code."""

    _schema = "compiled code"


def after_compiled(runtime, outputs: list[torch.Tensor]) -> None:
    """Say that compiled code has made outputs, each on its GPU's current stream."""
    __tracebackhide__ = True
    sanitizer = runtime.sanitizer
    for tensor in outputs:
        gpu = gpu_of(tensor)
        key = (gpu.index, runtime.stream_of(gpu))
        if not sanitizer.watching:
            sanitizer.note_writer(_Compiled, key, [block_of(tensor)])
        else:
            made = [("", *place) for place in blocks_of(tensor)]
            sanitizer.access(_Compiled._schema, key, [], made, new=True)


def before_copy(call, keys, tensor, source, into, target) -> None:
    """Say what a copy between devices reads and writes.

    Args:
        call: the copy.
        keys: (GPU, stream) of its ends on GPUs.
        tensor: what is copied.
        source: its GPU, or None.
        into: the tensor that is written, or None for a new one.
        target: its GPU, or None.
    """
    __tracebackhide__ = True
    if call.is_captured:
        return
    sanitizer = call.runtime.sanitizer
    sanitizer.join_streams(keys)
    if not sanitizer.watching:
        return
    reads = [("", *place) for place in blocks_of(tensor)] if source else []
    is_changed = into is not None and target is not None
    writes = [("", *place) for place in blocks_of(into)] if is_changed else []
    if access(sanitizer, str(call.operation.func._schema), keys[0], reads, writes):
        old = {id(tensor): as_before(*reads[0][1:])}
        call.args = [_swap(value, old) for value in call.args]
    keep_old_values(sanitizer, keys[-1], writes[:1])


def look_at(runtime, tensor):
    """A tensor that is printed: as the host sees it, once the stream is there."""
    __tracebackhide__ = True
    gpu, block, sanitizer = gpu_of(tensor), block_of(tensor), runtime.sanitizer
    if gpu is not None:
        runtime.clock.forbid_waiting()
    is_watched = block is not None and sanitizer.watching
    if not is_watched or tensor.layout is not torch.strided:
        return tensor
    key = (gpu.index, runtime.stream_of(gpu))
    racy = access(sanitizer, "printing", key, [("self", tensor, block)], [])
    sanitizer.host_waited([key])
    if not racy:
        return tensor
    seen = as_before(tensor, block).clone()
    storage_of(seen)._simgpu = DeviceMemory(gpu, 0, 0)  # there, but takes no memory
    return seen


def _accesses(call) -> tuple[list, list]:
    """What a call reads and what it writes: (argument, tensor, block)."""
    reads, writes = [], []
    for argument, value in call.named_arguments():
        found = writes if argument.name in call.operation.writes else reads
        for tensor in tensors_in((value,)):
            found += [(argument.name, *place) for place in blocks_of(tensor)]
    return [] if call.operation.is_factory else reads, writes


def _copy_of_bytes(tensor) -> torch.Tensor:
    """What the memory of a tensor holds, all of it, as a host tensor."""
    with DisableTorchFunction():
        return over(storage_of(tensor), torch.uint8).clone()


def as_before(tensor, block) -> torch.Tensor:
    """What a tensor would be if its memory still held what it did before."""
    with DisableTorchFunction():
        before = block.before
        if before is None:  # fresh memory: zeros, as CUDA's mostly is
            before = torch.zeros(storage_of(tensor).nbytes(), dtype=torch.uint8)
        where = (tensor.storage_offset(), tensor.shape, tensor.stride())
        seen = over(storage_of(before), tensor.dtype, *where)
        seen = conj(seen) if tensor.is_conj() else seen
        return neg_view(seen) if tensor.is_neg() else seen


def _swap(value, other: dict):
    """`value`, with the tensors in it for which `other` has another by their id."""
    if isinstance(value, (list, tuple)):
        return [_swap(item, other) for item in value]
    return other.get(id(value), value)
