"""What a program would cost, without running it: `simgpu.estimate`.

Models: the function runs with tensors that have shapes and no values, on one GPU with
the allocator and the clock of any other simulated GPU. So it costs what the same
program costs there with values, to the byte and to the same simulated seconds, but no
memory and little time here. Leaves out what the simulator leaves out
(`_timing/cost.py`) and everything that depends on values. `nn.LSTM` and `nn.GRU` run
step by step here and not in one kernel, so that they cost more than with values.
"""

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from simgpu import _startup as startup
from simgpu._device.cards import Card, find_card
from simgpu._device.sizes import parse_memory
from simgpu._dispatch.placement import place
from simgpu._dispatch.without_values import CallWithoutValues
from simgpu._request import Request
from simgpu._runtime import Runtime
from simgpu._timing.collective_cost import Choice, choose
from simgpu._timing.timeline import Timeline
from simgpu._timing.topology import Network, Topology


class Kernels(NamedTuple):
    """The kernels of one operation of PyTorch."""

    count: int
    seconds: float  # simulated, of all of them


@dataclass(frozen=True)
class Estimate:
    """What a function would cost on a card."""

    seconds: float  # simulated, until the host and the GPU are done
    kernels: int  # as the simulator counts them: one for each operation
    peak_bytes: int  # the most that tensors take at a time, those it is given included
    peak_reserved_bytes: int  # the most that the caching allocator holds
    kernel_seconds: float  # of all kernels, one after the other
    host_seconds: float  # until the host has launched everything
    flops: int  # of matrix products, convolutions and fused attention
    # such as "addmm", the longest first
    by_operation: dict[str, Kernels] = field(repr=False)


def estimate(
    function: Callable,
    *arguments: object,
    card: str | Card = "A100",
    memory: int | str | None = None,
) -> Estimate:
    """What `function(*arguments)` would cost on a card, without values.

        with torch.device("meta"):
            model, x = nn.Linear(8192, 8192), torch.empty(1024, 8192)
        simgpu.estimate(lambda model, x: model(x).sum().backward(), model, x)

    The function is code for CUDA as it is: it may make tensors on "cuda", run backward,
    optimizers and autocast, and ask torch.cuda. Whatever is on "meta" among the
    arguments is on the card from the start, in `Module.cuda`'s order; so are modules,
    tensors and optimizers that the function uses by name from around it, or the module
    of which it is a method. Time counts
    from the call until the GPU is done, and starts with an idle card. GPUs that are
    simulated already are left as they are. Gradients of the arguments are afterwards
    what they were before; parameters have no values that could change.

    `GradScaler` is assumed to find no infinite gradient.

    Args:
        function: what to run.
        arguments: of it: tensors on "meta", modules and optimizers with such tensors,
            lists, tuples and dicts of these, and anything else.
        card: a key of `simgpu.CARDS`, such as "H100", a file that `simgpu measure` has
            written, or a `Card` of your own.
        memory: of the card, in bytes or as text ("512MB"); None is all it has. It may
            be more than any card has, to learn what a program would need.

    Raises:
        ValueError: for an unknown card, and arguments that are not on "meta".
        torch.OutOfMemoryError: if it does not fit.
        NotSimulated: if it reads values (`item()`, printing, masks as indices), and for
            collectives.
        RuntimeError: if CUDA is in use for real, or outside the main thread.
    """
    found = find_card(card)
    total = found.total_memory if memory is None else parse_memory(memory)
    runtime = Runtime(Request(1, found, total, "off", memory is None), False)
    runtime.without_values, runtime.call_kind = True, CallWithoutValues
    given = list(_tensors_of(arguments))
    _check(given)
    around = _tensors_of(_used_by(function))
    tensors = [tensor for tensor in (*given, *around) if tensor.is_meta]
    with _same_gradients(tensors), startup.apart(runtime):
        (gpu,) = runtime.gpus
        runtime.initialize()
        for tensor in tensors:
            place(tensor, gpu)
        timeline = Timeline(runtime.clock)
        with timeline.recording() as events:
            function(*arguments)
            host = timeline.host
            torch.cuda.synchronize()
        kernels = [event for event in events if event.kind == "kernel"]
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return Estimate(
            timeline.seconds,
            len(kernels),
            *peaks,
            sum(event.end - event.start for event in kernels),
            host,
            sum(event.flops for event in kernels),
            _by_operation(kernels),
        )


