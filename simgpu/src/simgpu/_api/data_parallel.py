"""One process, several GPUs: what `nn.DataParallel` asks of PyTorch's C++.

`nn.DataParallel`, `data_parallel`, `replicate`, `scatter`, `parallel_apply`, `gather`
and `torch.cuda.comm` are PyTorch's own Python code here. This file answers what they
call below. Models: PyTorch on Linux, where NCCL broadcasts weights and sums gradients
(`_distributed/one_process.py`), through the same flat buffers; and each copy of inputs
and outputs. Leaves out: the lock of the interpreter, for which the threads of a real
`nn.DataParallel` wait (N replicas launch at once here); and that backward has a host
thread for each GPU (here one launches for all).
"""

import contextlib

import torch
from torch.cuda import nccl

from simgpu._compat import (
    flatten_dense_tensors,
    flatten_sparse_tensors,
    is_legacy_batchedtensor,
    reorder_tensors_as,
    take_tensors,
    unflatten_dense_tensors,
    unflatten_sparse_tensors,
)
from simgpu._dispatch.named_devices import current_gpu


def _check(condition, *message) -> None:
    if not condition:
        raise RuntimeError("".join(map(str, message)))


def _check_index(device: int) -> None:
    _check(device >= 0, "Expected non-negative device index, but got ", device)


# -- one to all ------------------------------------------------------------------------


def broadcast(tensor: torch.Tensor, devices: list[int]) -> list[torch.Tensor]:
    """A copy of `tensor` on each device; on its own device, `tensor` itself."""
    copies, new = [], []
    for device in devices:
        _check_index(device)
        copy = tensor
        if device != tensor.get_device() and tensor.is_sparse:
            copy = tensor.to(torch.device("cuda", device), non_blocking=True)
        elif device != tensor.get_device():
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            new.append(copy)
        copies.append(copy)
    _send(tensor, new)
    return copies


def _send(tensor: torch.Tensor, out: list[torch.Tensor]) -> None:
    """By NCCL, where it takes these tensors, else by copies."""
    if out and nccl.is_available([tensor, *out]):
        nccl.broadcast([tensor, *out])
        return
    for target in out:
        target.copy_(tensor, non_blocking=True)


