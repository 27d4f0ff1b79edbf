"""Ranks with simulated GPUs: `torch.distributed` for scripts that ask for NCCL.

    torchrun --nproc-per-node=4 -m helpers.simgpu script.py

Every rank is a process with simulated GPUs of its own. gloo carries the values, and
`torch.distributed` is PyTorch's own, with DDP's reducer in C++.
Models: that NCCL takes tensors on GPUs only, and refuses two ranks on one GPU; the
time of a collective, as that of a ring over the cards' links, on the current stream.
Leaves out: waiting for a rank that is late (each rank has a clock of its own), that
NCCL has a stream of its own beside the computing (and so races with it), links between
machines, the memory of NCCL's buffers, and `ProcessGroupNCCL` with its options.
`replacements()` is this file's part of the table that `start()` applies.
"""

import atexit
import contextlib
import functools
import json
import multiprocessing.spawn
import os
import socket
import sys
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
_DUPLICATE = (
    "NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\nDuplicate GPU detected : rank {} and rank {} both on CUDA device {}"
)
_raw_new_group = distributed_c10d._new_process_group_helper
_raw_object_device = distributed_c10d._get_object_coll_device
_raw_mesh = DeviceMesh.__init__
_raw_then = torch._C.Future.then
_raw_preparation = multiprocessing.spawn.get_preparation_data
_raw_bootstrap = BaseProcess._bootstrap
program_gpus: dict | None = None  # for `start` in processes that the program spawns
_checked: set[str] = set()  # names of groups whose ranks are known to be on GPUs apart
made = 0  # process groups of this process that gloo carries in place of NCCL


# -- groups ----------------------------------------------------------------------------


def _new_group(group_size, group_rank, ranks, backend, *args, **kwargs):
    """A process group: where it would use NCCL, gloo does the work."""
    global made
    asked = str(backend)
    if not _wants_nccl(asked):
        return _raw_new_group(group_size, group_rank, ranks, backend, *args, **kwargs)
    kwargs["device_id"] = None  # gloo cannot connect before it is used
    if kwargs.pop("backend_options", None) is not None:
        raise NotSimulated("NCCL's options (pg_options=)", "Leave them out.")
    _stay_here(group_size)
    gloo = distributed_c10d.Backend("gloo")
    group, store = _raw_new_group(group_size, group_rank, ranks, gloo, *args, **kwargs)
    if isinstance(group, dist.ProcessGroup):
        distributed_c10d._world.pg_map[group] = (asked, store)  # for get_backend()
        made += 1
        _checked.discard(group.group_name)
        if made == 1 and group.rank() == 0:
            print(
                f"simulated GPUs in {group_size} processes: gloo answers for NCCL",
                file=sys.stderr,
                flush=True,
            )
    return group, store


def _stay_here(ranks: int) -> None:
    """Where all ranks are on one machine, no other need reach their sockets."""
    local = os.environ.get("LOCAL_WORLD_SIZE") == str(ranks)
    if LOOPBACK and (local or os.environ.get("MASTER_ADDR") in _LOOPBACK_ADDRESSES):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)


def _wants_nccl(backend: str) -> bool:
    return "nccl" in backend or backend == "undefined"


def _is_nccl(group: dist.ProcessGroup) -> bool:
    """Whether the group has NCCL alone, which knows only GPUs."""
    return distributed_c10d._world.pg_map.get(group, ("",))[0] == "nccl"


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
    gpus = list(dict.fromkeys(map(placement.gpu_of, tensors)))
    if func.namespace == "c10d" and func._schema.name != "c10d::barrier":
        _check(func, messages.group_in(args), gpus)
    out = func(*args, **kwargs)
    gpu = gpus[0] if gpus else None
    if gpu is None:
        return out
    for tensor in tree_leaves(out):
        if isinstance(tensor, torch.Tensor):
            placement.place(tensor, gpu)
    message = messages.message_of(func, args, kwargs)
    if message is not None and not mode.sim.thread.quiet:
        stream = mode.sim.thread.streams.get(gpu.index, 0)
        clock = mode.sim.clock
        clock.collective(gpu, stream, message.name, message.nbytes, message.sent)
    return out


def _check(func, group: dist.ProcessGroup, gpus: list) -> None:
    """What NCCL would refuse."""
    __tracebackhide__ = True
    if not _is_nccl(group):
        return
    if None in gpus:
        raise RuntimeError(_HOST_TENSOR)
    if len(gpus) > 1:
        raise ValueError("Tensors found on multiple devices")
    if func._schema.name not in ("c10d::send", "c10d::recv_"):
        _check_partners(group, gpus[0])


def _check_partners(group: dist.ProcessGroup, gpu) -> None:
    """In a group's first collective, no two ranks may be on one GPU.

    Raises:
        torch.distributed.DistBackendError: in NCCL's words.
    """
    __tracebackhide__ = True
    if group.group_name in _checked:
        return
    _checked.add(group.group_name)
    store = distributed_c10d._world.pg_map[group][1]
    machine = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', 0)}"
    store.set(f"simgpu/{group.rank()}", f"{machine} {gpu.ordinal}")
    seen: dict[bytes, int] = {}
    for rank in range(group.size()):
        its = store.get(f"simgpu/{rank}")  # waits for it, as NCCL does here
        first = seen.setdefault(its, rank)
        if first != rank and group.rank() in (first, rank):
            other = first + rank - group.rank()
            raise dist.DistBackendError(
                _DUPLICATE.format(group.rank(), other, gpu.ordinal)
            )


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
        replica = args[0] if name == "__init__" and args else ddp
        with _born_on(_gpu_of_module(replica)):
            return raw(ddp, *args, **kwargs)

    return method


def _then(future, callback):
    """What a hook does when a bucket has arrived: gloo's threads have no modes."""
    sim = placement.current()

    def in_modes(done):
        with sim.in_this_thread():
            return callback(done)

    return _raw_then(future, in_modes)


def _gpu_of_module(module):
    parameters = module.parameters() if hasattr(module, "_parameters") else ()
    first = next(iter(parameters), None)
    return None if first is None else placement.gpu_of(first)


# -- processes that the program spawns -------------------------------------------------


def _for_children(name: str) -> dict:
    """What multiprocessing tells a new process: its main module is `spawned`."""
    data = _raw_preparation(name)
    for kind in ("path", "name"):
        main = data.get(f"init_main_from_{kind}")
        if main is not None and program_gpus is not None:
            del data[f"init_main_from_{kind}"]
            word = {kind: main, "gpus": program_gpus}
            os.environ[TO_CHILDREN] = json.dumps(word)
            data["init_main_from_name"] = "helpers.simgpu.spawned"
            break
    return data


def _bootstrap(process, *args, **kwargs) -> int:
    """The life of a spawned process, which must not abort at its end."""
    status = _raw_bootstrap(process, *args, **kwargs)
    if made:
        leave(status)
    return status


def leave(status: int) -> None:
    """End a process in which gloo has run.

    Its threads may want Python's lock while Python takes itself down, which aborts the
    process: so end it before that, with all that a program may expect done.
    """
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
        (multiprocessing.spawn, "get_preparation_data", _for_children),
        (BaseProcess, "_bootstrap", _bootstrap),
        *((DistributedDataParallel, name, _on_replica(name)) for name in ours),
    ]
