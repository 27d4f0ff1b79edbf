"""The operations of c10d on simulated GPUs: checked as NCCL does, then launched.

`torch.distributed` is PyTorch's own, with DDP's reducer in C++; it calls operations of
`c10d`, which the dispatch mode sees.
"""

import os
import sys

import torch

from simgpu import _runtime as state
from simgpu._compat import (
    Work,
    current_autograd_node,
    current_graph_task_id,
    raw_end_coalescing,
    raw_run_backward,
    raw_start_coalescing,
    tree_leaves,
)
from simgpu._dispatch import sanitizing, versions
from simgpu._dispatch.operation import handles
from simgpu._dispatch.operation_call import Call
from simgpu._dispatch.placement import blocks_of, gpu_of, memory_of, place
from simgpu._distributed import (
    checks,
    flight_entries,
    flight_recorder,
    gloo_waits,
    messages,
    nccl,
    operations,
    profiling,
    subjects,
    work,
)
from simgpu._distributed import (
    exchange as exchanges,
)
from simgpu._distributed.collective import Channel, Collective
from simgpu._distributed.communicator import Communicator
from simgpu._distributed.groups import communicator_of
from simgpu._frames import called_from
from simgpu._timing import collective_cost

_LISTS = {"allgather_": 0, "reduce_scatter_": 1}  # which argument has the list
_LEAF = "a leaf Variable that requires grad is being used in an in-place operation."
_DISTRIBUTED = os.path.dirname(torch.distributed.__file__) + os.sep
_ENGINE = raw_run_backward.__code__


@handles("c10d::")
def run_collective(call: Call):
    """An operation of c10d."""
    __tracebackhide__ = True
    func, args = call.func, call.args
    name = func._schema.name.partition("::")[2]
    group = messages.group_in(args)
    tensors = [
        x for x in tree_leaves((args, call.kwargs)) if isinstance(x, torch.Tensor)
    ]
    communicator = communicator_of(group)
    if name == "barrier" and communicator is not None:
        return _run_barrier(call, communicator)
    checks.check(name, args, group, communicator, tensors)
    if communicator is None or gpu_of(tensors[0]) is None:
        return _run_elsewhere(call, tensors)
    gpu = gpu_of(tensors[0])
    if communicator.fingerprints is not None:
        communicator.fingerprints.compare(name, args)
    for tensor in tensors:
        place(tensor, gpu)
    if name in ("send", "recv_"):
        return _run_message(call, communicator, gpu)
    thread = call.runtime.thread
    factor, thread.premultiplier = thread.premultiplier, None
    with exchanges.plain():
        found = operations.exchanges(call, group.size(), group.rank(), factor)
    flat = _flat_copy(name, args, gpu) if nccl.flattens(communicator) else None
    if profiling.is_on():
        profiling.note(name, messages.given_by(name, args), group)
    is_async = _argument(call, "async_op", True)
    launched = [
        launch(call.runtime, communicator, gpu, exchange, is_async=is_async)
        for exchange in found
    ]
    if communicator.record is not None:
        sides = flight_entries.sides_of(name, args)
        flight_recorder.note(call.runtime, communicator, name, sides, launched)
    if communicator.batch is not None:
        communicator.batch += launched
    if is_async and flat is not None:
        launched[0].given.append(flat)
    outputs = args[0]
    written = [x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor)]
    flat = flat if name == "allgather_" else None
    if flat is not None:  # of all collectives, the one that ends in `copy_`
        _refuse_leaves(written)
        versions.count(written)
    done = _work(communicator, launched, written, name, flat=flat)
    _wait_where_nobody_will(call.runtime, done, is_async)
    return _results(call, outputs, done)


def _refuse_leaves(written: list) -> None:
    __tracebackhide__ = True
    if torch.is_grad_enabled() and any(t.requires_grad and t.is_leaf for t in written):
        raise RuntimeError(_LEAF)


def _flat_copy(name: str, args, gpu) -> torch.Tensor | None:
    """The tensor through which NCCL gathers or scatters lists, without values.

    PyTorch makes it on the current stream, for tensors of one shape (`newLikeFlat`).
    """
    if name not in _LISTS:
        return None
    tensors = args[_LISTS[name]][0]
    if len({tensor.shape for tensor in tensors}) != 1:
        return None
    like = tensors[0]
    with exchanges.plain():
        flat = torch.empty((len(tensors), *like.shape), dtype=like.dtype)
    return place(flat, gpu)


def _work(communicator: Communicator, launched: list, written: list, *how,
          **more) -> Work:  # fmt: skip
    """A `Work` as the engine of the group makes it; `work.Launched` says of what."""
    is_new_engine = not nccl.flattens(communicator)
    return work.new(launched, written, *how, is_new_engine=is_new_engine, **more)


def _argument(call: Call, name: str, default):
    for argument, value in call.named_arguments():
        if argument.name == name:
            return value
    return default


def _results(call: Call, outputs, done: Work):
    """What the operation returns: its outputs and a `Work`, or a `Work`."""
    boxed = Work.boxed(done)
    return boxed if len(call.func._schema.returns) == 1 else (outputs, boxed)


