"""`torch.distributed.rpc` beside simulated GPUs.

PyTorch's own agent carries every tensor as one of the CPU. Behind what Python pickles
goes a note: on which GPU each tensor is to be. For a request the caller writes it, with
its device map to the callee; what comes back names the callee's GPUs, and the caller
takes the same map the other way round.

What runs in threads that C++ has started gets our modes in three places: the function
that was called, the backward of Python Functions, and hooks of futures (`work.py`). The
distributed backward itself runs without them: its values are right, and its gradients
are placed when they are asked for. Leaves out: what a call or a distributed backward
costs in time and memory; TorchScript functions with GPU tensors.
"""

import functools
import pickle

import torch
import torch.distributed.autograd
from torch.distributed import rpc
from torch.distributed.rpc import api, internal

from simgpu import _runtime as state
from simgpu._compat import (
    DisableTorchDispatch,
    DisableTorchFunction,
    RPCPickler,
    TorchDispatchMode,
    disable_modes,
    raw_run_rpc_function,
    rpc_agent,
    rpc_pickler,
    tree_leaves,
)
from simgpu._dispatch.mode import modes_in_this_thread
from simgpu._dispatch.named_devices import find_gpu
from simgpu._dispatch.placement import blocks_of, gpu_of, memory_of, parts_of, place
from simgpu._distributed import work
from simgpu._errors import NotSimulated

_MARK = b"simgpu's note"
_LENGTH = 8  # bytes that tell how long the note is
_ONLY_CPU = (
    "TensorPipe RPC backend only supports CPU tensors by default, please move your "
    "tensors to CPU before sending them over RPC, or call `set_device_map` on "
    "`TensorPipeRpcBackendOptions` to explicitly configure device mapping. {} device "
    "mapping is not available for destination {}"
)
_raw_serialize = RPCPickler.serialize
_raw_deserialize = RPCPickler.deserialize
_raw_to_here = rpc.PyRRef.to_here
_raw_agent = rpc.TensorPipeAgent
_raw_get_gradients = torch.distributed.autograd.get_gradients
_raw_backward = torch.distributed.autograd.backward
_raw_invoke = {
    name: getattr(api, name)
    for name in (
        "_invoke_rpc_builtin", "_invoke_remote_builtin", "_invoke_rpc_python_udf",
        "_invoke_remote_python_udf", "_invoke_rpc_torchscript",
        "_invoke_remote_torchscript",
    )
}  # fmt: skip


# -- what travels ----------------------------------------------------------------------


def serialize(pickler, obj) -> tuple[bytes, list[torch.Tensor]]:
    """The pickled object, and the tensors in it as the host has their values."""
    data, tensors = _raw_serialize(pickler, obj)
    if not tensors:
        return data, tensors
    gpus = [gpu_of(tensor) for tensor in tensors]
    sender = rpc_agent().get_worker_info().name
    note = sender, [None if gpu is None else gpu.index for gpu in gpus]
    pairs = zip(tensors, gpus, strict=True)
    return _with_note(data, note), [t if gpu is None else _copy(t) for t, gpu in pairs]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """What the tensor holds now: the program may write to it before it is sent."""
    _settle(tensor)
    with DisableTorchDispatch(), DisableTorchFunction():
        return tensor.clone()


def _settle(tensor: torch.Tensor) -> None:
    """Have the values that a collective writes."""
    for part in parts_of(tensor) or [tensor]:
        memory = memory_of(part)
        if memory is not None and memory.arriving is not None:
            memory.arriving.settle()


def deserialize(pickler, data: bytes, tensors: list[torch.Tensor]):
    """The object again, with its tensors where the device map says.

    Raises:
        RuntimeError: for a result on a GPU that the map does not name.
    """
    state.current().thread.deserialized += 1
    data, note = _without_note(data)
    if note is not None:
        sender, places = note
        if sender is not None:  # a result
            places = _at_home(sender, places)
        _place_all(tensors, places)
    return _raw_deserialize(pickler, data, tensors)


