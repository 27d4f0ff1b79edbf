"""NCCL in one process: `torch.cuda.nccl`, over which `nn.DataParallel` sends weights.

`torch.cuda.nccl` and `torch.cuda.comm` are PyTorch's own Python; this file answers what
they call of `torch._C`. Models: a collective runs on the current stream of each of its
GPUs, starts when the last of them is ready, and takes as long as that of as many ranks
in one node. Leaves out: the communicators that the first one makes, and a program's
own.
"""

from collections.abc import Callable, Sequence

import torch

from simgpu import _runtime as state
from simgpu._dispatch.placement import gpu_of, memory_of
from simgpu._distributed import exchange as ex
from simgpu._distributed import operations
from simgpu._distributed.collectives import tell_sanitizer
from simgpu._errors import NotSimulated
from simgpu._timing.collective_cost import collective_seconds
from simgpu._timing.topology import Topology

_REDUCTIONS = ("SUM", "PRODUCT", "MAX", "MIN", "AVG")  # as ncclRedOp_t counts them
_Tensors = Sequence[torch.Tensor]


def broadcast(inputs: _Tensors, root: int, streams, comms) -> None:
    """Every tensor becomes that of `root`."""
    if not 0 <= root < len(inputs):
        raise RuntimeError("invalid root")
    written = [[] if rank == root else [t] for rank, t in enumerate(inputs)]
    _run(
        inputs, written, streams, comms,
        lambda size, rank: ex.broadcast(size, rank, [inputs[rank]], root),
    )  # fmt: skip


def reduce(inputs: _Tensors, output, root: int, op: int, streams, comms) -> None:
    """`output`, on the GPU of `root`, becomes the sum of all tensors."""
    if not 0 <= root < len(inputs):
        raise RuntimeError("invalid root")
    reduction = _reduction(op, inputs)

    def part(size: int, rank: int) -> ex.Exchange:
        found = ex.reduce_to(size, rank, [inputs[rank]], root, reduction)
        takes = [ex.flat(output)] if rank == root else []
        return found._replace(takes=[takes] * size)

    written = [[output] if rank == root else [] for rank in range(len(inputs))]
    _run(inputs, written, streams, comms, part)


def all_reduce(inputs: _Tensors, outputs: _Tensors, op: int, streams, comms) -> None:
    """Each of `outputs` becomes the sum of all tensors."""
    reduction = _reduction(op, inputs)

    def part(size: int, rank: int) -> ex.Exchange:
        found = ex.all_reduce(size, rank, [inputs[rank]], reduction)
        return found._replace(takes=[[ex.flat(outputs[rank])]] * size)

    _run(inputs, [[out] for out in outputs], streams, comms, part)


def all_gather(inputs: _Tensors, outputs: _Tensors, streams, comms) -> None:
    """Each of `outputs` becomes all tensors, one after the other."""
    _run(
        inputs, [[out] for out in outputs], streams, comms,
        lambda size, rank: operations.all_gather_into(
            size, rank, outputs[rank], inputs[rank]
        ),
    )  # fmt: skip


def reduce_scatter(
    inputs: _Tensors, outputs: _Tensors, op: int, streams, comms
) -> None:
    """Each of `outputs` becomes its part of the sum of all tensors."""
    reduction = _reduction(op, inputs)
    _run(
        inputs, [[out] for out in outputs], streams, comms,
        lambda size, rank: operations.reduce_scatter_from(
            size, rank, outputs[rank], inputs[rank], reduction
        ),
    )  # fmt: skip


def _reduction(op: int, inputs: _Tensors) -> ex.Reduction:
    dtype = inputs[0].dtype if inputs else torch.float32
    return ex.reduction_named(_REDUCTIONS[op], dtype)


