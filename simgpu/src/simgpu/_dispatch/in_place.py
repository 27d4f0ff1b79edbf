"""Where backward works in place on CUDA, and cannot here.

PyTorch's engine adds a gradient to the one that is there already, and some formulas
write into zeros that they have just made, if nobody else holds these
(`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp,
`areAnyTensorSubclassLike` in FunctionsManual.cpp). Under a dispatch mode neither does,
and the storage of each GPU tensor is also held from Python, by its mark. So the CPU
makes a new tensor, which takes over the block of the first argument.

Leaves out: a first argument that is only a part of its storage. What the engine calls
and what formulas call cannot be told apart: an addition in a formula whose first
argument nobody else holds counts as in place, too.
"""

import functools
import sys
from typing import NamedTuple

import torch

from simgpu._compat import (
    DisableTorchFunction,
    current_autograd_node,
    raw_run_backward,
    storage_use_count,
)
from simgpu._device.gpu import Gpu
from simgpu._dispatch.cpp_tensors import is_called_by_engine
from simgpu._dispatch.operation import Operation, handles, operation_of
from simgpu._dispatch.operation_call import Call
from simgpu._dispatch.own_work import unseen
from simgpu._dispatch.placement import memory_of, storage_of


class _Holders(NamedTuple):
    """How many hold the first argument of an operation: three counts of references."""

    by_object: int  # the Python object: C++, and the simulator on its way here
    by_tensor: int  # C++'s tensor: the engine, PyTorch's lists, the Python object
    by_storage: int  # the storage: the tensor, and the Python object of it


# What is counted where only the engine, or only a formula, holds the first argument.
# It differs between versions of Python and PyTorch, so it is measured (`measure`).
_fewest: dict[str, _Holders] = {}
_measuring = False  # operations on the CPU are being counted now


@handles("add", "scatter", "scatter_add", "index_add", "put")
def run_on_common_gpu(call: Call):
    """The usual way, in place where CUDA would be."""
    __tracebackhide__ = True
    return run(call, call.common_gpu())


def run(call: Call, gpu: Gpu | None):
    """`call.run_on(gpu)`, on the block of its first argument where CUDA would do so."""
    __tracebackhide__ = True
    node = current_autograd_node()
    if node is None:
        return call.run_on(gpu)
    if gpu is None:
        if _measuring:
            _fewest.setdefault(_kind(call), _count_holders(call))
        return call.run_on(gpu)
    if not _is_in_place(call):
        return call.run_on(gpu)
    compute, memory = call.func, memory_of(call.args[0])

    def compute_in_place(*args, **kwargs):
        out = compute(*args, **kwargs)
        storage = storage_of(out)
        if storage.nbytes() == memory.nbytes:
            storage._simgpu = memory
        return out

    compute_in_place.asks = compute  # of which it only changes the result
    call.func = compute_in_place
    call.operation = _in_place(call.operation)
    return call.run_on(gpu)


@functools.cache
def _in_place(operation: Operation) -> Operation:
    """`add_` of `add`."""
    packet = getattr(torch.ops.aten, f"{operation.name}_")
    return operation_of(getattr(packet, operation.func._overloadname))


def _kind(call: Call) -> str:
    """`index_backward` keeps a list of its arguments, which holds them once more."""
    return "index_put" if call.operation.name == "index_put" else "add"


def _count_holders(call: Call) -> _Holders:
    """Who holds the first argument of an operation that C++ has called."""
    by_object = sys.getrefcount(call.args[0])
    first = call.args[0]
    with DisableTorchFunction():  # no mode need see this
        by_storage = storage_use_count(storage_of(first)._cdata)
        return _Holders(by_object, first._use_count(), by_storage)


def is_measured() -> bool:
    """Whether it is known what is counted where only C++ holds a tensor."""
    return bool(_fewest)


def measure() -> None:
    """Count the references to what only C++ holds, in a backward pass of our own.

    It runs on the CPU, on the way that operations on GPU tensors take: under the
    dispatch mode and no other.
    """
    global _measuring
    _measuring = True
    try:
        with (
            DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad(),
            unseen(),
        ):  # fmt: skip
            x = torch.ones(2, requires_grad=True)
            y = x.clone()
            # the engine adds two gradients of y; a formula puts one of x into zeros
            loss = (y.neg() + y.neg()).sum() + x[torch.tensor([0])].sum()
            ones = torch.ones(())
            raw_run_backward((loss,), (ones,), False, False, (x,), True, False)
    finally:
        _measuring = False


def _is_in_place(call: Call) -> bool:
    """Whether C++ alone holds the first argument, and asks for no gradient of it."""
    fewest = _fewest.get(_kind(call))
    if (
        fewest is None  # backward began where nothing is measured: in C++
        or sys.getrefcount(call.args[0]) > fewest.by_object
        or torch.is_grad_enabled()
        or not is_called_by_engine(call.runtime)
    ):
        return False
    first = call.args[0]
    with DisableTorchFunction():  # no mode need see this
        if any(tensor.layout is not torch.strided for tensor in call.tensors):
            return False
        storage = storage_of(first)
        return (
            first._use_count() <= fewest.by_tensor
            and storage_use_count(storage._cdata) <= fewest.by_storage
            and first.nbytes == storage.nbytes()
            and memory_of(first) is not None
        )
