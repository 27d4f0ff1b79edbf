"""Ranks with simulated GPUs: `torch.distributed` for scripts that ask for NCCL.

    torchrun --nproc-per-node=4 -m helpers.simgpu script.py

Every rank is a process with simulated GPUs of its own. gloo carries the values, and
`torch.distributed` is PyTorch's own, with DDP's reducer in C++.
Models: what NCCL refuses (tensors on the host, strided or sparse ones, two ranks on one
GPU, a rank that changes its GPU); the time of a collective, as that of a ring over the
cards' links, on the current stream.
Leaves out: waiting for a rank that is late (each rank has a clock of its own), that
NCCL has a stream of its own beside the computing (and so races with it), links between
machines, the memory of NCCL's buffers, `ProcessGroupNCCL` with its options, and what
gloo cannot do (it raises `NotSimulated`).
`replacements()` is this file's part of the table that `start()` applies.
"""

import atexit
import contextlib
import functools
import json
import multiprocessing.spawn
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
from torch.distributed import constants, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from helpers import messages
from helpers.ranks import LOOPBACK
from helpers.simgpu import placement
from helpers.simgpu.placement import NotSimulated

TO_CHILDREN = "HELPERS_SIMGPU_CHILD"  # the variable that tells them what they are
NCCL_VERSION = (2, 28, 9)  # what PyTorch 2.11 for CUDA 13.0 comes with
_LOOPBACK_ADDRESSES = ("localhost", "127.0.0.1", "::1")
_HOST_TENSOR = "No backend type associated with device type cpu"
_SPARSE = (
    "NCCL does not support all_reduce with sparse tensors. Please use dense tensors "
    "instead."
)
_NOT_BOUND = (
    "Attempt to perform collective on tensor not on device passed to init_process_group"
)
_DUPLICATE = (
    "NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\nDuplicate GPU detected : rank {} and rank {} both on CUDA device {}"
)
_MOVED = (
    "rank {} has used this process group on cuda:{} and comes with a tensor on cuda:{} "
    "now. NCCL would wait for a second connection, which the other ranks may never "
    "make. Is torch.cuda.set_device(rank) missing?"
)
_ALONE = (
    "rank {} has waited for rank {} in the first collective of a process group; that "
    "rank has not called it"
)
# in gloo's words: what NCCL can do and gloo cannot
_BEYOND_GLOO = re.compile(
    "does not support|Invalid scalar type|can't be cast|nsupported"
)

_raw_new_group = distributed_c10d._new_process_group_helper
_raw_object_device = distributed_c10d._get_object_coll_device
_raw_mesh = DeviceMesh.__init__
_raw_then = torch._C.Future.then
_raw_wait = torch._C._distributed_c10d.Work.wait
_raw_preparation = multiprocessing.spawn.get_preparation_data
_raw_bootstrap = BaseProcess._bootstrap
program_gpus: dict | None = None  # for `start` in processes that the program spawns
made = 0  # process groups of this process that gloo carries in place of NCCL


class _Seat:
    """What this rank does in a process group, by the group's name in `_seats`."""

    def __init__(self, bound: torch.device | None, earlier: int):
        self.bound = bound  # the GPU that was given as device_id
        self.ordinal: int | None = None  # of the GPU of its collectives so far
        self.earlier = earlier  # how many groups had this name before


_seats: dict[str, _Seat] = {}


# -- groups ----------------------------------------------------------------------------