def _run_elsewhere(call: Call, tensors):
    """Another backend, such as gloo, has these tensors."""
    peers = call.runtime.peers
    if peers is not None:
        return _run_alone(call, tensors, peers)
    out = gloo_waits.run(call, call.runtime.cluster, call.runtime.awaited_of_gloo)
    gpu = gpu_of(tensors[0]) if tensors else None
    for tensor in tree_leaves(out):
        if isinstance(tensor, torch.Tensor):
            place(tensor, gpu)
    return out


def _run_alone(call: Call, tensors, peers):
    """The other ranks of another backend give what this one gives, in no time."""
    group = messages.group_in(call.args)
    name = call.func._schema.name.partition("::")[2]
    if name not in (
        "barrier",
        "monitored_barrier_",
        "send",
        "recv_",
        "recv_any_source_",
    ):
        with exchanges.plain():
            for exchange in operations.exchanges(call, group.size(), group.rank()):
                peers.deliver(exchange, group.size(), group.rank())
    done = work.new([], [t for t in tree_leaves(call.args[0])
                         if isinstance(t, torch.Tensor)])  # fmt: skip
    return _results(call, call.args[0], done)


def _run_barrier(call: Call, communicator: Communicator):
    """NCCL's is a collective of almost nothing, for which the host waits."""
    if communicator.fingerprints is not None:
        communicator.fingerprints.compare("barrier", ())
    runtime = call.runtime
    runtime.initialize_in_cpp()
    devices = _argument(call, "device_ids", ())
    gpu = communicator.gpu_of_barrier(devices, runtime.gpus)
    if not devices:
        what = f"barrier ({called_from()})"
        communicator.connect(gpu, runtime.clock, what, guess=True)
    is_async = _argument(call, "async_op", True)
    profiling.note("barrier", [], messages.group_in(call.args))
    exchange = exchanges.barrier(len(communicator.ranks))
    launched = launch(runtime, communicator, gpu, exchange, is_async=is_async)
    if communicator.record is not None:
        sides = flight_recorder.BARRIER
        flight_recorder.note(runtime, communicator, "barrier", sides, [launched])
    done = _work(communicator, [launched], [], "barrier", host_waits=True)
    if not is_async:
        work.wait(done)
    return Work.boxed(done)


# -- messages --------------------------------------------------------------------------


def _run_message(call: Call, communicator: Communicator, gpu):
    """`send` or `recv`: a message between two ranks."""
    (tensor,), peer = call.args[0], call.args[2]
    sends = call.func._schema.name == "c10d::send"
    me = communicator.member
    ends = (me, peer) if sends else (peer, me)
    with exchanges.plain():
        exchange = exchanges.send(tensor) if sends else exchanges.receive(tensor)
    channel = communicator.pair(*ends, sends)
    arrow = f"send {me}->{peer}" if sends else f"recv {me}<-{peer}"
    profiling.note(arrow, [tensor], messages.group_in(call.args))
    if communicator.batch is not None:
        launched = _launch_in_batch(call.runtime, communicator, gpu, exchange, channel)
    else:
        stream = communicator.stream(communicator.ranks[peer])
        launched = launch(call.runtime, communicator, gpu, exchange, channel, stream)
    if communicator.record is not None:
        flight_recorder.note_message(
            call.runtime, communicator, arrow, tensor, launched
        )
    name = "send" if sends else "recv_"
    return Work.boxed(_work(communicator, [launched], [tensor], name))


def _launch_in_batch(runtime, communicator, gpu, exchange, channel) -> Collective:
    """Messages of one batch go at the same time, on the stream of the group."""
    stream = communicator.stream()
    beside = communicator.batch[-1].meeting if communicator.batch else None
    launched = launch(
        runtime, communicator, gpu, exchange, channel, stream, beside=beside
    )
    communicator.batch.append(launched)
    return launched


def start_coalescing(group, device) -> None:
    """`batch_isend_irecv` begins, or several collectives that go together."""
    communicator = communicator_of(group)
    if communicator is None or torch.device(device).type != "cuda":
        raw_start_coalescing(group, device)
    else:
        communicator.batch = []


def end_coalescing(group, device) -> Work:
    """A `Work` for all that was told since."""
    communicator = communicator_of(group)
    if communicator is None or communicator.batch is None:
        return raw_end_coalescing(group, device)
    batch, communicator.batch = communicator.batch, None
    communicator.end_batch(batch)
    if communicator.record is not None:
        flight_recorder.note_batch(state.current(), communicator, batch)
    return _work(communicator, batch, [])


# -- launching -------------------------------------------------------------------------