def broadcast_out(tensor: torch.Tensor, out: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy `tensor` into each of `out`."""
    for i, target in enumerate(out):
        _check(
            target.is_cuda,
            "Expected all output tensors to be CUDA tensors, but output tensor at "
            f"index {i} has device '{target.device}'",
        )
        _check(
            target.shape == tensor.shape,
            "Expected all output tensors to have same shape as the source tensor "
            f"{list(tensor.shape)}, but output tensor at index {i} has shape "
            f"{list(target.shape)}",
        )
    _send(tensor, out)
    return out


def broadcast_coalesced(
    tensors: list[torch.Tensor], devices: list[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    """Copies of all tensors on each device, sent in flat buffers.

    The copies are views of the buffers. On the first device they are the tensors.
    """
    _check(
        all(tensor.get_device() == devices[0] for tensor in tensors),
        f"All tensors must be on devices[0]: {devices[0]}",
    )
    copies = [[] for _ in devices[1:]]
    with torch.no_grad():
        for chunk in take_tensors(tensors, buffer_size):
            if chunk[0].is_sparse:
                flat = map(broadcast, flatten_sparse_tensors(chunk), [devices] * 2)
                for mine, *both in zip(copies, *(b[1:] for b in flat), strict=True):
                    mine += [p.data for p in unflatten_sparse_tensors(both, chunk)]
                continue
            buffers = broadcast(flatten_dense_tensors(chunk), devices)[1:]
            for mine, buffer in zip(copies, buffers, strict=True):
                # .data: parts of one buffer would otherwise share a version counter
                mine += [part.data for part in unflatten_dense_tensors(buffer, chunk)]
        in_order = [reorder_tensors_as(m, tensors) if tensors else () for m in copies]
    return [list(tensors), *map(list, in_order)]


# -- parts -----------------------------------------------------------------------------


def scatter(
    tensor: torch.Tensor, devices: list[int], chunk_sizes, dim: int, streams
) -> list[torch.Tensor]:
    """Cut `tensor` along `dim`, and put a part on each device."""
    _check(devices, "Expected at least one device to scatter to")
    _check(
        chunk_sizes is None or len(chunk_sizes) == len(devices),
        "Expected devices and chunk_sizes to be of same length, but got len(devices) = "
        f"{len(devices)} and len(chunk_sizes) = {len(chunk_sizes or ())}",
    )
    if chunk_sizes is None:
        chunks = tensor.chunk(len(devices), dim)
    else:
        chunks = tensor.split_with_sizes(chunk_sizes, dim)
    parts = []
    for i, chunk in enumerate(chunks):
        device = devices[i]
        _check_index(device)
        with _on(streams, i, device):
            parts.append(chunk.to(torch.device("cuda", device), non_blocking=True))
    return parts


def scatter_out(
    tensor: torch.Tensor, out: list[torch.Tensor], dim: int, streams
) -> list[torch.Tensor]:
    """Cut `tensor` along `dim` into parts as large as those in `out`, and copy them."""
    _check(out, "Expected at least one output tensor to scatter to")
    dim = range(tensor.dim())[dim]  # an IndexError where there is no such dimension
    for i, target in enumerate(out):
        _check(
            target.is_cuda,
            "Expected all output tensors to be CUDA tensors, but output tensor at "
            f"index {i} has device '{target.device}'",
        )
        _check(
            _without(target, dim) == _without(tensor, dim),
            f"Output tensor at index {i} has incorrect shape: {list(target.shape)}. "
            f"Expected same shape except for scatter dim {dim} as the source tensor: "
            f"{list(tensor.shape)}",
        )
    sizes = [target.shape[dim] for target in out]
    _check(
        sum(sizes) == tensor.shape[dim],
        f"Total size for output tensors along scatter dim {dim} does not match the "
        f"source tensor size at dim {dim}. Expected {tensor.shape[dim]}, but got total "
        f"size {sum(sizes)}",
    )
    chunks = tensor.split_with_sizes(sizes, dim)
    for i, (target, chunk) in enumerate(zip(out, chunks, strict=True)):
        with _on(streams, i, target.get_device()):
            target.copy_(chunk, non_blocking=True)
    return out


def gather(
    tensors: list[torch.Tensor], dim: int, destination: int | None
) -> torch.Tensor:
    """The tensors behind each other along `dim`, on one GPU (-1: on the host)."""
    shape = _gathered_shape(tensors, dim)
    device = current_gpu().device
    if destination is not None:
        device = torch.device("cuda", destination) if destination >= 0 else "cpu"
    lies = torch.contiguous_format
    if all(map(_is_channels_last, tensors)):
        lies = torch.channels_last
    out = torch.empty(shape, dtype=tensors[0].dtype, device=device, memory_format=lies)
    return _fill(out, tensors, dim)


def _is_channels_last(tensor) -> bool:
    return (
        tensor.dim() == 4
        and tensor.is_contiguous(memory_format=torch.channels_last)
        and not tensor.is_contiguous()
    )


def gather_out(
    tensors: list[torch.Tensor], out: torch.Tensor, dim: int
) -> torch.Tensor:
    """The same, into a tensor that exists."""
    shape = _gathered_shape(tensors, dim)
    _check(
        list(out.shape) == shape,
        f"Expected out tensor to have shape {shape}, but got {list(out.shape)}",
    )
    return _fill(out, tensors, dim)


def _gathered_shape(tensors, dim: int) -> list[int]:
    _check(tensors, "Expected at least one tensor to gather from")
    first = tensors[0]
    dim = dim % first.dim() if first.dim() else 0
    for i, tensor in enumerate(tensors):
        _check(
            tensor.is_cuda,
            "Expected all input tensors to be CUDA tensors, but tensor at index ",
            f"{i} has device '{tensor.device}'",
        )
        _check(
            tensor.dim() == first.dim(),
            "Expected all input tensors to have the same number of dimensions, but "
            f"tensor at index {i} has {tensor.dim()} dimensions, (expected "
            f"{first.dim()})",
        )
        expected = list(first.shape)
        expected[dim : dim + 1] = tensor.shape[dim : dim + 1]
        _check(
            list(tensor.shape) == expected,
            f"Input tensor at index {i} has invalid shape {list(tensor.shape)}, but "
            f"expected {expected}",
        )
    shape = list(first.shape)
    shape[dim : dim + 1] = [sum(tensor.shape[dim] for tensor in tensors)]
    return shape


def _fill(out, tensors, dim: int) -> torch.Tensor:
    if any(map(is_legacy_batchedtensor, tensors)):
        # gradients of a batch of vectors at once: nothing is written in place
        return torch.cat([tensor.to(out.device) for tensor in tensors], dim)
    parts = out.split_with_sizes([tensor.shape[dim] for tensor in tensors], dim)
    for part, tensor in zip(parts, tensors, strict=True):
        part.copy_(tensor, non_blocking=out.is_cuda)
    return out


def _without(tensor, dim: int) -> list[int]:
    return [*tensor.shape[:dim], None, *tensor.shape[dim + 1 :]]


def _on(streams, i: int, device: int):
    """The stream for part i; the current one where none is given."""
    stream = streams[i] if streams and i < len(streams) else None
    if stream is None:
        return contextlib.nullcontext()
    _check(
        stream.device_index == device,
        f"Expected the device associated with the stream at index {i} (was "
        f"{stream.device_index}) to match the device supplied at that index (expected "
        f"{device})",
    )
    return torch.cuda.stream(stream)


C_FUNCTIONS = {
    f"_{function.__name__}": function
    for function in (
        broadcast, broadcast_out, broadcast_coalesced, scatter, scatter_out, gather,
        gather_out,
    )
}  # fmt: skip