def _new_group(size, rank, ranks, backend, store, name, *args, **kwargs):
    """A process group: where it would use NCCL, gloo does the work."""
    global made
    asked = str(backend)
    if "nccl" not in _backends(asked).values():
        return _raw_new_group(size, rank, ranks, backend, store, name, *args, **kwargs)
    bound = kwargs.pop("device_id", None)  # gloo cannot connect before it is used
    if kwargs.pop("backend_options", None) is not None:
        raise NotSimulated("NCCL's options (pg_options=)", "Leave them out.")
    if not ranks:
        _stay_here()
    before = _seats.get(name)
    earlier = 0 if before is None else before.earlier + 1
    if earlier:  # gloo would find the addresses of the group that had this name
        store = dist.PrefixStore(f"again {earlier}", store)
    gloo = distributed_c10d.Backend("gloo")
    group, store = _raw_new_group(size, rank, ranks, gloo, store, name, *args, **kwargs)
    if isinstance(group, dist.ProcessGroup):
        distributed_c10d._world.pg_map[group] = (asked, store)  # for get_backend()
        _seats[name] = _Seat(bound, earlier)
        made += 1
        if made == 1 and rank == 0:
            processes = "1 process" if size == 1 else f"{size} processes"
            print(
                f"simulated GPUs in {processes}: gloo answers for NCCL",
                file=sys.stderr,
                flush=True,
            )
    return group, store


def _stay_here() -> None:
    """Where all ranks are on one machine, no other need reach their sockets."""
    found = os.environ
    local = found.get("LOCAL_WORLD_SIZE", "many") == found.get("WORLD_SIZE")
    if LOOPBACK and (local or found.get("MASTER_ADDR") in _LOOPBACK_ADDRESSES):
        found.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)


@functools.cache
def _backends(asked: str) -> dict[str, str]:
    """Kind of device -> backend, for what a script has asked for."""
    if asked == "undefined":  # nothing: PyTorch takes what the machine has
        return {"cpu": "gloo", "cuda": "nccl"}
    config = distributed_c10d.BackendConfig(distributed_c10d.Backend(asked))
    return config.get_device_backend_map()


def _backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    asked, _ = distributed_c10d._world.pg_map.get(group, ("gloo", None))
    return _backends(str(asked))


def _is_nccl(group: dist.ProcessGroup) -> bool:
    """Whether the group has NCCL alone, which knows only GPUs."""
    return set(_backends_of(group).values()) == {"nccl"}


def _object_device(group: dist.ProcessGroup | None = None) -> str:
    """On which kind of device pickled objects travel."""
    if _is_nccl(group or dist.group.WORLD):
        return "cuda"
    return _raw_object_device(group)


# -- collectives -----------------------------------------------------------------------


def _run_collective(mode, op, func, args, kwargs, tensors):
    """An operation of c10d: check as NCCL does, let gloo run it, and time it."""
    __tracebackhide__ = True
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    name = func._schema.name
    if name == "c10d::barrier":
        return _run_barrier(mode.sim, func, args, kwargs)
    if func.namespace == "c10d":
        _check(name, messages.group_in(args), tensors)
    try:
        out = func(*args, **kwargs)
    except RuntimeError as error:
        if _BEYOND_GLOO.search(str(error)):
            raise NotSimulated(name, f"gloo, which answers for NCCL: {error}") from None
        raise
    gpu = placement.gpu_of(tensors[0]) if tensors else None
    if gpu is None:
        return out
    for tensor in tree_leaves(out):
        if isinstance(tensor, torch.Tensor):
            placement.place(tensor, gpu)
    message = messages.message_of(func, args, kwargs)
    if name == "c10d::recv_":
        message = messages.Message("", "recv", sum(t.nbytes for t in tensors), 2)
    if message is not None and not mode.sim.thread.quiet:
        moved = _moved(message, tensors)
        stream = mode.sim.thread.streams.get(gpu.index, 0)
        mode.sim.clock.collective(gpu, stream, message.name, message.nbytes, moved)
    return out


def _moved(message: messages.Message, tensors: list[torch.Tensor]) -> int:
    """Bytes that leave this rank's GPU, or come to it where those are more."""
    if message.ranks == 1:
        return 0
    if message.name not in ("gather", "scatter"):
        return message.sent
    here = sum(tensor.nbytes for tensor in tensors)
    if len(tensors) == 1:  # it sends its part, or takes it
        return here
    return here * (message.ranks - 1) // (message.ranks + 1)  # all but its own part