def _check(tensors: list[torch.Tensor]) -> None:
    """Refuse tensors with values, other than an optimizer's counts of steps."""
    for tensor in tensors:
        if tensor.device.type != "meta" and tensor.dim():
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} is on {tensor.device}; "
                'estimate takes tensors on "meta", such as tensor.to("meta") and '
                'module.to("meta")'
            )


@contextlib.contextmanager
def _same_gradients(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Afterwards the tensors have the gradients that they had before."""
    before = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]
    try:
        yield
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient


def _by_operation(kernels: list) -> dict[str, Kernels]:
    """Operation -> its kernels, the longest first."""
    times = defaultdict(list)
    for event in kernels:
        times[event.name].append(event.end - event.start)
    found = {name: Kernels(len(each), sum(each)) for name, each in times.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def _used_by(function: Callable) -> list:
    """What a function uses by name from around it, or what it is a method of."""
    if inspect.ismethod(function):
        return [function.__self__]
    if not inspect.isfunction(function):
        return [function]  # such as a module
    names = inspect.getclosurevars(function)
    return [*names.nonlocals.values(), *names.globals.values()]


def _tensors_of(value) -> Iterator[torch.Tensor]:
    """The tensors in arguments; those of a module in the order of `Module.cuda`."""
    if isinstance(value, torch.Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif isinstance(value, torch.nn.Module):
        for child in value.children():
            yield from _tensors_of(child)
        yield from _tensors_of(list(value.parameters(recurse=False)))
        yield from _tensors_of(list(value.buffers(recurse=False)))
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from _tensors_of(group["params"])
        yield from _tensors_of(list(value.state.values()))
    elif isinstance(value, dict):
        yield from _tensors_of(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_of(item)


def estimate_collective(
    name: str,
    nbytes: int,
    ranks: int = 8,
    card: str | Card = "H100",
    nodes: int = 1,
    network: Network | float | str | None = None,
) -> Choice:
    """What a collective of all ranks of a job would cost, once all of them are there.

        simgpu.estimate_collective("all_reduce", 2**30, ranks=16, nodes=2).seconds

    Args:
        name: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "gather",
            "scatter", "broadcast", "reduce", "send" (between the first rank and the
            last) or "barrier".
        nbytes: of the message as nccl-tests counts it: the larger of what a rank has
            before and after it.
        ranks: of the job, each with a GPU of its own.
        card: a key of `simgpu.CARDS`, such as "H100", a file that `simgpu measure` has
            written, or a `Card` of your own.
        nodes: over which the ranks are spread, as many on each.
        network: of a node, such as "100 Gbit/s" or "400 GB/s EFA", bytes/s, or a
            `Network`; None is 200 Gbit/s of InfiniBand for each rank of the node.

    Returns:
        The algorithm that NCCL would take, simulated seconds, and the bus bandwidth in
        bytes/s.

    Raises:
        ValueError: for an unknown collective or card, a negative size, a network that
            cannot be read, and ranks that cannot be spread over the nodes.
    """
    if nodes < 1 or ranks < 1 or ranks % nodes:
        raise ValueError(f"{ranks} ranks cannot be spread evenly over {nodes} nodes")
    topology = Topology(find_card(card), ranks // nodes, nodes, network)
    members = range(ranks) if name != "send" else {0, ranks - 1}
    return choose(name, nbytes, sorted(members), topology)
