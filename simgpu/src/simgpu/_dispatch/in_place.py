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

import torch

from simgpu._compat import (
    DisableTorchFunction,
    current_autograd_node,
    storage_use_count,
)
from simgpu._device.gpu import Gpu
from simgpu._dispatch.call import Call
from simgpu._dispatch.cpp_tensors import is_called_by_engine
from simgpu._dispatch.operation import Operation, handles, operation_of
from simgpu._dispatch.placement import memory_of, storage_of

# Who holds the first argument where only the engine or a formula does. Its tensor: C++,
# PyTorch's list of arguments twice, and the Python object (`index_backward`: also the
# list whose classes it looks at); its storage: the tensor, and the Python object; the
# Python object: C++, `args`, `Call.tensors`, and who counts.
_HOLD_TENSOR, _HOLD_TENSOR_TO_INDEX, _HOLD_STORAGE, _HOLD_OBJECT = 4, 5, 2, 4


@handles("add", "scatter", "scatter_add", "index_add", "masked_fill", "put")
def run_on_common_gpu(call: Call):
    """The usual way, in place where CUDA would be."""
    __tracebackhide__ = True
    return run(call, call.common_gpu())


def run(call: Call, gpu: Gpu | None):
    """`call.run_on(gpu)`, on the block of its first argument where CUDA would do so."""
    __tracebackhide__ = True
    node = current_autograd_node()
    if node is None or gpu is None or not _is_in_place(call):
        return call.run_on(gpu)
    compute, memory = call.func, memory_of(call.args[0])

    def compute_in_place(*args, **kwargs):
        out = compute(*args, **kwargs)
        storage = storage_of(out)
        if storage.nbytes() == memory.nbytes:
            storage._simgpu = memory
        return out

    call.func = compute_in_place
    call.operation = _in_place(call.operation)
    return call.run_on(gpu)


@functools.cache
def _in_place(operation: Operation) -> Operation:
    """`add_` of `add`."""
    packet = getattr(torch.ops.aten, f"{operation.name}_")
    return operation_of(getattr(packet, operation.func._overloadname))


def _is_in_place(call: Call) -> bool:
    """Whether C++ alone holds the first argument, and asks for no gradient of it."""
    if (
        sys.getrefcount(call.args[0]) > _HOLD_OBJECT
        or torch.is_grad_enabled()
        or not is_called_by_engine(call.runtime)
    ):
        return False
    indexes = call.operation.name == "index_put"
    first = call.args[0]
    with DisableTorchFunction():  # no mode need see this
        if any(tensor.layout is not torch.strided for tensor in call.tensors):
            return False
        storage = storage_of(first)
        return (
            first._use_count() <= (_HOLD_TENSOR_TO_INDEX if indexes else _HOLD_TENSOR)
            and storage_use_count(storage._cdata) <= _HOLD_STORAGE
            and first.nbytes == storage.nbytes()
            and memory_of(first) is not None
        )
