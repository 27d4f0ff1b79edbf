"""Operations that call a group by themselves: `_c10d_functional`, DTensor's own.

They return new tensors, and `wait_tensor` makes the current stream wait for one.
"""

import torch

from simgpu._compat import FakeWork, process_group_named, register_work
from simgpu._dispatch.mode import modes_in_this_thread
from simgpu._dispatch.operation import handles
from simgpu._dispatch.operation_call import Call
from simgpu._dispatch.placement import memory_of, place
from simgpu._distributed import (
    checks,
    collectives,
    flight_entries,
    flight_recorder,
    operations,
    profiling,
    work,
)
from simgpu._distributed import exchange as exchanges
from simgpu._distributed.groups import communicator_of
from simgpu._errors import NotSimulated

_OPS = {"sum": "SUM", "avg": "AVG", "product": "PRODUCT", "min": "MIN", "max": "MAX",
        "band": "BAND", "bor": "BOR", "bxor": "BXOR"}  # fmt: skip


# those of which PyTorch compares the fingerprints: as which operation of c10d
_COMPARED = {"allreduce_": "allreduce_", "broadcast": "broadcast_",
             "broadcast_": "broadcast_"}  # fmt: skip


@handles("_c10d_functional::")
def run_functional(call: Call):
    """An operation of `_c10d_functional`."""
    __tracebackhide__ = True
    name = call.func._schema.name.partition("::")[2]
    if name in ("wait_tensor", "wait_tensors"):
        return _wait(call)
    gpu = next(filter(None, call.gpus), None)
    named = {argument.name: value for argument, value in call.named_arguments()}
    communicator = _communicator(named)
    if gpu is None or communicator is None:  # also what only wraps a tensor
        made = call.func(*call.args, **call.kwargs)
        for tensor in made if isinstance(made, (list, tuple)) else [made]:
            place(tensor, gpu)
        return made
    run = _RUN.get(name.replace("_coalesced", ""))
    if run is None:
        raise NotSimulated(call.func._schema.name)
    several = "inputs" in named
    inputs = named["inputs"] if several else [named["input"]]
    kind = "allreduce_" if name.startswith("all_reduce") else name
    checks.check_dtype(kind, inputs, gpu)
    if communicator.fingerprints is not None and kind in _COMPARED:
        communicator.fingerprints.compare(_COMPARED[kind], (inputs,))
    profiling.note(name, inputs, _group(named))
    outputs = [
        run(_Functional(call, communicator, gpu, named), tensor) for tensor in inputs
    ]
    return outputs if several else outputs[0]


@handles("_dtensor::shard_dim_alltoall")
def run_shard_dim_alltoall(call: Call):
    """A DTensor's part, cut along another dimension: an all-to-all, and its wait.

    As in PyTorch's C++: the parts for the ranks, along `shard_dim`, are copied;
    what comes is put together along `gather_dim`.
    """
    __tracebackhide__ = True
    named = {argument.name: value for argument, value in call.named_arguments()}
    tensor, gpu = named["input"], call.gpus[0]
    communicator = _communicator(named)
    if gpu is None or communicator is None:
        made = call.func(*call.args, **call.kwargs)
        return place(made, gpu)
    checks.check_dtype("alltoall_", [tensor], gpu)
    f = _Functional(call, communicator, gpu, named)
    shard_dim, gather_dim = named["shard_dim"], named["gather_dim"]
    length = tensor.shape[shard_dim] // f.size
    given = f.on_gpu(lambda: [
        tensor.narrow(shard_dim, i * length, length).contiguous()
        for i in range(f.size)
    ])  # fmt: skip
    taken = f.on_gpu(lambda: [torch.empty_like(part) for part in given])
    with exchanges.plain():
        exchange = exchanges.all_to_all(f.size, f.rank, taken, given)
    profiling.note("alltoall_", given, _group(named))
    launched = collectives.launch(call.runtime, communicator, gpu, exchange)
    if communicator.record is not None:
        sides = [flight_entries.told(one) for one in (given, taken)]
        flight_recorder.note(
            call.runtime, communicator, "alltoall_", tuple(sides), [launched]
        )
    work.Launched([launched], taken).wait()
    return f.on_gpu(lambda: torch.cat(taken, gather_dim))


@handles("c10d::check_for_nan")
def run_check_for_nan(call: Call):
    """A kernel that looks for NaN in a tensor; it has no group.

    Raises:
        RuntimeError: if there is one, in the words that PyTorch has for the CPU.
    """
    __tracebackhide__ = True
    if call.runtime.peers is not None:
        return None  # in a dry run all is well
    return call.run_on(call.common_gpu())


def _group(named: dict):
    """The group among the arguments, which is given itself or by its name."""
    group = named.get("group_name")
    return process_group_named(group) if isinstance(group, str) else group


def _communicator(named: dict):
    group = _group(named)
    return None if group is None else communicator_of(group)