def _check(inputs: _Tensors, written: list[list[torch.Tensor]]) -> None:
    """Refuse what PyTorch refuses before it calls NCCL, in its words."""
    if not inputs:
        raise RuntimeError("input sequence can't be empty")
    if len(written) != len(inputs):
        raise RuntimeError(
            "inputs and outputs sequences have to be of the same length, but got input "
            f"of length {len(inputs)} and output of length {len(written)}"
        )
    first = inputs[0]
    for tensor in [*inputs, *(tensor for its in written for tensor in its)]:
        if not tensor.is_cuda or tensor.is_sparse:
            raise RuntimeError(
                "input and output elements have to be cuda dense Tensors"
            )
        if tensor.dtype != first.dtype:
            raise RuntimeError(
                "all inputs and outputs must be of the same Tensor dtype"
            )
        if not tensor.is_contiguous():
            raise RuntimeError("all inputs and outputs have to be contiguous")
    if any(tensor.numel() != first.numel() for tensor in inputs):
        raise RuntimeError("all inputs must have the same number of elements")
    if len({tensor.get_device() for tensor in inputs}) < len(inputs):
        raise RuntimeError("inputs must be on unique devices")
    for tensor, its in zip(inputs, written, strict=True):
        if any(one.get_device() != tensor.get_device() for one in its):
            raise RuntimeError("input and output must be on the same device")


def _run(
    inputs: _Tensors,
    written: list[list[torch.Tensor]],
    streams,
    comms,
    part: Callable[[int, int], ex.Exchange],
) -> None:
    """A collective of one tensor on each of several GPUs.

    Args:
        inputs: one for each GPU; its place is the GPU's rank.
        written: what is written on each GPU.
        streams: one for each GPU, or None; None is the current one.
        comms: communicators of the program's own.
        part: what a rank gives and takes: (size, rank) -> `Exchange`.
    """
    __tracebackhide__ = True
    if comms is not None:
        raise NotSimulated("torch.cuda.nccl with communicators of its own")
    _check(inputs, written)
    runtime, size = state.current(), len(inputs)
    clock, gpus = runtime.clock, [gpu_of(tensor) for tensor in inputs]
    keys = []
    for gpu, stream in zip(gpus, streams or [None] * size, strict=True):
        number = runtime.stream_of(gpu) if stream is None else stream.stream_id
        keys.append((gpu.index, number))
    for tensor in [*inputs, *(tensor for its in written for tensor in its)]:
        memory = memory_of(tensor)
        if memory is not None and memory.arriving is not None:
            memory.arriving.settle()
    with ex.plain():
        exchanges = [part(size, rank) for rank in range(size)]
    for key in (*keys[1:], *keys[1:]):  # twice, so that each comes after all
        runtime.sanitizer.join_streams([keys[0], key])
    exchanges = [
        tell_sanitizer(runtime, key, exchange, its)
        for key, exchange, its in zip(keys, exchanges, written, strict=True)
    ]
    name, nbytes = exchanges[0].name, max(e.nbytes for e in exchanges)
    topology = Topology(gpus[0].card, len(runtime.gpus))
    members = [gpu.index for gpu in gpus]
    seconds = collective_seconds(name, nbytes, members, topology)
    clock.settle(keys)
    with clock.lock:  # nobody else can settle what has begun
        meetings = [
            clock.meet(gpu, stream, stream, name, nbytes, seconds)
            for gpu, (_, stream) in zip(gpus, keys, strict=True)
        ]
        start = max(meeting.ready for meeting in meetings)
        last = [meeting.ready for meeting in meetings].index(start)
        group = ", ".join(gpu.name for gpu in gpus)
        for meeting in meetings:
            clock.settled(meeting, start, start + seconds, group, last)
    _deliver(exchanges)


def _deliver(exchanges: list[ex.Exchange]) -> None:
    """Put what every rank gives where the others take it."""
    with ex.plain():
        given = [torch.cat(e.gives) if e.gives else None for e in exchanges]
        moved = []
        for rank, exchange in enumerate(exchanges):
            cuts = [
                None if its is None else its[slice(*giver.parts[rank])]
                for giver, its in zip(exchanges, given, strict=True)
            ]
            if exchange.reduction is None:
                moved += zip(exchange.takes, cuts, strict=True)
            elif exchange.takes[0]:
                total = ex.reduce([cut.clone() for cut in cuts], exchange.reduction)
                moved.append((exchange.takes[0], total))
        for pieces, value in moved:  # only now: an output may be an input
            for piece in pieces:
                piece.copy_(value[: piece.numel()].view(piece.shape))
                value = value[piece.numel() :]


C_FUNCTIONS = {
    f"_nccl_{function.__name__}": function
    for function in (broadcast, reduce, all_reduce, all_gather, reduce_scatter)
}