def _run_barrier(sim, func, args, kwargs):
    """NCCL's is a collective of almost nothing, for which the host waits."""
    out = func(*args, **kwargs)
    if "nccl" in _backends_of(messages.group_in(args)).values():
        gpu = sim.find(torch.device("cuda"))
        stream = sim.thread.streams.get(gpu.index, 0)
        sim.clock.collective(gpu, stream, "barrier", 0, 0)
        sim.clock.wait_for_stream(gpu.index, stream)
    return out


def _check(name: str, group: dist.ProcessGroup, tensors: list[torch.Tensor]) -> None:
    """What NCCL would refuse."""
    __tracebackhide__ = True
    backends = _backends_of(group)
    gpus = list(dict.fromkeys(map(placement.gpu_of, tensors)))
    if None in gpus and "cpu" not in backends:
        raise RuntimeError(_HOST_TENSOR)
    if backends.get("cuda") != "nccl" or gpus in ([None], []):
        return
    if len(gpus) > 1:
        raise ValueError("Tensors found on multiple devices")
    if any(tensor.layout is not torch.strided for tensor in tensors):
        raise RuntimeError(_SPARSE)
    if not all(map(_is_dense, tensors)):
        raise ValueError("Tensors must be contiguous")
    seat, (gpu,) = _seats[group.group_name], gpus
    if seat.bound is not None and seat.bound != gpu.device:
        raise dist.DistBackendError(_NOT_BOUND)
    if name in ("c10d::send", "c10d::recv_"):
        return
    if seat.ordinal is None:
        _meet_partners(group, gpu)
        seat.ordinal = gpu.ordinal
    elif seat.ordinal != gpu.ordinal:
        raise dist.DistBackendError(
            _MOVED.format(group.rank(), seat.ordinal, gpu.ordinal)
        )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side in memory, in whatever order."""
    expected = 1
    ways = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(way for way in ways if way[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _meet_partners(group: dist.ProcessGroup, gpu) -> None:
    """In a group's first collective, no two ranks may be on one GPU.

    Raises:
        torch.distributed.DistBackendError: in NCCL's words.
    """
    __tracebackhide__ = True
    store = distributed_c10d._world.pg_map[group][1]
    machine = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', 0)}"
    me = group.rank()
    store.set(f"simgpu/{me}", f"{machine} {gpu.ordinal}")
    seen: dict[bytes, int] = {}
    for rank in range(group.size()):
        try:
            its = store.get(f"simgpu/{rank}")  # waits for it, as NCCL does here
        except dist.DistStoreError:
            raise dist.DistBackendError(_ALONE.format(me, rank)) from None
        first = seen.setdefault(its, rank)
        if first != rank and me in (first, rank):
            both = _DUPLICATE.format(me, first + rank - me, gpu.ordinal)
            raise dist.DistBackendError(both)


def _wait(work, *args, **kwargs):
    """gloo's `wait` copies out of a buffer of its own, where NCCL has none."""
    thread = placement.current().thread
    thread.quiet += 1
    try:
        return _raw_wait(work, *args, **kwargs)
    finally:
        thread.quiet -= 1


placement.of_namespace["c10d"] = _run_collective
placement.of_namespace["_c10d_functional"] = _run_collective


def _mesh(mesh, device_type: str, *args, **kwargs) -> None:
    """FSDP2, tensor and pipeline parallel begin with a mesh of devices."""
    over_nccl = dist.is_initialized() and _is_nccl(dist.group.WORLD)
    if over_nccl or torch.device(device_type).type == "cuda":
        raise NotSimulated(
            "DeviceMesh('cuda')",
            "FSDP2, tensor and pipeline parallel need real GPUs, or a mesh of 'cpu' "
            "without helpers.simgpu.",
        )
    _raw_mesh(mesh, device_type, *args, **kwargs)


# -- DDP -------------------------------------------------------------------------------