def to_here(rref, *args, **kwargs):
    """`RRef.to_here`: where C++ alone fetches tensors, the owner says where they are.

    Raises:
        RuntimeError: if the device map does not name their GPUs.
    """
    thread = state.current().thread
    before = thread.deserialized
    value = _raw_to_here(rref, *args, **kwargs)
    if thread.deserialized == before and not rref.is_owner():
        tensors = [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
        if tensors:
            owner = rref.owner_name()
            places = api.rpc_sync(owner, _places_of, args=(rref,))
            _place_all(tensors, _at_home(owner, places))
    return value


def _places_of(rref) -> list[int | None]:
    """The numbers of the GPUs on which a value's tensors are, at its owner."""
    leaves = tree_leaves(rref.local_value())
    gpus = [gpu_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [None if gpu is None else gpu.index for gpu in gpus]


def _place_all(tensors: list[torch.Tensor], places: list) -> None:
    for tensor, index in zip(tensors, places, strict=True):
        if index is not None:
            place(tensor, find_gpu(index))
            for part, block in blocks_of(tensor):
                state.current().sanitizer.arrived(part, block)


def _with_note(data: bytes, note: tuple) -> bytes:
    note = pickle.dumps(note)
    return data + note + len(note).to_bytes(_LENGTH, "little") + _MARK


def _without_note(data: bytes) -> tuple[bytes, tuple | None]:
    if not data.endswith(_MARK):
        return data, None
    end = len(data) - len(_MARK) - _LENGTH
    begin = end - int.from_bytes(data[end : end + _LENGTH], "little")
    return data[:begin], pickle.loads(data[begin:end])


def _device_map(worker: str) -> dict[int | None, int | None]:
    """This process's devices and those of a worker that stand for them.

    GPUs have a number; None is the host, which a map may name as well.
    """
    found = state.current().device_maps.get(worker, {})
    return {ours.index: theirs.index for ours, theirs in found.items()}


def _at_home(callee: str, places: list) -> list:
    """The caller's GPUs for results on GPUs of the callee."""
    caller = rpc_agent().get_worker_info().name
    reverse = {theirs: ours for ours, theirs in _device_map(callee).items()}
    return _mapped(reverse, places, "Response", caller)


def _mapped(device_map: dict, places: list, kind: str, destination: str) -> list:
    for index in places:
        if index is not None and index not in device_map:
            words = _ONLY_CPU.format(kind, destination)
            if device_map:
                words += f" for device cuda:{index} but received a tensor on that "
                words += "device."
            raise RuntimeError(words)
    return [device_map.get(index) for index in places]


# -- calls -----------------------------------------------------------------------------


def invoke_python(name: str):
    """`_invoke_rpc_python_udf` and the like: here it is known to which worker."""

    def invoke(worker, data: bytes, tensors: list, *rest):
        data, note = _without_note(data)
        if note is not None:
            places = _mapped(_device_map(worker.name), note[1], "Request", worker.name)
            data = _with_note(data, (None, places))
        return _raw_invoke[name](worker, data, tensors, *rest)

    return invoke


def invoke_builtin(name: str):
    """An operation of PyTorch, which C++ would send and run: with GPUs, Python does."""
    send = invoke_python(name.replace("builtin", "python_udf"))

    def invoke(worker, operation: str, timeout: float, *args, **kwargs):
        if not _names_gpu(args, kwargs):
            return _raw_invoke[name](worker, operation, timeout, *args, **kwargs)
        call = internal.PythonUDF(_run_builtin, (operation, args, kwargs), {})
        return send(worker, *rpc_pickler.serialize(call), timeout, False)

    return invoke


def _run_builtin(operation: str, args: tuple, kwargs: dict):
    space, _, name = operation.partition("::")
    return getattr(getattr(torch.ops, space), name)(*args, **kwargs)


def invoke_torchscript(name: str):
    """Its tensors would travel in C++ alone."""

    def invoke(*args, **kwargs):
        if _names_gpu(args, kwargs):
            raise NotSimulated("a TorchScript function with GPU tensors over RPC")
        return _raw_invoke[name](*args, **kwargs)

    return invoke


def _names_gpu(args, kwargs) -> bool:
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return any(map(gpu_of, tensors)) or "cuda" in str(kwargs.get("device"))


INVOKE = {
    name: (
        invoke_builtin if name.endswith("builtin")
        else invoke_python if name.endswith("udf") else invoke_torchscript
    )(name)
    for name in _raw_invoke
}  # fmt: skip


def run_function(call):
    """What another worker has called, in a thread that C++ has started."""
    runtime = state.current()
    runtime.clock.host = max(runtime.clock.host, runtime.clock.latest)
    with modes_in_this_thread(runtime):
        return raw_run_rpc_function(call)


def new_agent(store, name: str, rank: int, size: int | None, options, *maps):
    """PyTorch's agent, to which every tensor is one of the CPU: it has no maps."""
    state.current().device_maps = options.device_maps
    plain = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=options.num_worker_threads,
        rpc_timeout=options.rpc_timeout,
        init_method=options.init_method,
    )
    return _raw_agent(store, name, rank, size, plain, {}, [])


def get_device_map(agent, worker) -> dict[torch.device, torch.device]:
    """`TensorPipeAgent._get_device_map`: remote modules ask for it."""
    return state.current().device_maps.get(worker.name, {})


# -- distributed autograd --------------------------------------------------------------


class _Collectives(TorchDispatchMode):
    """Sees the collectives of DDP, which waits for each, and lets the rest pass."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        call = functools.partial(func, *args, **(kwargs or {}))
        if func.namespace != "c10d":
            return call()
        with modes_in_this_thread(state.current()):
            out = call()
        for leaf in tree_leaves((args, kwargs)):
            memory = memory_of(leaf) if isinstance(leaf, torch.Tensor) else None
            if memory is not None and memory.arriving is not None:
                work.Launched([memory.arriving], [], host_waits=False).wait()
                memory.arriving.settle()
        return out


def backward(*args, **kwargs) -> None:
    """`dist_autograd.backward`: in C++ alone, on all workers alike."""
    with disable_modes(), _Collectives():
        _raw_backward(*args, **kwargs)


def get_gradients(context: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients of a context, each where its tensor is."""
    found = _raw_get_gradients(context)
    for tensor, gradient in found.items():
        gpu = gpu_of(tensor)
        if gpu is not None and gpu_of(gradient) is None:
            place(gradient, gpu)
    return found