class _Functional:
    """One functional collective on its way."""

    def __init__(self, call: Call, communicator, gpu, named: dict):
        self.call, self.communicator, self.gpu = call, communicator, gpu
        self.named = named
        self.size, self.rank = len(communicator.ranks), communicator.member

    def reduction(self, tensor) -> exchanges.Reduction:
        name = self.named["reduce_op"].lower()
        if name not in _OPS:
            raise ValueError(f"Unknown reduce_op {name}")
        return exchanges.reduction_named(_OPS[name], tensor.dtype)

    def launch(
        self, exchange: exchanges.Exchange, given: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        launched = collectives.launch(
            self.call.runtime, self.communicator, self.gpu, exchange
        )
        if self.communicator.record is not None:
            flight_recorder.note(
                self.call.runtime, self.communicator, _C10D[exchange.name],
                (flight_entries.told(given), flight_entries.told(output)), [launched],
            )  # fmt: skip
        memory_of(output).awaited = work.Launched([launched], [output])
        register_work(output, FakeWork())  # PyTorch warns of what nobody has waited for
        return output

    def on_gpu(self, make) -> torch.Tensor:
        """A tensor that an operation on the GPU makes."""
        with modes_in_this_thread(self.call.runtime), torch.no_grad():
            return make()

    def rows(self, tensor, count: int) -> torch.Tensor:
        """An empty tensor like this one, with so many rows."""
        shape = (count, *tensor.shape[1:])
        return self.on_gpu(lambda: tensor.new_empty(shape))

    def contiguous(self, tensor) -> torch.Tensor:
        if tensor.is_contiguous():
            return tensor
        return self.on_gpu(tensor.contiguous)


def _all_reduce(f: _Functional, tensor):
    out = f.on_gpu(lambda: tensor.clone(memory_format=torch.contiguous_format))
    return _all_reduce_in_place(f, out)


def _all_reduce_in_place(f: _Functional, tensor):
    with exchanges.plain():
        exchange = exchanges.all_reduce(f.size, f.rank, [tensor], f.reduction(tensor))
    return f.launch(exchange, tensor, tensor)


def _broadcast(f: _Functional, tensor):
    out = f.on_gpu(lambda: tensor.clone(memory_format=torch.contiguous_format))
    return _broadcast_in_place(f, out)


def _broadcast_in_place(f: _Functional, tensor):
    with exchanges.plain():
        exchange = exchanges.broadcast(f.size, f.rank, [tensor], f.named["src"])
    return f.launch(exchange, tensor, tensor)


def _all_gather(f: _Functional, tensor):
    given = f.contiguous(tensor)
    out = f.named.get("out")
    if out is None:
        rows = given.shape[0] if given.dim() else 1
        out = f.rows(given, f.size * rows)
    with exchanges.plain():
        exchange = operations.all_gather_into(f.size, f.rank, out, given)
    return f.launch(exchange, given, out)


def _reduce_scatter(f: _Functional, tensor):
    given = f.contiguous(tensor)
    out = f.named.get("out")
    if out is None:
        out = f.rows(given, given.shape[0] // f.size)
    with exchanges.plain():
        reduction = f.reduction(given)
        exchange = operations.reduce_scatter_from(f.size, f.rank, out, given, reduction)
    return f.launch(exchange, given, out)


def _all_to_all(f: _Functional, tensor):
    given = f.contiguous(tensor)
    splits = f.named["output_split_sizes"], f.named["input_split_sizes"]
    out = f.rows(given, sum(splits[0]))
    with exchanges.plain():
        exchange = operations.all_to_all_single(f.size, f.rank, out, given, *splits)
    return f.launch(exchange, given, out)


_C10D = {  # what C++ calls for each
    "all_reduce": "allreduce_", "broadcast": "broadcast_",
    "all_gather": "_allgather_base_", "reduce_scatter": "_reduce_scatter_base_",
    "all_to_all": "alltoall_base_",
}  # fmt: skip
_RUN = {
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce_in_place,
    "broadcast": _broadcast,
    "broadcast_": _broadcast_in_place,
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_out": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_out": _reduce_scatter,
    "all_to_all_single": _all_to_all,
}


def _wait(call: Call):
    """`wait_tensor`, or `wait_tensors` (since 2.15), which has a list."""
    given = call.args[0]
    foreign = False  # something is not a simulated GPU's, so PyTorch knows of its work
    for tensor in given if isinstance(given, (list, tuple)) else [given]:
        memory = memory_of(tensor)
        if memory is None:
            foreign = True
        elif memory.awaited is not None:
            awaited, memory.awaited = memory.awaited, None
            awaited.wait()
            with exchanges.plain():  # PyTorch's registry is told
                torch.ops._c10d_functional.wait_tensor(tensor)
    return call.func(*call.args, **call.kwargs) if foreign else given