@contextlib.contextmanager
def _born_on(gpu) -> Iterator[None]:
    """What C++ makes inside, such as the reducer's buckets, is on `gpu`."""
    thread = placement.running.thread
    before, thread.born_on = thread.born_on, gpu
    try:
        yield
    finally:
        thread.born_on = before


def _on_replica(name: str):
    """A method of DDP in which C++ makes tensors that go with the replica."""
    raw = getattr(DistributedDataParallel, name)

    @functools.wraps(raw)
    def method(ddp, *args, **kwargs):
        __tracebackhide__ = True
        replica = ddp
        if name == "__init__":
            replica = kwargs.get("module", args[0] if args else None)
            _check_replica(replica)
        with _born_on(_gpu_of_module(replica)):
            return raw(ddp, *args, **kwargs)

    return method


def _gpu_of_module(module):
    if not isinstance(module, torch.nn.Module):
        return None  # DDP will say so
    first = next(module.parameters(), None)
    return None if first is None else placement.gpu_of(first)


def _check_replica(module) -> None:
    """The reducer's buckets would be on one GPU.

    Raises:
        NotSimulated: for a module on several.
    """
    if isinstance(module, torch.nn.Module):
        gpus = {placement.gpu_of(parameter) for parameter in module.parameters()}
        if len(gpus - {None}) > 1:
            raise NotSimulated(
                "DistributedDataParallel of a module on several GPUs",
                "Give each rank one.",
            )


def _then(future, callback):
    """What a hook does when a bucket has arrived: gloo's threads have no modes."""
    sim = placement.current()

    def in_modes(done):
        with sim.in_this_thread():
            return callback(done)

    return _raw_then(future, in_modes)


# -- processes that the program spawns -------------------------------------------------


def _for_children(name: str) -> dict:
    """What multiprocessing tells a new process: its main module is `spawned`."""
    data = _raw_preparation(name)
    for kind in ("path", "name"):
        main = data.get(f"init_main_from_{kind}")
        if main is not None and program_gpus is not None:
            del data[f"init_main_from_{kind}"]
            # where objects of its classes, pickled in a child, are looked for
            sys.modules["__mp_main__"] = sys.modules["__main__"]
            word = {kind: main, "gpus": program_gpus}
            os.environ[TO_CHILDREN] = json.dumps(word)
            data["init_main_from_name"] = "helpers.simgpu.spawned"
            break
    return data


def _bootstrap(process, *args, **kwargs) -> int:
    """The life of a child of multiprocessing, which must not abort at its end."""
    status = _raw_bootstrap(process, *args, **kwargs)
    if made:
        leave(status)
    return status


def leave(status: int) -> None:
    """End a process in which gloo has run.

    Its threads may want Python's lock while Python takes itself down, which aborts the
    process: so end it before that, with all that a program may expect done.
    """
    threading._shutdown()  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def replacements() -> list[tuple[object, str, object]]:
    """(owner, attribute, new value) for everything in this file."""
    ours = ("__init__", "_pre_forward", "_post_forward")
    patience = timedelta(minutes=10)  # PyTorch's, where it is built with NCCL
    settings = [(constants, "default_pg_nccl_timeout", patience)]
    settings += [(distributed_c10d, "default_pg_nccl_timeout", patience)]
    return [
        (distributed_c10d, "_new_process_group_helper", _new_group),
        (distributed_c10d, "_get_object_coll_device", _object_device),
        (distributed_c10d, "is_nccl_available", lambda: True),
        (dist, "is_nccl_available", lambda: True),
        *settings,
        (torch.cuda.nccl, "version", lambda: NCCL_VERSION),
        (DeviceMesh, "__init__", _mesh),
        (torch._C.Future, "then", _then),
        (torch._C._distributed_c10d.Work, "wait", _wait),
        (multiprocessing.spawn, "get_preparation_data", _for_children),
        (BaseProcess, "_bootstrap", _bootstrap),
        *((DistributedDataParallel, name, _on_replica(name)) for name in ours),
    ]