def launch(runtime, communicator: Communicator, gpu, exchange: exchanges.Exchange,
           channel: Channel | None = None, stream: int | None = None, *,
           is_async: bool = True, beside=None) -> Collective:  # fmt: skip
    """Launch a collective on a GPU of this rank.

    Args:
        runtime: of the simulator.
        communicator: of its group.
        gpu: of its tensors.
        exchange: what this rank gives and takes.
        channel: of a message between two ranks; None: the group's.
        stream: the number of NCCL's stream; None: the group's.
        is_async: on a stream of NCCL's; else on the current one, as PyTorch does it
            since 2.8.
        beside: the place in the schedule of a message that goes at the same time.
    """
    __tracebackhide__ = True
    where = called_from()
    if channel is None or stream is None or communicator.batch is not None:
        guess = exchange.name == "barrier" and communicator.guessed
        communicator.connect(gpu, runtime.clock, f"{exchange.name} ({where})", guess)
    channel = channel or communicator.channel(gpu)
    current = runtime.stream_of(gpu)
    stream = current if not is_async else (stream or communicator.stream())
    key, clock = (gpu.index, stream), runtime.clock
    written = list({id(t): t for taken in exchange.takes for t in taken}.values())
    for tensor in (*exchange.gives, *written):  # does it come from a collective itself?
        memory = memory_of(tensor)
        if memory is not None and memory.arriving is not None:
            memory.arriving.settle()
    if stream != current:
        runtime.sanitizer.watch_accesses()
        if beside is None:
            position = clock.record(gpu.index, current)
            clock.stream_waits(gpu.index, stream, position)
            clock.forget(position)
    exchange = tell_sanitizer(runtime, key, exchange, written)
    seconds = collective_cost.collective_seconds(
        exchange.name,
        communicator.bytes_of(exchange),
        channel.group,
        communicator.cluster.topology,
    )
    title = _title(communicator, exchange, channel)
    begun = clock.record(*key) if communicator.is_timed else None
    with clock.lock:  # no other thread meets one that nobody can settle
        meeting = clock.meet(
            gpu, stream, current, title, exchange.nbytes, seconds, beside
        )
        launched = communicator.collective(channel, exchange, meeting, clock, where)
        if profiling.is_on():
            meeting.about = profiling.about(exchange, communicator, channel)
    launched.post(exchange)
    launched.begun, launched.position = begun, clock.record(*key)
    if stream != current:
        launched.given = [*exchange.gives, *written]
        stashed = communicator.stashed
        stashed[:] = [one for one in stashed if not one.release_if_ended()]
        stashed.append(launched)
    for tensor in written:
        memory = memory_of(tensor)
        if memory is not None:
            memory.arriving = launched
    return launched


def tell_sanitizer(runtime, key, exchange: exchanges.Exchange,
                   written: list) -> exchanges.Exchange:  # fmt: skip
    """A stream reads what this rank gives and writes what it takes.

    Returns what it gives then: a racy read, while races are shown, finds older values.
    """
    __tracebackhide__ = True
    sanitizer = runtime.sanitizer
    if not sanitizer.watching:
        return exchange
    reads = [("input", *place) for t in exchange.gives for place in blocks_of(t)]
    writes = [("output", *place) for t in written for place in blocks_of(t)]
    name = "recv" if exchange.name == "send" and not exchange.gives else exchange.name
    racy = sanitizing.access(sanitizer, f"c10d::{name}", key, reads, writes)
    with exchanges.plain():
        old = {
            id(reads[i][1]): sanitizing.as_before(*reads[i][1:]).clone() for i in racy
        }
    sanitizing.keep_old_values(sanitizer, key, writes)
    gives = [old.get(id(tensor), tensor) for tensor in exchange.gives]
    return exchange._replace(gives=gives)


def _title(communicator, exchange: exchanges.Exchange, channel: Channel) -> str:
    """How the timeline names it: "all_reduce", "all_gather blocks.0", "send to 1"."""
    if exchange.name == "all_reduce" and _called_by_engine():
        backward = current_graph_task_id()
        return f"all_reduce {communicator.buckets.next(backward)}"
    if exchange.name in ("all_gather", "reduce_scatter", "all_reduce"):
        return f"{exchange.name} {subjects.sharded_module()}".rstrip()
    if exchange.name != "send":
        return exchange.name
    if channel.place == 0 and exchange.gives:
        return f"send to {channel.everyone[1]}"
    return f"recv from {channel.everyone[0]}"


def _wait_where_nobody_will(runtime, done: Work, is_async: bool) -> None:
    """DDP in C++ waits for what it has launched, which is not seen from here."""
    if not is_async:
        return
    if runtime.thread.cpp_waits and not _in_backward():
        work.wait(done)  # in DDP's constructor, or before a forward pass
    elif not _called_by_engine():
        return
    elif current_autograd_node() is None:
        work.wait(done)  # backward is over: the reducer of a static graph does all now
    else:
        work.before_backward_ends(work.launched(done).wait)


def _in_backward() -> bool:
    return current_graph_task_id() != -1


def _called_by_engine() -> bool:
    """Whether C++ calls, in backward, with no Python between: DDP's reducer."""
    if not _in_backward():
        return False
    frame = sys._getframe(2)
    while frame is not None and not _is_caller(frame.f_code):
        frame = frame.f_back
    return frame is not None and frame.f_code is _ENGINE


def _is_caller(code) -> bool:
    """Whether a frame is the engine's, or of a module of torch.distributed."""
    return code is _ENGINE or code.co_filename.startswith(_DISTRIBUTED)
